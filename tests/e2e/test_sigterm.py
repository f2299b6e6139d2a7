"""`specengine serve` as a process of its own, told to stop."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.processes import is_alive, serving
from tests.support.waiting import until


def test_sigterm_under_load_finishes_requests_and_leaves_no_child(tmp_path: Path) -> None:
    with serving(tmp_path, "--shutdown-timeout", "100") as served:
        fields = {"max_tokens": 100, "ignore_eos": True}
        shaped = {"structured_outputs": {"regex": "[ab]{40}"}}
        assert served.complete(**fields, **shaped).status_code == 200
        started = served.children()
        assert started  # among them a process that compiles grammars
        with served.stream(**fields) as events:
            next(events)
            served.process.send_signal(signal.SIGTERM)
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(120) == -signal.SIGTERM
    until(lambda: not any(map(is_alive, started)))
