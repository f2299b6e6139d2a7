"""The residual stream behind a layer that ranks share: added by whatever sums over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.core.parallel import Cut, split_over
from specengine.layers.linear import RowParallelLinear
from tests.support.pretended_ranks import PretendedRanks


class Summing(PretendedRanks):
    """Keeps what it is asked to add."""

    def __init__(self) -> None:
        super().__init__(2)
        self.given = list[tuple[Tensor, Tensor]]()

    def all_reduce_add(self, x: Tensor, stream: Tensor) -> Tensor:
        self.given.append((x, stream))
        return super().all_reduce_add(x, stream)


@pytest.mark.parametrize("has_bias", [False, True])
def test_product_is_rounded_alone_and_the_communicator_adds_the_stream(has_bias: bool) -> None:
    torch.manual_seed(0)
    ranks = Summing()
    with split_over(ranks), torch.no_grad():
        layer = RowParallelLinear(64, 24, has_bias, Cut(1, 0, 32, 64)).bfloat16()
        layer.plain.normal_()
        if layer.bias is not None:
            layer.bias.normal_()
        x, stream = torch.randn(3, 32).bfloat16(), 100 * torch.randn(3, 24).bfloat16()
        found = layer.add_few_rows(x, stream)
        product = F.linear(x, layer.plain, layer.bias)
    (given,) = ranks.given
    assert torch.equal(given[0], product)
    assert given[1] is stream
    assert torch.equal(found, stream + 2 * product)
