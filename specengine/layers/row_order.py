"""Checkpoints whose rows are in another order than the products here want them in.

Rows are output features. Where a tensor has a row an output, its rows are moved. Of what a
quantisation packs otherwise the tensors stay as they are, and the order goes beside them as one
more tensor of the layer, `row_order`: the weight that is made of them is reordered
(layers/quantization), whatever its format is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.layers.linear import PLAIN_TYPES
from specengine.layers.quantization.gguf import COLUMN_ORDER, KEPT
from specengine.layers.quantization.method import ROW_ORDER

RowOrders = Mapping[str, Tensor]  # name of a layer, its last part -> int64 [rows]


def reordered(
    weights: Iterable[tuple[str, Tensor]], orders: RowOrders
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor): row i of a layer in `orders` is row orders[layer][i] of the
    checkpoint's. Raises ModelLoadError for a tensor that has another number of rows."""
    seen: set[str] = set()
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        order = orders.get(path.rpartition(".")[2])
        if order is None or kind == COLUMN_ORDER:
            yield name, tensor
        elif has_rows(kind, tensor):
            if len(tensor) != len(order):
                raise ModelLoadError(
                    f"tensor {name} has shape {list(tensor.shape)}, the model needs {len(order)} "
                    "rows"
                )
            yield name, tensor[order]
        else:
            yield name, tensor
            if path not in seen:
                seen.add(path)
                yield f"{path}.{ROW_ORDER}", order


def has_rows(kind: str, tensor: Tensor) -> bool:
    """Whether a layer's tensor, of this leaf, has a row an output, of floating point or of a GGUF
    file's blocks. Other forms of quantisation may pack outputs together, or scale them so."""
    return kind in KEPT or (kind in ("weight", "bias") and tensor.dtype in PLAIN_TYPES)


def halves_of_pairs(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Of rows whose rotary pairs lie side by side, (2i, 2i + 1), those whose pairs lie half a
    rotation apart, (i, i + rotary_dim / 2): int64 [num_heads * head_dim]. Scores are sums over a
    head's rows, so that their order is free."""
    pairs = torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)
    order = torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads)[:, None] * head_dim + order).flatten()


def parts_of_heads(num_heads: int, sizes: Sequence[int]) -> Tensor:
    """Of rows in which each head has its parts, of these sizes, side by side, those of all heads'
    first parts, then of their second ones: int64 [num_heads * sum(sizes)]."""
    rows = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), dim=1)])
