"""`specengine verify` as a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine.cli.main import main
from specengine.cli.verify_view import Matrix
from specengine.engine.proof import engine_mutants, rules, suite
from specengine.engine.proof.check import Check
from specengine.engine.proof.matrix import EngineProof
from specengine.engine.proof.subjects import State, Subject
from specengine.engine.proof.suite import Section


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules have tests of their own, and so have mutants."""
    monkeypatch.setattr(rules, "rule_checks", lambda effort: iter(()))
    monkeypatch.setattr(suite, "of_rules", list)
    monkeypatch.setattr(suite, "of_drafts", list)
    monkeypatch.setattr(suite, "AROUND_RULES", engine_mutants.AROUND_RULES[1:2])
    plan = replace(
        suite.QUICK,
        engine=replace(suite.QUICK.engine, num_requests=6, draft_requests=20, greedy_tokens=10),
        states=suite.QUICK.states[:1],
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
        "χ² of all histograms",
        "ran as meant",
        "greedy identity",
        "greedy identity catches",
    }


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_without_a_model_everything_that_can_be_had(
    every: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In make test every third drafter really runs, and the rest is asked for."""
    proved = EngineProof.in_state, EngineProof.of_drafts
    seen: list[str] = []

    def in_state(proof: EngineProof, subject: Subject, state: State) -> Iterator[Check]:
        seen.append(subject.name)
        if len(seen) % every == 0:
            yield from proved[0](proof, subject, state)
        elif proof.config.spec.verify in subject.verifiers(drafter_of(proof, subject, state)):
            label = f"{subject.name}, {proof.config.spec.verify}; {state}"
            yield Check("ran as meant", label, 1.0, ">=", 0.5)

    def of_drafts(proof: EngineProof, subject: Subject) -> Iterator[Check]:
        return proved[1](proof, subject) if len(seen) % every == 0 else iter(())

    monkeypatch.setattr(EngineProof, "in_state", in_state)
    monkeypatch.setattr(EngineProof, "of_drafts", of_drafts)
    # On a GPU each of some thirty engines would capture its graphs first: minutes.
    found = report(capsys, "--speculative-verify", "sibling", "--device", "cpu")
    assert found["passed"]
    subjects = " ".join(check["subject"] for check in found["checks"])
    for algorithm in ("", "STANDALONE ", "EAGLE ", "EAGLE3 ", "MTP "):
        for shape in ("chain", "tree"):
            assert f"{algorithm}sampled {shape}, sibling" in subjects
    assert "NGRAM" not in subjects


def drafter_of(proof: EngineProof, subject: Subject, state: State) -> Any:
    return subject.build(proof.config, state, proof.loaded, proof.tokens).drafter


def test_an_algorithm_that_drafts_with_a_model_gets_a_tiny_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(capsys, "--speculative-algorithm", "nextn", "--speculative-verify", "match")
    assert found["passed"]
    assert any(check["subject"].startswith("nextn, match;") for check in found["checks"])


def test_options_of_no_algorithm_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--speculative-num-steps", "5"]) == 2
    assert "num-steps does nothing without --speculative-algorithm" in capsys.readouterr().err


def fake_sections(
    monkeypatch: pytest.MonkeyPatch, names: list[str], statistic: float = 0.0
) -> list[str]:
    """One check each; returns the names of those that are run."""
    ran: list[str] = []

    def run(name: str) -> Iterator[Check]:
        ran.append(name)
        yield Check("enumeration", name, statistic, "<=", 1e-12)

    def sections(*_: Any) -> Iterator[Section]:
        for name in names:
            yield Section(name, lambda name=name: run(name))  # type: ignore[misc]

    monkeypatch.setattr(suite, "sections", sections)
    return ran


def test_a_failure_is_shown_and_returned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sections(monkeypatch, ["block, chain"], statistic=0.25)
    assert main(["verify", "--quick"]) == 1
    shown = capsys.readouterr().out
    assert "FAILS" in shown
    assert "0 of 1 checks hold" in shown
    found = report(capsys)
    assert [check["passed"] for check in found["checks"]] == [False]
    assert found["checks"][0]["statistic"] == 0.25


def test_a_record_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "proof.jsonl"
    flags = ["--record", str(path)]
    first = fake_sections(monkeypatch, ["a", "b"])
    report(capsys, *flags)
    assert first == ["a", "b"]
    whole = path.read_text()
    assert json.loads(whole.splitlines()[0])["environment"].keys() >= {"cpu", "commit", "versions"}
    path.write_text(whole[:-5])  # cut off while "b" was written
    again = fake_sections(monkeypatch, ["a", "b", "c"])
    found = report(capsys, *flags)
    assert again == ["b", "c"]
    assert [check["subject"] for check in found["checks"]] == ["a", "b", "c"]
    assert main(["verify", "--quick", *flags, "--speculative-algorithm", "NGRAM"]) == 2
    assert "another proof" in capsys.readouterr().err


def test_parts_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = fake_sections(monkeypatch, ["a", "b", "c", "d", "e"])
    for part in ("1/2", "2/2"):
        report(capsys, "--part", part)
    assert ran == ["a", "c", "e", "b", "d"]
    for wrong in ("0/2", "3/2", "x", "1"):
        assert main(["verify", "--part", wrong]) == 2
        assert "--part" in capsys.readouterr().err


def test_the_matrix_says_where_something_fails() -> None:
    checks = [
        Check("χ² of the engine", "NGRAM, match; fresh", 0.5, ">=", 1e-6),
        Check("ran as meant", "NGRAM, match; fresh", 0.0, ">=", 0.5),
        Check("χ² of the engine", "NGRAM, match; chunked", 0.25, ">=", 1e-6),
    ]
    matrix = Matrix.of(checks)
    assert matrix.columns == ["fresh", "chunked"]
    assert matrix.cell("NGRAM, match", "fresh") == "FAILS: ran as meant"
    assert matrix.cell("NGRAM, match", "chunked") == "0.25"
    assert matrix.cell("NGRAM, match", "retracted") == ""


def test_lossy_rules_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick", "--speculative-verify", "relaxed"]) == 2
    assert "nothing to prove" in capsys.readouterr().err
