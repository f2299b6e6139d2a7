"""The shape of drafts: what is filled in, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM
from specengine.core.batch import ScheduleBatch
from specengine.core.config import DRAFT_MODEL, SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.options import Option
from specengine.core.registry import DRAFTERS, VERIFIERS
from specengine.core.spec import DraftProposal
from specengine.engine.spec_options import draft_slots, resolve_spec


class WideDrafter(Drafter):
    """Says that it proposes more than it was told to."""

    load_draft = staticmethod(lambda target: None)  # so that it counts as one with a model

    def __init__(self, max_nodes: int, draft_slots: int) -> None:
        self.max_nodes, self.draft_slots = max_nodes, draft_slots

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        raise AssertionError("the engine is not built")


class WideInNodes(WideDrafter):
    load_draft = None

    @classmethod
    def from_context(cls, context: DraftContext) -> Drafter:
        return cls(context.spec.max_nodes + 1, 0)


class WideInSlots(WideInNodes):
    @classmethod
    def from_context(cls, context: DraftContext) -> Drafter:
        return cls(context.spec.max_nodes, context.spec.max_nodes + 1)


def resolved(**fields: Any) -> tuple[int | None, int]:
    """num_steps and num_draft_tokens of what becomes of the options."""
    spec = resolve_spec(SpecConfig(**{"algorithm": "EAGLE3", **fields}))
    assert resolve_spec(spec) == spec, "resolving is done once, and again changes nothing"
    assert spec.num_draft_tokens is not None
    return spec.num_steps, spec.num_draft_tokens


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (3, 4)),
        ({"num_steps": 5}, (5, 6)),
        ({"num_draft_tokens": 6}, (5, 6)),
        ({"num_steps": 5, "num_draft_tokens": 6}, (5, 6)),
        ({"hybrid_suffix": True, "num_draft_tokens": 16}, (3, 16)),
        ({"hybrid_suffix": True, "num_draft_tokens": 16, "num_steps": 5}, (5, 16)),
        ({"eagle_topk": 4}, (3, 8)),
        ({"eagle_topk": 2, "num_steps": 2}, (2, 7)),
        ({"eagle_topk": 4, "num_steps": 6, "num_draft_tokens": 60}, (6, 60)),
        ({"hybrid_suffix": True, "suffix_factor": 3.0, "hybrid_suffix_min_match": 3}, (3, 4)),
        ({"verify": "relaxed", "relaxed_top_k": 2}, (3, 4)),
        ({"algorithm": "NGRAM"}, (None, 8)),
        ({"algorithm": "ngram", "num_draft_tokens": 5}, (None, 5)),
    ],
)
def test_what_was_left_out(fields: dict[str, Any], expected: tuple[int | None, int]) -> None:
    assert resolved(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": 3, "num_draft_tokens": 6}, "num-draft-tokens 6.*num-steps 3 has 4 nodes"),
        ({"num_steps": 3, "num_draft_tokens": 3}, "num-draft-tokens 3"),
        ({"eagle_topk": 2, "num_steps": 2, "num_draft_tokens": 8}, "at most 7 nodes"),
        ({"static_tree": True}, "static-tree needs --speculative-eagle-topk above 1"),
        ({"algorithm": "NGRAM", "eagle_topk": 2}, "--speculative-eagle-topk is for algorithms"),
        ({"algorithm": "SUFFIX", "num_steps": 2}, "--speculative-num-steps .* with SUFFIX"),
        ({"algorithm": "NGRAM", "draft_model_path": "x"}, "--speculative-draft-model-path"),
        ({"algorithm": "NGRAM", "draft_sampling": True}, "--speculative-draft-sampling"),
        ({"ngram_branches": 3}, "--speculative-ngram-branches does nothing without .* NGRAM"),
        ({"algorithm": "NGRAM", "suffix_factor": 3.0}, "--speculative-suffix-factor .* SUFFIX"),
        ({"relaxed_delta": 0.1}, "--speculative-relaxed-delta .* --speculative-verify relaxed"),
        ({"hybrid_suffix_min_match": 3}, "min-match .* without --speculative-hybrid-suffix"),
        ({"algorithm": "EAGEL"}, "EAGEL is not known; known are NGRAM"),
    ],
)
def test_what_contradicts_itself(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**fields)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"num_steps": 7}, "num-steps"),
        ({"draft_model_path": "somewhere"}, "draft-model-path"),
        ({"relaxed_top_k": 4}, "relaxed-top-k"),
        ({"verify": "relaxed"}, "verify"),
        ({"hybrid_suffix": True}, "hybrid-suffix"),
    ],
)
def test_without_an_algorithm_no_option_of_drafts_does_anything(
    fields: dict[str, Any], option: str
) -> None:
    message = f"-{option} does nothing without --speculative-algorithm; .* one of NGRAM"
    with pytest.raises(ConfigError, match=message):
        resolve_spec(SpecConfig(**fields))
    assert resolve_spec(SpecConfig()) == SpecConfig()


OWNED = [one for one in SpecConfig.options().values() if one.owners]


def other_value(option: Option) -> Any:
    """One that is not the default, and lies in the option's range."""
    if option.base in (bool, str):
        return not option.default if option.base is bool else "x"
    return option.default * 0.75 if option.base is float else (option.default or 1) + 1


@pytest.mark.parametrize("option", OWNED, ids=lambda option: option.name)
def test_option_is_refused_without_its_owner(option: Option) -> None:
    known = {*DRAFTERS, *VERIFIERS, *SpecConfig.options(), DRAFT_MODEL}
    assert known.issuperset(option.owners)
    algorithm = "SUFFIX" if "SUFFIX" not in option.owners else "NGRAM"
    with pytest.raises(ConfigError, match=f"{option.flag} (does nothing|is for algorithms)"):
        resolve_spec(SpecConfig(algorithm=algorithm, **{option.name: other_value(option)}))


def test_options_named_after_an_algorithm_or_a_rule_are_owned_by_it() -> None:
    for name in (*DRAFTERS, *VERIFIERS):
        named = [one for one in SpecConfig.options() if one.startswith(f"{name.lower()}_")]
        owners = [SpecConfig.options()[one].owners for one in named]
        assert all(name in one or DRAFT_MODEL in one for one in owners)


def test_kv_slots_of_a_tree() -> None:
    """Its root, and topk nodes of every level but the last."""
    assert draft_slots(resolve_spec(SpecConfig(algorithm="EAGLE", num_steps=5))) == 0
    tree = SpecConfig(algorithm="EAGLE", num_steps=5, eagle_topk=3)
    assert draft_slots(resolve_spec(tree)) == 13
    assert draft_slots(SpecConfig(algorithm="NGRAM")) == 0


def test_options_of_a_drafter_with_a_model_are_refused_under_other_algorithms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {"algorithm": "NGRAM", "simulate_accept_length": 2.0}
    resolved(**fields)
    monkeypatch.setitem(DRAFTERS, "SIMULATE", f"{__name__}:WideDrafter")
    options = dict(SpecConfig.options())
    owned = replace(options["simulate_accept_length"], owners=("SIMULATE",))
    monkeypatch.setattr(SpecConfig, "options", staticmethod(lambda: options | {owned.name: owned}))
    with pytest.raises(ConfigError, match=r"accept-length does nothing without .* SIMULATE"):
        resolved(**fields)
    assert resolve_spec(SpecConfig(**fields | {"algorithm": "simulate"})).num_steps == 3


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("WideInNodes", "proposes up to 6 nodes and rounds have 5; raise"),
        ("WideInSlots", "drafts in 6 KV slots and 5 are reserved"),
    ],
)
def test_drafter_larger_than_its_rounds_is_refused_when_the_engine_is_built(
    drafter: str, message: str, small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DRAFTERS, "WIDE", f"{__name__}:{drafter}")
    spec = SpecConfig(algorithm="WIDE", num_draft_tokens=5)
    with pytest.raises(ConfigError, match=f"{drafter} {message}"):
        LLM(str(small_models["llama"]), spec=spec, max_total_tokens=512)
