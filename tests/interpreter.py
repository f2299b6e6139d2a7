"""Triton's interpreter in half the time: at each launch, and at each function that a kernel calls,
it looks through its whole language to put its own operations there. Here they stay there."""

from __future__ import annotations

from functools import cache
from typing import Any


def keep_patched() -> None:
    """From now on, in this process; a Triton that has another way takes the time it does."""
    try:
        from triton.runtime import interpreter

        patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope
    except (ImportError, AttributeError):
        return

    @cache
    def once(function: Any) -> None:
        """All of the language that it sees."""
        patch(function)

    def patched(function: Any) -> Any:
        once(function)
        return nothing()

    interpreter._patch_lang = patched
