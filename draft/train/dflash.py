"""DFlash (Chen, Liang and Liu 2026, arXiv:2602.06036) to train: draft/dflash/model.py's equations.

A batch's blocks begin at anchors: rows of documents taken as a round's root. A block sees the
features of its document's rows before the anchor, and all of itself.

Shapes: R rows of the batch, A blocks of B rows each, F numbers a feature, H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.draft.train.documents import DraftRows
from specengine.draft.train.layer import DraftLayer, DraftNorm, rotate
from specengine.draft.train.unroll import Borrowed
from specengine.layers.layer_spec import LayerSpec

_LEAST_SCALE = 1e-3  # of a feature, relative to the mean of all
T = TypeVar("T")


@dataclass(frozen=True)
class Blocks:
    """anchors_A: int64, rows of the batch, ascending. lens: rows a document, summing up to R."""

    anchors_A: Tensor
    positions_A: Tensor  # int64, of the anchors in their documents
    lens: list[int]
    size: int  # B

    @classmethod
    def of(cls, rows: DraftRows, anchors_A: Tensor, size: int) -> Blocks:
        return cls(anchors_A, rows.positions[anchors_A], rows.lens, size)

    def rows_AB(self) -> Tensor:
        """int64 [A, B], the document row of each row of a block; past a document's end they are of
        others, and must not be read."""
        return self.anchors_A[:, None] + torch.arange(self.size, device=self.anchors_A.device)

    def attend(
        self, q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]
    ) -> Tensor:
        """q [A B, heads, D]; keys and values of context [R, kv_heads, D], and of the blocks
        themselves [A B, kv_heads, D] -> [A B, heads, D]."""
        parts, bounds = [], torch.tensor([0, *accumulate(self.lens)], device=q.device)
        cuts = torch.searchsorted(self.anchors_A, bounds).tolist()
        for document, begin in enumerate(bounds.tolist()[:-1]):
            first, last = cuts[document], cuts[document + 1]
            if first < last:
                rows = slice(begin, begin + self.lens[document])
                block = slice(first * self.size, last * self.size)
                keys, values = (
                    torch.cat([seen[rows], beside[block]])
                    for seen, beside in zip(context, own, strict=True)
                )
                mask = self._mask(self.positions_A[first:last], self.lens[document])
                parts.append(_attend(q[block], keys, values, mask))
        return torch.cat(parts)

    def _mask(self, positions_N: Tensor, length: int) -> Tensor:
        """bool [N B, length + N B], of N blocks of one document."""
        count = len(positions_N)
        before = torch.arange(length, device=positions_N.device) < positions_N[:, None]
        same = torch.eye(count, dtype=torch.bool, device=positions_N.device)
        return torch.cat(
            [
                before.repeat_interleave(self.size, 0),
                same.repeat_interleave(self.size, 0).repeat_interleave(self.size, 1),
            ],
            dim=1,
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    is_grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)


class DFlashDraft(nn.Module):
    """Parameters are called as in z-lab's checkpoints, but for `fc`, which reads features divided
    by feature_scale, each by its own; `checkpoint_fc` is the same map on features as they are."""

    feature_scale: Tensor  # float32 [F]

    def __init__(
        self,
        shape: LayerSpec,
        num_layers: int,
        feature_size: int,
        borrowed: Borrowed,
        mask_token_id: int,
    ) -> None:
        super().__init__()
        self.borrowed, self.mask_token_id = borrowed, mask_token_id
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(feature_size, size, bias=False)
        self.hidden_norm = DraftNorm(size, eps)
        self.layers = nn.ModuleList(
            DraftLayer(shape, size, has_hidden_norm=False) for _ in range(num_layers)
        )
        self.norm = DraftNorm(size, eps)
        self.register_buffer("feature_scale", torch.ones(feature_size), persistent=False)

    def forward(self, rows: DraftRows, blocks: Blocks, judge: Callable[[Tensor], T]) -> T:
        """What `judge` makes of what the head reads, [A, B, H]."""
        scaled = (rows.features / self.feature_scale).to(rows.features.dtype)
        context = self.hidden_norm(self.fc(scaled))
        tokens_AB = torch.full_like(blocks.rows_AB(), self.mask_token_id)
        tokens_AB[:, 0] = rows.input_ids[blocks.anchors_A]
        stream = F.embedding(tokens_AB.flatten(), self.borrowed.embed_table)
        steps = torch.arange(blocks.size, device=stream.device)
        places = (blocks.positions_A[:, None] + steps).flatten()
        # Rows that would reach past the table reach past their document too.
        places = places.clamp(max=len(self.borrowed.cos_sin) - 1)
        tables = self.borrowed.cos_sin[rows.positions], self.borrowed.cos_sin[places]
        for layer in cast(Iterable[DraftLayer], self.layers):
            stream = _run(layer, stream, context, tables, blocks)
        return judge(self.norm(stream).view(*tokens_AB.shape, -1))

    def checkpoint_fc(self) -> Tensor:
        return self.fc.weight.detach() / self.feature_scale

    @torch.no_grad()
    def begin(self, features: Tensor, final_norm: Tensor) -> None:
        """Values to start from. features [T, F]: a sample of the target's. final_norm [H]: the
        weight of the target's norm, before whose head the draft has one too. Context begins as the
        last of the features, with a little of the others."""
        size = len(final_norm)
        scale = features.float().abs().median(dim=0).values
        self.feature_scale.copy_(scale.clamp_min(_LEAST_SCALE * float(scale.mean())))
        nn.init.normal_(self.fc.weight, std=0.1 * self.fc.in_features**-0.5)
        self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)
        self.norm.weight.copy_(final_norm)
        for layer in cast(Iterable[DraftLayer], self.layers):
            layer.begin()


def _run(
    layer: DraftLayer,
    stream: Tensor,
    context: Tensor,
    tables: tuple[Tensor, Tensor],
    blocks: Blocks,
) -> Tensor:
    """stream [A B, H], context [R, H]; tables: cosines and sines of the context's rows and of the
    blocks'."""
    attention = layer.self_attn
    q, k, v = attention(layer.input_layernorm(stream), tables[1])
    seen_k, seen_v = (
        project(context).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.k_proj, attention.v_proj)
    )
    if attention.k_norm is not None:
        seen_k = attention.k_norm(seen_k)
    heads = blocks.attend(q, (rotate(seen_k, tables[0]), seen_v), (k, v))
    return layer.finish(heads, stream)
