"""What makes a vector of a text's hidden states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pooling:
    """mode: "last", the last token's hidden state after the final norm, or "mean", of all tokens.
    normalises: vectors have the length 1."""

    mode: str
    normalises: bool

    @property
    def needs_all(self) -> bool:
        """Every token's hidden state: none may come from the prefix cache."""
        return self.mode == "mean"
