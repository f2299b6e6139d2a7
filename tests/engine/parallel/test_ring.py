"""Messages through shared memory: whole, in order, of any length."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import SamplingParams, SpecControl
from specengine.engine.parallel.messages import Add, Decided, Step, decode, encode
from specengine.engine.parallel.ring import Ring


@pytest.fixture
def ends() -> Iterator[tuple[Ring, Ring]]:
    """The two ends of a ring of 100 bytes."""
    writer = Ring.create(100)
    reader = Ring(os.dup(writer.file))
    yield writer, reader
    reader.close()
    writer.close()


def nothing() -> None:
    pass


def test_messages_come_whole_and_in_order(ends: tuple[Ring, Ring]) -> None:
    """Short ones, some that wrap around, and some that are longer than the ring."""
    writer, reader = ends
    sent = [bytes([n % 256]) * (n * 37 % 350) for n in range(200)]

    def write() -> None:
        for message in sent:
            writer.write(message, nothing)

    thread = threading.Thread(target=write)
    thread.start()
    assert [reader.read(nothing) for _ in sent] == sent
    thread.join()
    assert writer.unread == reader.unread == 0


_WRITER = """
import sys
from specengine.engine.parallel.ring import Ring
ring = Ring(int(sys.argv[1]))
for number in range(int(sys.argv[2])):
    ring.write(number.to_bytes(8, "little"), lambda: None)
"""


def test_reader_of_another_process_never_sees_half_a_counter() -> None:
    """A reader that looks all the time, while the writer moves its counter."""
    reader, count = Ring.create(1 << 12), 100_000
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", _WRITER, str(reader.file), str(count)]
    with subprocess.Popen(arguments, env=environment, pass_fds=[reader.file]) as process:

        def check() -> None:
            assert process.poll() in (None, 0)

        found = [int.from_bytes(reader.read(check), "little") for _ in range(count)]
    assert found == [*range(count)]
    reader.close()


def test_waiting_ends_where_the_other_is_gone(ends: tuple[Ring, Ring]) -> None:
    writer, reader = ends

    def gone() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        reader.read(gone)
    with pytest.raises(InterruptedError):
        writer.write(b"x" * 500, gone)


def test_requests_are_told_with_all_that_they_ask() -> None:
    sampling = SamplingParams(
        max_tokens=None,
        temperature=0.1,
        logit_bias={5: -1.5},
        stop=("a", "b"),
        seed=2**62 - 1,
        visible_special_ids=frozenset({3}),
        grammar=GrammarSpec.regex("a+", "field"),
        speculative=SpecControl(num_steps=2),
    )
    for message in (Add(1, "r", [5, 7], sampling), Step(2, 2**32 - 1), Decided([0, -1])):
        assert decode(encode(message)) == message
