"""On which SMs rounds run: on all, or on those that prompts beside them leave."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specengine.engine.round.key import RoundKey
from specengine.runner.capture import capturing_on


@dataclass
class RoundLanes:
    """streams: on which rounds are captured, by the share of the SMs that prompts have beside them.
    share: that they have now; None is none, and such rounds run on all SMs.

    A graph keeps the SMs of the stream that it was captured on. A round of one share runs beside
    prompts of another, too, and is slower: the two contend for SMs.
    """

    streams: Mapping[float, torch.cuda.Stream] = field(default_factory=dict)
    share: float | None = None
    num_on_all: int = 0  # rounds beside prompts for which there was no graph of their share

    def key_of(self, key: RoundKey, captured: Container[RoundKey]) -> RoundKey:
        """The same round, on the SMs that prompts leave now, where it was captured there."""
        if self.share is None:
            return key
        beside = key._replace(share=self.share)
        if beside in captured:
            return beside
        self.num_on_all += 1
        return key

    def keys_of(self, key: RoundKey) -> list[RoundKey]:
        """The same round beside prompts of every share. Grammars send masks amid a round, whose
        parts run on all SMs."""
        return [] if key.sampling.masks else [key._replace(share=share) for share in self.streams]

    def forget_shares(self) -> None:
        """Rounds run on all SMs from now on."""
        self.streams = {}

    @contextmanager
    def capturing(self, key: RoundKey) -> Iterator[None]:
        with capturing_on(self._stream_of(key)):
            yield

    def run(self, key: RoundKey, replay: Callable[[], object]) -> None:
        """Replay on the stream of the key's SMs, behind the current one, which goes on after it."""
        stream = self._stream_of(key)
        if stream is None:
            replay()
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            replay()
        torch.cuda.current_stream().wait_stream(stream)

    def _stream_of(self, key: RoundKey) -> torch.cuda.Stream | None:
        return None if key.share is None else self.streams.get(key.share)
