"""The runner of clients knows every script, and its page tells of every client."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.clients.catalogue import CLIENTS
from tests.e2e.clients.server import HERE

HELPERS = {"catalogue.py", "checks.py", "run.py", "server.py"}
PAGE = Path(__file__).resolve().parents[2] / "docs/clients.md"


def test_every_script_belongs_to_a_client() -> None:
    named = {one.script for one in CLIENTS}
    named |= {one.reference for one in CLIENTS if one.reference is not None}
    assert named == {path.name for path in HERE.glob("*.py")} - HELPERS


def test_no_environment_installs_torch() -> None:
    assert not any("torch" in one for client in CLIENTS for one in client.packages)


def test_the_page_tells_of_every_client() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [one.name for one in CLIENTS]
