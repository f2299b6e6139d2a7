"""What algorithms are called."""

from __future__ import annotations

ALIASES = {"NEXTN": "MTP"}


def algorithm_name(name: str) -> str:
    """As the registry has it, in capitals and without aliases. Does not check that it is there."""
    return ALIASES.get(name.upper(), name.upper())
