"""What a recorder notes of rounds written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.lab.accept.recorder import AcceptRecorder, entropies, path_confidence
from specengine.lab.accept.rounds import RoundChunk

VOCAB = 4


def batch_of(*temperatures: float) -> ScheduleBatch:
    reqs = [
        Req(f"{i}#0", [1, 2, 3], SamplingParams(temperature=t), output_ids=[3] * (i + 1))
        for i, t in enumerate(temperatures)
    ]
    return ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.DECODE,
        input_ids=[req.last_token for req in reqs],
        prefix_lens=[req.seq_len - 1 for req in reqs],
        extend_lens=[1] * len(reqs),
        samples=[True] * len(reqs),
        sampling=SamplingBatch.from_reqs(reqs, VOCAB, torch.device("cpu")),
    )


def record(proposal: DraftProposal, result: VerifyResult, logits: torch.Tensor) -> RoundChunk:
    recorder, batch = AcceptRecorder(), batch_of(*[0.0] * len(proposal.num_nodes))
    for req in reversed(batch.reqs):
        recorder.number(req.rid)
    recorder.record(batch, proposal, LogitsOutput(logits), result)
    [chunk] = recorder.chunks
    return chunk


def uniform_over(*counts: int) -> torch.Tensor:
    """Logits with a row each that is uniform over so many tokens: its entropy is log(count)."""
    return torch.stack(
        [torch.where(torch.arange(VOCAB) < count, 0.0, float("-inf")) for count in counts]
    )


def test_a_chain() -> None:
    """Two requests: of a draft of 2, one stands; of a draft of 1, all."""
    proposal = DraftProposal(
        tokens=torch.tensor([[3, 1, 2], [3, 2, 0]]),
        parents=torch.arange(-1, 2).expand(2, -1),
        num_nodes=[3, 2],
        is_chain=True,
    )
    result = VerifyResult([[1, 0], [2, 3]], [1, 1], [2, 1], kv_keep=None)
    chunk = record(proposal, result, uniform_over(1, 2, 3, 4, 1))
    assert chunk.request.tolist() == [1, 0]
    assert chunk.start.tolist() == [1, 2]
    assert chunk.context.tolist() == [4, 5]
    assert chunk.num_drafted.tolist() == [2, 1]
    assert chunk.lengths.tolist() == [2, 2]
    assert chunk.goes_on.tolist() == [True, False]
    assert chunk.tokens.tolist() == [1, 0, 2, 3]
    # rows 0 and 1 of the first request's three, 0 and 1 of the second's two
    assert chunk.entropy == pytest.approx([0, math.log(2), math.log(4), 0], abs=1e-6)
    assert chunk.nodes is None


def test_rows_follow_the_nodes_that_exist() -> None:
    proposal = DraftProposal(
        tokens=torch.zeros(3, 3, dtype=torch.int64),
        parents=torch.arange(-1, 2).expand(3, -1),
        num_nodes=[1, 3, 2],
        is_chain=True,
    )
    result = VerifyResult([[1], [0, 0, 2], [1]], [0, 2, 0], [0, 2, 1], kv_keep=None)
    chunk = record(proposal, result, uniform_over(4, 3, 2, 1, 2, 4))
    assert np.exp(chunk.entropy) == pytest.approx([4, 3, 2, 1, 2])
    assert chunk.goes_on.tolist() == [False, False, True]


def test_a_tree() -> None:
    r"""
        0          0
       / \         |
      1   2        1
         / \
        3   4            0 - 2 - 4 stands, and 4 has no child; in the other, nothing does.
    """
    proposal = DraftProposal(
        tokens=torch.tensor([[3, 0, 1, 2, 0], [3, 1, 0, 0, 0]]),
        parents=torch.tensor([[-1, 0, 0, 2, 2], [-1, 0, 0, 0, 0]]),
        num_nodes=[5, 2],
        is_chain=False,
        confidence=torch.tensor([[1.0, 0.4, 0.5, 0.3, 0.2], [1.0, 0.7, 0.0, 0.0, 0.0]]),
    )
    result = VerifyResult([[1, 0, 3], [2]], [2, 0], [4, 1], kv_keep=[[0, 2, 4], [0]])
    chunk = record(proposal, result, uniform_over(4, 1, 2, 1, 3, 2, 1))
    assert chunk.goes_on.tolist() == [False, True]
    logs = [math.log(4), math.log(2), math.log(3), math.log(2)]
    assert chunk.entropy == pytest.approx(logs, abs=1e-6)
    assert chunk.nodes is not None
    assert chunk.nodes.row.tolist() == [0, 0, 0, 0, 1]
    assert chunk.nodes.confidence == pytest.approx([0.4, 0.5, 0.3, 0.2, 0.7])
    assert chunk.nodes.stood.tolist() == [False, True, False, True, False]


def test_padding_of_a_tree_is_nobody() -> None:
    """Parents of nodes that do not exist are undefined: 0 is no child of node 0 there."""
    proposal = DraftProposal(
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        parents=torch.tensor([[-1, 0, 0], [-1, 0, 0]]),
        num_nodes=[3, 1],
        is_chain=False,
    )
    result = VerifyResult([[3], [3]], [0, 0], [2, 0], kv_keep=[[0], [0]])
    chunk = record(proposal, result, uniform_over(1, 1, 1, 1))
    assert chunk.goes_on.tolist() == [True, False]


def test_an_empty_proposal() -> None:
    roots = torch.tensor([[3], [3]])
    proposal = DraftProposal(roots, torch.full_like(roots, -1), [1, 1], is_chain=True)
    chunk = record(proposal, VerifyResult([[0], [1]], [0, 0], [0, 0], None), uniform_over(2, 3))
    assert chunk.num_drafted.tolist() == [0, 0]
    assert not chunk.goes_on.any()
    assert chunk.entropy == pytest.approx([math.log(2), math.log(3)])


def test_entropy_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specengine.layers.logits._MAX_ELEMENTS", 2 * VOCAB)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([8, 0, 3, 3, 5])
    logs = logits[rows].double().log_softmax(-1)
    wanted = -(logs.exp() * logs).sum(-1)
    assert torch.allclose(entropies(logits, rows).double(), wanted, atol=1e-6)


def test_confidence_of_sampled_drafts_is_the_chance_of_the_path() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.25, 0.25], [0.2, 0.2, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    proposal = DraftProposal(
        tokens=torch.tensor([[3, 1, 0, 2]] * 2),
        parents=torch.tensor([[-1, 0, 1, 0]] * 2),
        num_nodes=[4, 3],
        is_chain=False,
        draft_probs=torch.cat([torch.full((1, VOCAB), float("nan")), weights]).expand(2, -1, -1),
    )
    found = path_confidence(proposal, batch_of(1.0, 1.0).sampling)
    assert found is not None
    # 1 / 2, then 1 / 2 below it, and 1 / 4 beside them
    assert found[0].tolist() == pytest.approx([1.0, 0.5, 0.25, 0.25])
    assert found[1, :3].tolist() == pytest.approx([1.0, 0.5, 0.25])
    mixed = path_confidence(proposal, batch_of(1.0, 0.0).sampling)
    assert mixed is not None
    assert np.isnan(mixed[1].numpy()).all()
    assert path_confidence(proposal, batch_of(0.0, 0.0).sampling) is None
