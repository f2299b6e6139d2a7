"""Notes what every round decided."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.lab.accept.rounds import Array, NodeChunk, RoundChunk
from specengine.layers.logits import row_chunks
from specengine.target.verify.rows import ancestors


class AcceptRecorder:
    """A RoundRecorder. Requests are numbered in the order in which `number` was called with them.

    What lies on the device comes over in one copy a round; nothing is done a token at a time."""

    def __init__(self) -> None:
        self.chunks: list[RoundChunk] = []
        self._numbers: dict[str, int] = {}

    def number(self, rid: str) -> None:
        """rid: the engine's own, of one choice."""
        self._numbers[rid] = len(self._numbers)

    @torch.inference_mode()
    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        lengths = np.array([len(tokens) for tokens in result.tokens])
        path = _path_nodes(result, lengths)
        num_nodes = np.array(proposal.num_nodes)
        first_rows = np.cumsum(num_nodes) - num_nodes
        rows = torch.from_numpy(np.repeat(first_rows, lengths) + path)
        entropy = entropies(output.logits, rows.to(output.logits.device, non_blocking=True))
        confidence = path_confidence(proposal, batch.sampling)
        parents = None if proposal.is_chain else proposal.parents
        said, above = _optional(confidence), _optional(parents)
        entropy_L, *optional = _fetch([entropy, *said, *above], output.logits.device)
        confidence_BN = optional[0] if said else None
        parents_BN = optional[-1] if above else None
        ends = path[np.cumsum(lengths) - 1]
        self.chunks.append(
            RoundChunk(
                request=np.array([self._numbers[req.rid] for req in batch.reqs]),
                start=np.array([len(req.output_ids) for req in batch.reqs]),
                context=np.array([req.seq_len for req in batch.reqs]),
                num_drafted=num_nodes - 1,
                goes_on=_goes_on(ends, num_nodes, parents_BN),
                lengths=lengths,
                tokens=np.array(list(chain.from_iterable(result.tokens))),
                entropy=entropy_L,
                nodes=_nodes(confidence_BN, num_nodes, path, lengths),
            )
        )


def entropies(logits_TV: Tensor, rows: Tensor) -> Tensor:
    """float32 [len(rows)], in nats, of the softmax of these rows: the model's own distribution at
    temperature 1, whatever the request samples with."""
    parts = [
        torch.special.entr(logits_TV[rows[chunk]].float().softmax(-1)).sum(-1)
        for chunk in row_chunks(len(rows), logits_TV.shape[1])
    ]
    return torch.cat(parts).clamp(min=0.0)  # a probability may round above 1


def path_confidence(proposal: DraftProposal, sampling: SamplingBatch) -> Tensor | None:
    """float32 [B, N], the drafter's probability that the path down to a node is accepted: what
    it says itself, or else the probability that it drew the path with. NaN where it says nothing,
    as of greedy requests; None where it never does."""
    if proposal.confidence is not None or proposal.draft_probs is None:
        return proposal.confidence
    weights_BNV = proposal.draft_probs
    tokens_BN1 = proposal.tokens[:, :, None].clamp(0, weights_BNV.shape[2] - 1)
    drawn_BN = weights_BNV.gather(2, tokens_BN1).squeeze(2) / weights_BNV.sum(-1)
    drawn_BN[:, 0] = 1.0  # the root's row is undefined
    logs_BNN = drawn_BN.log()[:, None, :].where(ancestors(proposal), 0.0)
    confidence_BN = logs_BNN.sum(-1).exp()
    if sampling.random is None:
        return None
    greedy_B1 = sampling.random.greedy.to(confidence_BN.device)[:, None]
    return confidence_BN.masked_fill(greedy_B1, float("nan"))


def _path_nodes(result: VerifyResult, lengths: Array) -> Array:
    """Nodes of the accepted paths, root first, one request after another."""
    if result.kv_keep is not None:
        return np.array(list(chain.from_iterable(result.kv_keep)))
    starts = np.cumsum(lengths) - lengths
    place: Array = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return place


def _goes_on(ends: Array, num_nodes: Array, parents_BN: Array | None) -> Array:
    """bool [B], whether the node at which a path ends has children."""
    if parents_BN is None:
        chain_goes_on: Array = ends < num_nodes - 1
        return chain_goes_on
    exists_BN = np.arange(parents_BN.shape[1]) < num_nodes[:, None]
    tree_goes_on: Array = ((parents_BN == ends[:, None]) & exists_BN).any(-1)
    return tree_goes_on


def _nodes(
    confidence_BN: Array | None, num_nodes: Array, path: Array, lengths: Array
) -> NodeChunk | None:
    if confidence_BN is None:
        return None
    stood_BN = np.zeros(confidence_BN.shape, dtype=bool)
    stood_BN[np.repeat(np.arange(len(lengths)), lengths), path] = True
    node_N = np.arange(confidence_BN.shape[1])
    known_BN = (node_N > 0) & (node_N < num_nodes[:, None]) & ~np.isnan(confidence_BN)
    return NodeChunk(known_BN.nonzero()[0], confidence_BN[known_BN], stood_BN[known_BN])


def _optional(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _fetch(tensors: list[Tensor], device: torch.device) -> list[Array]:
    """As float32 on the host, in one copy. Node numbers are exact in it."""
    there = [tensor.to(device, torch.float32, non_blocking=True) for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in there]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in there])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
