"""Facts about a measurement."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from specengine.lab.environment import environment, environment_line, sha256_of_files


def test_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/specengine", "bench", "a b"])
    facts = environment("specengine")
    assert facts["command"] == "specengine bench 'a b'"
    assert environment()["command"] == "python /somewhere/specengine bench 'a b'"
    assert facts["versions"]["torch"].split(".")[0].isdigit()
    line = environment_line(facts)
    assert line.startswith(f"commit {facts['commit']}, ")
    assert f"torch {facts['versions']['torch']}" in line


def test_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.delenv("SPECENGINE_COMMIT", raising=False)
    monkeypatch.setattr("subprocess.run", missing)
    assert environment()["commit"] == "unknown"
    monkeypatch.setenv("SPECENGINE_COMMIT", "abc1234")
    assert environment()["commit"] == "abc1234"


def test_hashes_of_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    alone = hashlib.sha256(b"one").hexdigest()
    assert sha256_of_files([first]) == alone
    both = f"{alone}  a.safetensors\n{hashlib.sha256(b'two').hexdigest()}  b.safetensors\n"
    assert sha256_of_files([second, first]) == hashlib.sha256(both.encode()).hexdigest()
