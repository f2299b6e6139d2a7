"""Whole engines that answer prompts greedily with an EAGLE-3 chain, and count what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any


@dataclass(frozen=True)
class Setup:
    target: str
    draft: str
    dtype: str
    num_steps: int
    max_tokens: int
    stop_token_ids: list[int]
    options: dict[str, Any]  # the engine's own, by its own names


@dataclass
class Answers:
    """To one prompt set. accepted: by position in the draft. tokens: of each answer, without the
    token that stopped it."""

    rounds: int
    accepted: list[int]
    tokens: list[list[int]]

    @property
    def tau(self) -> float:
        return 1 + sum(self.accepted) / self.rounds


Engine = Callable[[list[list[int]]], Answers]  # prompts as token ids


def specengine(setup: Setup) -> tuple[str, Engine]:
    from specengine.core.config import SpecConfig
    from specengine.core.config_sources import config_from_flags
    from specengine.core.sampling import SamplingParams
    from specengine.engine.build import build_engine, load
    from specengine.engine.phases import Phases

    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=setup.draft, num_steps=setup.num_steps)
    flags = {"model": setup.target, "dtype": setup.dtype, "disable_radix_cache": True}
    config = config_from_flags(flags | setup.options, spec)
    engine = build_engine(config, load(config, Phases()))
    counter = RoundCounter(setup.num_steps, setup.max_tokens)
    engine.host_round.recorders.append(counter)
    sampling = SamplingParams(
        temperature=0.0,
        # This engine drafts no more than may still be said; the peers always draft the whole chain.
        max_tokens=setup.max_tokens + setup.num_steps,
        stop_token_ids=tuple(setup.stop_token_ids),
    )

    def answer(prompts: list[list[int]]) -> Answers:
        counter.clear()
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, sampling)
        tokens = [list[int]() for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                tokens[int(output.rid)] = list(output.token_ids)
        return Answers(counter.rounds, counter.accepted, _cut(tokens, setup))

    return "specengine", answer


class RoundCounter:
    """A RoundRecorder: counts as the peers do, rounds that begin within an answer, and of the last
    one also what comes after the end."""

    def __init__(self, num_steps: int, max_tokens: int) -> None:
        self.num_steps, self.max_tokens = num_steps, max_tokens
        self.clear()

    def clear(self) -> None:
        self.rounds, self.accepted = 0, [0] * self.num_steps

    def record(self, batch: Any, proposal: Any, output: Any, result: Any) -> None:
        counts = zip(batch.reqs, result.num_drafted, result.num_accepted, strict=True)
        for req, drafted, accepted in counts:
            if len(req.output_ids) >= self.max_tokens:
                continue
            self.rounds += drafted > 0
            for position in range(accepted):
                self.accepted[position] += 1


def vllm(setup: Setup) -> tuple[str, Engine]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=setup.target,
        dtype=setup.dtype,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": setup.draft,
            "num_speculative_tokens": setup.num_steps,
        },
        **({"enable_prefix_caching": False} | setup.options),
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=setup.max_tokens,
        stop_token_ids=setup.stop_token_ids,
        detokenize=False,
    )

    def counted() -> list[int]:
        """Rounds, then accepted by position."""
        metrics = {one.name: one for one in llm.get_metrics()}
        rounds: Any = metrics.get("vllm:spec_decode_num_drafts")
        accepted: Any = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        if rounds is None or accepted is None:
            return [0] * (1 + setup.num_steps)
        return [int(rounds.value), *map(int, accepted.values)]

    def answer(prompts: list[list[int]]) -> Answers:
        before = counted()
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        rounds, *accepted = (new - old for new, old in zip(counted(), before, strict=True))
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        return Answers(rounds, accepted, _cut(tokens, setup))

    return f"vLLM {version('vllm')}", answer


def sglang(setup: Setup) -> tuple[str, Engine]:
    from sglang import Engine as SglangEngine

    engine = SglangEngine(
        model_path=setup.target,
        dtype=setup.dtype,
        skip_tokenizer_init=True,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=setup.draft,
        speculative_num_steps=setup.num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=setup.num_steps + 1,
        **({"disable_radix_cache": True} | setup.options),
    )
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": setup.max_tokens,
        "stop_token_ids": setup.stop_token_ids,
    }

    def answer(prompts: list[list[int]]) -> Answers:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        # Of each request, how many of its rounds accepted 0, 1, 2, ... drafts.
        histograms = [one["meta_info"].get("spec_accept_histogram", []) for one in outputs]
        positions = range(1, setup.num_steps + 1)
        accepted = [sum(sum(one[position:]) for one in histograms) for position in positions]
        tokens = [list(one["output_ids"]) for one in outputs]
        return Answers(sum(map(sum, histograms)), accepted, _cut(tokens, setup))

    return f"SGLang {version('sglang')}", answer


ENGINES = {"specengine": specengine, "vllm": vllm, "sglang": sglang}


def _cut(answers: list[list[int]], setup: Setup) -> list[list[int]]:
    """Engines differ in whether the token that stops is part of the answer."""
    stop, length = set(setup.stop_token_ids), setup.max_tokens
    cut = [tokens[:length] for tokens in answers]
    return [tokens[:-1] if tokens and tokens[-1] in stop else tokens for tokens in cut]
