"""What algorithms are called."""

from __future__ import annotations

ALIASES = {"NEXTN": "MTP"}


def algorithm_name(name: str) -> str:
    """As the registry has it, in capitals and without aliases; nobody has checked that it does."""
    return ALIASES.get(name.upper(), name.upper())
