"""The scripted engine of the server's tests."""

from __future__ import annotations

from tests.server.conftest import engine, site

__all__ = ["engine", "site"]
