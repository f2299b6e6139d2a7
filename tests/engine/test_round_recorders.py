"""Recorders see each round as it was decided."""

from __future__ import annotations

from pathlib import Path

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult


class Emitted:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        [nodes], [tokens], [req] = proposal.num_nodes, result.tokens, batch.reqs
        assert output.logits.shape[0] == nodes
        assert proposal.tokens[0, 0].item() == req.output_ids[-1], "before the commit"
        self.tokens += tokens


def test_recorders_see_emitted_tokens_before_the_commit(small_models: dict[str, Path]) -> None:
    llm = LLM(
        str(small_models["llama"]),
        SpecConfig(algorithm="NGRAM", adaptive=False),
        dtype="float32",
        max_total_tokens=1024,
    )
    emitted = Emitted()
    llm.engine.host_round.recorders.append(emitted)
    [one] = llm.generate("abcabcabc", SamplingParams(max_tokens=20, ignore_eos=True))
    assert emitted.tokens[: len(one.token_ids) - 1] == one.token_ids[1:]
