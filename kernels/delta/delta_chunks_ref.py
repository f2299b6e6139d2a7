"""The gated delta rule over whole runs of tokens, a chunk at a time, in PyTorch on any device.

Within a chunk, the deltas of its tokens solve a triangular system (Yang et al. 2024,
arXiv:2406.06484, section 3; with decay arXiv:2412.06464, section 3.3). With D[i, j] the decay from
token j to token i, and S the memory before the chunk::

    (1 + write_i * (k_i . k_j) * D[i, j], j < i) delta = write * (v - D[i, before] * S^T k)
    out_i = D[i, before] * S^T q_i + sum over j <= i of D[i, j] * (q_i . k_j) * delta_j
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.kernels.delta.delta_rule_ref import Tokens, convolve, tokens_of
from specengine.kernels.delta.types import (
    CHUNK,
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    PromptBatch,
)


@dataclass(frozen=True)
class Run:
    """The tokens start .. end - 1 of the batch, which follow what a slot holds."""

    start: int
    end: int
    row: Tensor  # int64 [1], of the state pool
    is_new: bool
    ends: list[tuple[int, Tensor | int]]  # where a state is kept, and in which slot; the last: row


def runs_of(batch: PromptBatch) -> list[Run]:
    """One a request."""
    runs, start, are_new = [], 0, [one == 0 for one in batch.prefix_lens]
    for index, (count, is_new) in enumerate(zip(batch.lens, are_new, strict=True)):
        row = batch.rows_B[index : index + 1]
        ends: list[tuple[int, Tensor | int]] = [
            (start + one.length, one.slot) for one in batch.saves if one.request == index
        ]
        end = start + count
        runs.append(Run(start, end, row, is_new, [*ends, (end, row)]))
        start = end
    return runs


def extend(
    given: DeltaInputs,
    weights: DeltaWeights,
    state: DeltaState,
    batch: PromptBatch,
    shape: DeltaShape,
) -> Tensor:
    """Run the tokens of each request, and leave its state behind the last -> float32 [T, M, E]."""
    outs = [_run(given, weights, state, run, shape) for run in runs_of(batch)]
    return torch.cat(outs)


def _run(
    given: DeltaInputs, weights: DeltaWeights, state: DeltaState, run: Run, shape: DeltaShape
) -> Tensor:
    before = shape.conv_width - 1
    history = state.inputs[run.row][0] * (not run.is_new)
    line = torch.cat([history, given.mixed_TC[run.start : run.end]])
    mixed = convolve(line.unfold(0, shape.conv_width, 1).transpose(1, 2), weights.conv_CW)
    rows = slice(run.start, run.end)
    tokens = tokens_of(mixed, given.write_TM[rows], given.decay_TM[rows], weights, shape)
    memory = state.memory[run.row][0] * (not run.is_new)
    outs, cuts = [], [run.start, *(end for end, _ in run.ends)]
    for (first, last), (_, slot) in zip(pairwise(cuts), run.ends, strict=True):
        part = slice(first - run.start, last - run.start)
        if first < last:
            out, memory = chunked(_cut(tokens, part), memory)
            outs.append(out)
        state.memory[slot] = memory
        state.inputs[slot] = line[part.stop : part.stop + before]
    return torch.cat(outs)


def _cut(tokens: Tokens, part: slice) -> Tokens:
    return Tokens(
        tokens.q[part], tokens.k[part], tokens.v[part], tokens.write[part], tokens.decay_log[part]
    )


def chunked(tokens: Tokens, memory: Tensor, size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """n tokens, at least one, and the memory before them [M, K, E] -> [n, M, E] and the memory
    behind them. Padding at the end writes nothing, and keeps all that there is."""
    count = len(tokens.q)
    size = min(size, count)
    q, k, v, write, decay_log = (
        _by_chunk(one, size)
        for one in (tokens.q, tokens.k, tokens.v, tokens.write, tokens.decay_log)
    )
    kept = decay_log.cumsum(-1)  # [M, chunks, size], log of the decay since the chunk began
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = (kept[..., :, None] - kept[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    system = write[..., None] * (k @ k.transpose(-1, -2)) * between
    from_start = kept.exp()[..., None]
    wanted = write[..., None] * torch.cat([v, k * from_start], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    attention = (q @ k.transpose(-1, -2)) * between
    q_then = q * from_start
    k_then = (k * (kept[..., -1:] - kept).exp()[..., None]).transpose(-1, -2)
    whole = kept[..., -1].exp()[..., None, None]
    outs = []
    for chunk in range(q.shape[1]):
        deltas = values[:, chunk] - reads[:, chunk] @ memory
        outs.append(q_then[:, chunk] @ memory + attention[:, chunk] @ deltas)
        memory = memory * whole[:, chunk] + k_then[:, chunk] @ deltas
    out = torch.stack(outs, 1).flatten(1, 2)[:, :count]
    return out.transpose(0, 1), memory


def _by_chunk(x: Tensor, size: int) -> Tensor:
    """[n, M, ...] -> [M, chunks, size, ...], padded with zeros."""
    missing = -len(x) % size
    padded = F.pad(x, (*[0, 0] * (x.dim() - 1), 0, missing))
    heads = padded.transpose(0, 1)
    return heads.reshape(len(heads), -1, size, *x.shape[2:])
