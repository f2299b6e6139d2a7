"""Everything that `specengine verify` proves, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.sampling import SamplingParams
from specengine.engine.build import load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.proof import rules
from specengine.engine.proof.check import Check
from specengine.engine.proof.joint import Continuations, LogitProbe, Text
from specengine.engine.proof.mutants import WrongResidual
from specengine.engine.proof.runs import (
    MAX_MUTANT_P,
    MIN_P,
    TIES,
    Run,
    complete,
    divergences,
    histogram,
    sample,
)
from specengine.engine.proof.sampling_drafter import SamplingDrafter
from specengine.engine.proof.shapes import CHAIN, TREE
from specengine.engine.proof.subjects import (
    CHUNKED,
    FRESH,
    PLAIN,
    PREFIX_HIT,
    RETRACTED,
    State,
    Subject,
)
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.target.verify.sampled import SampledVerifier

_TEXTS = (
    "to be or not to be, that is the question: to be or not to be, that is",
    "The quick brown fox jumps over the lazy dog, and the quick brown fox",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a",
    "0123456789012345678901234567890123456789",
    "x",
)
_NUM_TOKENS = 3  # that output is made of where histograms are taken
_PROMPT_LENGTH = 24
_LENGTH = 4  # tokens of the joint histograms
_MUTANT_STEP = 500

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "penalties": {
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.01,
    },
    "all parameters": {
        "temperature": 1.3,
        "top_k": 2,
        "top_p": 0.95,
        "min_p": 0.05,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.01,
    },
}
_ALL = "all parameters"


@dataclass(frozen=True)
class Plan:
    """How much is tried."""

    rules: rules.Effort
    num_requests: int  # of each histogram
    mutant_requests: int  # at most, before a mutant counts as missed; 0 tries none
    states: tuple[State, ...]
    settings: tuple[str, ...]  # tried on fresh requests; all states see all parameters at once
    greedy_tokens: int


QUICK = Plan(
    rules=rules.QUICK,
    num_requests=400,
    mutant_requests=8000,
    states=(State(FRESH), State(PREFIX_HIT, 16)),
    settings=(),
    greedy_tokens=16,
)
FULL = Plan(
    rules=rules.FULL,
    num_requests=2000,
    mutant_requests=8000,
    states=tuple(
        State(kind, size) for kind in (FRESH, PREFIX_HIT, CHUNKED, RETRACTED) for size in (1, 16)
    ),
    settings=tuple(SETTINGS),
    greedy_tokens=40,
)


def default_subjects(standalone: str | None = None) -> list[Subject]:
    """Ways to draft that need no checkpoint, as chains and trees, and with the model at the path
    `standalone` as a draft model."""
    drafted = SpecConfig(num_draft_tokens=6, ngram_min_match=1)
    ngram, suffix = replace(drafted, algorithm="NGRAM"), replace(drafted, algorithm="SUFFIX")
    subjects = [
        Subject("NGRAM chain", ngram),
        Subject("NGRAM tree", replace(ngram, ngram_branches=3)),
        Subject("SUFFIX chain", suffix),
        Subject("SUFFIX tree", replace(suffix, suffix_branches=3)),
        Subject("sampled chain", SpecConfig(), CHAIN),
        Subject("sampled tree", SpecConfig(), TREE),
    ]
    if standalone is not None:
        spec = SpecConfig(algorithm="STANDALONE", draft_model_path=standalone, num_steps=3)
        subjects.append(Subject("STANDALONE chain", spec))
        spec = replace(spec, draft_sampling=True)
        subjects.append(Subject("STANDALONE sampled chain", spec))
    return subjects


def verify(config: EngineConfig, subjects: list[Subject], plan: Plan) -> Iterator[Check]:
    """All checks, as they are made, of the verifier that the configuration names, or of all. Raises
    ConfigError or ModelLoadError."""
    if config.spec.verify == "relaxed":
        raise ConfigError("--speculative-verify relaxed is lossy: there is nothing to prove")
    yield from rules.rule_checks(plan.rules)
    yield from EngineProof(config, plan).checks(subjects)


class EngineProof:
    """Subjects through the real engine on one model, whose weights they share."""

    def __init__(self, config: EngineConfig, plan: Plan) -> None:
        plain = replace(config, spec=SpecConfig())
        self.config = config
        self.plan = plan
        self.loaded: LoadedModel = load(plain, Phases())
        self.plain = PLAIN.build(plain, State(FRESH), self.loaded, [])
        self.probe = LogitProbe(self.plain)
        self.prompts = [self.loaded.tokenizer(text)["input_ids"] for text in _TEXTS]
        self.tokens = self._few_tokens(self.prompts[0])
        self.texts = Continuations(self.probe, self._prompt(), self.tokens, _LENGTH)
        self._expected: dict[bool, list[list[int]]] = {}

    def checks(self, subjects: list[Subject]) -> Iterator[Check]:
        for subject in subjects:
            for state in self.plan.states:
                engine = subject.build(self.config, state, self.loaded, self.tokens)
                for name, verifier in subject.verifiers(engine.drafter).items():
                    if self.config.spec.verify not in ("auto", name):
                        continue
                    judged = Engine(replace(engine.parts, verifier=verifier))
                    yield from self._state(judged, f"{subject.name}, {name}; {state}", state)
                    if state == State(FRESH):
                        yield from self._settings(judged, f"{subject.name}, {name}")
        if self.plan.mutant_requests:
            yield self._mutant()

    def _state(self, engine: Engine, subject: str, state: State) -> Iterator[Check]:
        run = self._sample(engine, _ALL, state)
        yield Check("χ² of the engine", subject, self._p(run, _ALL), ">=", MIN_P)
        yield run.check(subject, state)
        yield self._greedy(engine, subject)

    def _settings(self, engine: Engine, subject: str) -> Iterator[Check]:
        for setting in self.plan.settings:
            p = self._p(self._sample(engine, setting, State(FRESH)), setting)
            yield Check("χ² of the engine", f"{subject}; {setting}", p, ">=", MIN_P)

    def _mutant(self) -> Check:
        subject = Subject("sampled chain", SpecConfig(verify="block"), CHAIN)
        parts = subject.build(self.config, State(FRESH), self.loaded, self.tokens).parts
        assert isinstance(parts.verifier, SampledVerifier)
        engine = Engine(replace(parts, verifier=WrongResidual(parts.verifier)))
        params = replace(self._params("temperature"), max_tokens=_LENGTH)
        seen: Counter[Text] = Counter()
        p = 1.0
        while p > MAX_MUTANT_P and seen.total() < self.plan.mutant_requests:
            run = sample(engine, self.texts, params, _MUTANT_STEP, first_seed=seen.total())
            seen += histogram(run, self.texts)
            p = self.texts.p_value(seen, params)
        name = f"{subject.name}, block: {WrongResidual.name}"
        note = f"after {seen.total()} requests"
        return Check("χ² of the engine catches", name, p, "<=", MAX_MUTANT_P, note)

    def _sample(self, engine: Engine, setting: str, state: State) -> Run:
        """Requests that may be retracted go on for longer than the histogram looks."""
        state.provoke(engine)
        tight = state.kind == RETRACTED
        params = replace(self._params(setting), max_tokens=6 * _LENGTH if tight else _LENGTH)
        return sample(engine, self.texts, params, self.plan.num_requests // (4 if tight else 1))

    def _p(self, run: Run, setting: str) -> float:
        return self.texts.p_value(histogram(run, self.texts), self._params(setting))

    def _params(self, setting: str) -> SamplingParams:
        bias = dict.fromkeys(self.tokens, 100.0)
        return SamplingParams(ignore_eos=True, logit_bias=bias, **SETTINGS[setting])

    def _greedy(self, engine: Engine, subject: str) -> Check:
        """Drafts of a few tokens are only ever right where output is made of them."""
        biased = isinstance(engine.drafter, SamplingDrafter)
        params = SamplingParams(
            max_tokens=self.plan.greedy_tokens,
            temperature=0.0,
            ignore_eos=True,
            logit_bias=dict.fromkeys(self.tokens, 100.0) if biased else {},
        )
        prompts = [*self.prompts, self.texts.prompt]
        many = [params] * len(prompts)
        if biased not in self._expected:
            self._expected[biased] = complete(self.plain, prompts, many).outputs
        found, expected = complete(engine, prompts, many).outputs, self._expected[biased]
        dtype = self.loaded.config.model.dtype
        return divergences(self.probe, prompts, params, found, expected, TIES[dtype]).check(subject)

    def _few_tokens(self, prompt: list[int]) -> list[int]:
        """The likeliest after the prompt, none of which ends a text."""
        logits_V = self.probe.logits([prompt])[0]
        logits_V[list(self.plain.parts.eos_ids)] = float("-inf")
        found: list[int] = logits_V.topk(_NUM_TOKENS).indices.tolist()
        return found

    def _prompt(self) -> list[int]:
        """Repeats itself often enough for drafts from its own text."""
        order = torch.randint(
            _NUM_TOKENS, (_PROMPT_LENGTH,), generator=torch.Generator().manual_seed(0)
        )
        return [self.tokens[i] for i in order.tolist()]
