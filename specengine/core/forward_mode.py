"""What kind of forward a batch asks for."""

from __future__ import annotations

from enum import Enum, auto


class ForwardMode(Enum):
    """EXTEND: several new tokens a request (prefill). DECODE: exactly one. MIXED: an extend batch
    that carries decoding requests as one-token extends. IDLE: zero tokens. TARGET_VERIFY: the
    nodes of a draft, ragged, perhaps under a tree mask. DRAFT_EXTEND: a drafter catching up on
    accepted tokens, or running one level of its tree; in rounds on the device these are DECODE or
    TARGET_VERIFY too (runner/row_batches.py). SPLIT_PREFILL: an extend that runs a range of layers
    a call."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()
    SPLIT_PREFILL = auto()

    def is_prefill(self) -> bool:
        """Takes prompt tokens in (EXTEND, MIXED, SPLIT_PREFILL)."""
        return self in _PREFILL

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL


_PREFILL = frozenset({ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL})
