"""The chance in accepting, apart from the rules that weigh it: proofs put scripts in its place."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specengine.core.random_streams import Stream, draw
from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.accept.accept_sampled_ref import pick_by


class Coins(Protocol):
    """One coin for each node of each request."""

    def pick(self, chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        """Which of K events that exclude each other happens to the coin of each node: int64 [B, M],
        K where none does. chances: float64, summing up to at most 1. An event of chance 0 never
        happens."""
        ...


class KeyedCoins:
    """Uniforms keyed by the output position of a node's token and by the node's index."""

    stream = Stream.ACCEPT

    def __init__(self, uniforms_BN: Tensor) -> None:
        self.uniforms_BN = uniforms_BN  # float64 in [0, 1)

    @classmethod
    def draw(cls, sampling: SamplingBatch, depths_BN: Tensor) -> KeyedCoins:
        assert sampling.random is not None
        assert sampling.output_pos is not None
        lanes_BN = depths_BN.new_ones(depths_BN.shape).cumsum(1) - 1
        positions_BN = sampling.output_pos[:, None] + depths_BN - 1
        seeds_BN = sampling.random.seeds[:, None].expand_as(depths_BN)
        flat = [x.reshape(-1) for x in (seeds_BN, positions_BN, lanes_BN)]
        return cls(draw(flat[0], flat[1], cls.stream, flat[2]).view(depths_BN.shape))

    def pick(self, chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        return pick_by(self.uniforms_BN)(chances_BMK, nodes_BM)
