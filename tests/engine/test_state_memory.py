"""Sizes of the state pool, in a machine whose memory is given."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from specengine import LLM
from specengine.core.errors import OutOfMemoryError
from specengine.core.platforms.cpu import HostMemory
from specengine.engine.memory_build import DEFAULT_SNAPSHOTS
from specengine.memory.state_pool import StateSizes
from specengine.runner.memory.kept_state import state_shape_of

REQUESTS = 40
TOKENS = 512


class Machine:
    """Its memory may be given to engines whole, and holds nothing yet."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = str(folder)
        self.num_bytes = 1 << 34
        for name in ("used", "current", "peak"):
            monkeypatch.setattr(HostMemory, name, lambda memory: 0)
        monkeypatch.setattr(HostMemory, "total", lambda memory: self.num_bytes)

    def start(self, snapshots: int | None = None, tokens: int | None = TOKENS) -> LLM:
        return LLM(
            self.folder,
            device="cpu",
            dtype="float32",
            mem_fraction_static=1.0,
            max_total_tokens=tokens,
            max_running_requests=REQUESTS,
            max_state_snapshots=snapshots,
        )


@pytest.fixture
def machine(small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(small_models["qwen3next"], monkeypatch)


def sizes_of(llm: LLM) -> StateSizes:
    states = llm.engine.parts.worker.runner.pools.states
    assert states is not None
    return states.sizes


def needed_bytes(llm: LLM, snapshots: int) -> int:
    """Of the KV of TOKENS tokens and of the states beside it."""
    runner = llm.engine.parts.worker.runner
    shape, sizes = state_shape_of(runner.model), sizes_of(llm)
    assert shape is not None
    states = StateSizes(sizes.rows, snapshots, sizes.nodes).num_bytes(shape)
    return states + TOKENS * runner.pools.token_to_kv_pool.shape.bytes_per_token


def test_snapshots_are_as_many_as_memory_allows(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    ample = machine.start()
    assert sizes_of(ample).snapshots == DEFAULT_SNAPSHOTS
    assert "memory is short" not in caplog.text
    for count in (7, 0):
        machine.num_bytes = needed_bytes(ample, count)
        with caplog.at_level(logging.WARNING):
            llm = machine.start()
        assert sizes_of(llm).snapshots == count
        assert llm.engine.stats().num_slots == TOKENS
        assert f"memory is short: {count} snapshots of recurrent state" in caplog.text
        assert llm.generate(["to be or not to be"] * 2)[0].token_ids
    machine.num_bytes -= 4096
    with pytest.raises(OutOfMemoryError, match=r"lower --max-running-requests$"):
        machine.start()


def test_snapshots_that_are_asked_for_are_kept_or_refused(machine: Machine) -> None:
    ample = machine.start(snapshots=50)
    assert sizes_of(ample).snapshots == 50
    machine.num_bytes = needed_bytes(ample, 50) - 4096
    with pytest.raises(OutOfMemoryError, match=r"or --max-state-snapshots$"):
        machine.start(snapshots=50)
    assert sizes_of(machine.start(snapshots=49)).snapshots == 49
    assert sizes_of(machine.start()).snapshots == DEFAULT_SNAPSHOTS


def test_snapshots_leave_half_to_kv_where_it_has_no_limit(machine: Machine) -> None:
    """The context is TOKENS long: what 10 snapshots would take is for 5 and for more KV."""
    machine.num_bytes = needed_bytes(machine.start(), 10)
    llm = machine.start(tokens=None)
    assert sizes_of(llm).snapshots == 5
    assert llm.engine.stats().num_slots > TOKENS
