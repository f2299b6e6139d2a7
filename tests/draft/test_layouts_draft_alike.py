"""The engine's drafts, round by round, are what a plain reading of the checkpoint says, in the
layout of SGLang and in that of speculators and vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.eagle.convert import Conversion, convert
from specengine.draft.loaded import draft_directory
from specengine.runner.loader.builtin import shipped_directory
from tests.draft.eagle_reading import EagleReading

STEPS = 4
PROMPTS = ["Give me three tips for a long walk.", "Write a function that adds two numbers."]


@dataclass(frozen=True)
class Round:
    text: list[int]  # the root is its last token
    drafted: list[int]


@dataclass
class Keeper:
    rounds: list[Round] = field(default_factory=list)

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        for req, tokens, count in zip(
            batch.reqs, proposal.tokens.tolist(), proposal.num_nodes, strict=True
        ):
            self.rounds.append(Round(list(req.token_ids), tokens[1:count]))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = shipped_directory("tiny")
    folder = tmp_path_factory.mktemp("layouts") / "speculators"
    how = Conversion("speculators", "tiny", ("LlamaForCausalLM",), head_from=target)
    convert("tiny-eagle3", folder, how)
    return folder


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_the_same_drafts_as_a_plain_reading(layout: str, converted: Path) -> None:
    draft = draft_directory("tiny-eagle3") if layout == "sglang" else converted
    spec = SpecConfig(
        algorithm="EAGLE3", draft_model_path=str(draft), num_steps=STEPS, adaptive=False
    )
    llm = LLM("tiny", spec, dtype="float32", device="cpu", disable_radix_cache=True)
    keeper = Keeper()
    llm.engine.host_round.recorders.append(keeper)
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    reading = EagleReading(draft, shipped_directory("tiny"))
    drafting = [one for one in keeper.rounds if one.drafted]
    assert len(drafting) > 8
    assert any(len(one.drafted) == STEPS for one in drafting)
    reading.read(one.text for one in drafting)
    for one in drafting:
        logits = reading.logits(one.text, one.drafted[:-1])
        assert reading.target_ids[logits.argmax(-1)].tolist() == one.drafted
