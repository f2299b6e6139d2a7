"""`specengine verify` as a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine.cli.main import main
from specengine.engine.proof import rules, suite
from specengine.engine.proof.check import Check


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules have tests of their own."""
    monkeypatch.setattr(rules, "rule_checks", lambda effort: iter(()))
    plan = replace(
        suite.QUICK,
        num_requests=60,
        mutant_requests=0,
        states=suite.QUICK.states[:1],
        greedy_tokens=8,
    )
    monkeypatch.setattr(suite, "QUICK", plan)


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    status = main(["verify", "--quick", "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if found["passed"] else 1)
    return found


def test_the_algorithm_asked_for(
    small_models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    ngram = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-min-match", "1"]
    found = report(capsys, str(small_models["llama"]), *ngram)
    assert found["passed"]
    subjects = {check["subject"].partition(";")[0] for check in found["checks"]}
    assert {"NGRAM, match", "NGRAM, target_only"} <= subjects
    assert {check["check"] for check in found["checks"]} == {
        "χ² of the engine",
        "ran as meant",
        "greedy identity",
    }


def test_without_a_model_everything_that_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--speculative-verify", "sibling")
    assert found["passed"]
    subjects = " ".join(check["subject"] for check in found["checks"])
    for name in ("sampled chain", "sampled tree", "STANDALONE sampled chain"):
        assert f"{name}, sibling" in subjects
    assert "NGRAM" not in subjects


def test_a_failure_is_shown_and_returned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Iterator[Check]:
        yield Check("enumeration", "block, chain", 0.25, "<=", 1e-12)
        yield Check("enumeration", "match, chain", 0.0, "<=", 1e-12)

    monkeypatch.setattr(suite, "verify", fails)
    assert main(["verify", "--quick"]) == 1
    shown = capsys.readouterr().out
    assert "FAILS" in shown
    assert "1 of 2 checks hold" in shown
    found = report(capsys)
    assert [check["passed"] for check in found["checks"]] == [False, True]
    assert found["checks"][0]["statistic"] == 0.25


def test_lossy_rules_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick", "--speculative-verify", "relaxed"]) == 2
    assert "nothing to prove" in capsys.readouterr().err
