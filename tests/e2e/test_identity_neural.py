"""Drafters with a model through the real engine: no token changes, and drafts really stand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import LLM, SamplingParams, SpecConfig
from specengine.draft.standalone.worker import StandaloneWorker
from tests.draft import eagle_checkpoints as checkpoints
from tests.halves import each_value, slow_but

NEW_TOKENS = 14
AGAIN = 8  # from prompts that are cached
FOR_SUFFIXES = 18  # until texts repeat themselves
STEPS = 3
PROMPTS = [
    "abcabcabcabcabc",
    "The quick brown fox",
    "x",
    "to be or not to be, that is the question: to be or not to be, that is " * 2,
    "0123456789" * 9,
]
CHAIN: dict[str, Any] = {"num_steps": STEPS}
TREE: dict[str, Any] = {"num_steps": STEPS, "eagle_topk": 3, "num_draft_tokens": 12}
STATIC: dict[str, Any] = TREE | {"static_tree": True}
SHAPES = {"chain": CHAIN, "tree": TREE, "static tree": STATIC}
ALGORITHMS = ["STANDALONE", "EAGLE", "EAGLE3"]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "pages of 16, chunks": {"page_size": 16, "chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
}


# Every two of algorithm, shape and setting meet here; every three in make test-all.
PAIRED = {
    ("STANDALONE", "chain"): ("whole prompts", "mixed"),
    ("STANDALONE", "tree"): ("pages of 16, chunks",),
    ("EAGLE", "chain"): ("pages of 16, chunks",),
    ("EAGLE", "tree"): ("whole prompts", "mixed"),
    ("EAGLE3", "chain"): ("mixed",),
    ("EAGLE3", "tree"): ("whole prompts", "pages of 16, chunks"),
}
CASES = [
    pytest.param(*drafter, setting, marks=() if setting in PAIRED[drafter] else (pytest.mark.slow,))
    for drafter in PAIRED
    for setting in SETTINGS
]


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hard to predict for a drafter that knows bigrams: it is right about half of the time."""
    folder = tmp_path_factory.mktemp("neural") / "target"
    return checkpoints.almost_bigram(folder, small_models["llama"], 0.03)


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of each algorithm that is right sometimes."""
    root = tmp_path_factory.mktemp("drafts")
    return {
        "STANDALONE": noisy(root / "standalone", target),
        "EAGLE": checkpoints.oracle_eagle(root / "eagle", target, noise=0.3),
        "EAGLE3": checkpoints.oracle_eagle3(root / "eagle3", target, 250, focus=20.0),
    }


def noisy(folder: Path, target: Path) -> Path:
    """A model of the target's vocabulary that differs from it a little."""
    checkpoints.almost_bigram(folder, target, 1.0)
    torch.manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "lm_head" in name:
            tensors[name] = tensor + 0.1 * tensor.std() * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    return run(make(target, None), max_tokens=FOR_SUFFIXES)


def first(count: int, outputs: list[list[int]]) -> list[list[int]]:
    return [tokens[:count] for tokens in outputs]


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    return LLM(str(target), spec, **{"dtype": "float32", "max_total_tokens": 4096, **flags})


def spec_of(algorithm: str, draft: Path, **shape: Any) -> SpecConfig:
    return SpecConfig(algorithm=algorithm, adaptive=False, draft_model_path=str(draft), **shape)


def run(llm: LLM, prompts: list[str] = PROMPTS, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(
        **{"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **params}
    )
    outputs = [one.token_ids for one in llm.generate(prompts, sampling)]
    llm.engine.scheduler.check_invariant()
    return outputs


@pytest.mark.parametrize(("algorithm", "shape", "setting"), CASES)
def test_greedy_output_is_plain_decodings(
    algorithm: str,
    shape: str,
    setting: str,
    target: Path,
    drafts: dict[str, Path],
    plain: list[list[int]],
) -> None:
    """At first, and again on what the cache has by then; and every counter adds up."""
    spec = spec_of(algorithm, drafts[algorithm], **SHAPES[shape])
    llm = make(target, spec, **SETTINGS[setting])
    assert run(llm) == first(NEW_TOKENS, plain)
    assert run(llm, max_tokens=AGAIN) == first(AGAIN, plain)
    assert llm.engine.scheduler.num_cached_tokens > 100
    totals = llm.engine.scheduler.spec_totals
    assert 0 < totals.num_accepted_tokens < totals.num_draft_tokens
    assert sum(totals.accepted_per_pos) == totals.num_accepted_tokens
    assert sorted(totals.accepted_per_pos, reverse=True) == totals.accepted_per_pos
    assert len(totals.accepted_per_pos) <= STEPS


@pytest.mark.parametrize(
    ("algorithm", "shape"), [("STANDALONE", "chain"), ("STANDALONE", "tree"), ("EAGLE3", "chain")]
)
def test_suffix_matches_may_take_a_drafters_place(
    algorithm: str, shape: str, target: Path, drafts: dict[str, Path], plain: list[list[int]]
) -> None:
    """What the drafter keeps of a request follows the text, whatever drafted it."""
    spec = spec_of(
        algorithm,
        drafts[algorithm],
        hybrid_suffix=True,
        hybrid_suffix_min_match=3,
        **SHAPES[shape] | {"num_draft_tokens": 12},
    )
    llm = make(target, spec)
    assert run(llm, max_tokens=FOR_SUFFIXES) == plain
    assert len(llm.engine.scheduler.spec_totals.accepted_per_pos) > STEPS


def test_counters_of_a_request_add_up(target: Path, drafts: dict[str, Path]) -> None:
    llm = make(target, spec_of("EAGLE3", drafts["EAGLE3"], **TREE))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for one in llm.generate(PROMPTS, params):
        assert 1 + one.spec.num_rounds + one.spec.num_accepted == NEW_TOKENS
        assert sum(n * k for k, n in enumerate(one.spec.histogram)) == one.spec.num_accepted


EIGHT = [f"{i}{i}{i}" for i in range(8)]
RETRACTED = [
    ("STANDALONE", "chain", 1),
    ("STANDALONE", "tree", 16),
    ("EAGLE", "tree", 1),
    ("EAGLE3", "chain", 16),
    ("EAGLE3", "tree", 1),
]


@pytest.fixture(scope="module")
def eight(target: Path) -> list[list[int]]:
    return run(make(target, None), EIGHT, max_tokens=32)


@pytest.mark.parametrize(("algorithm", "shape", "page_size"), RETRACTED)
def test_retraction_changes_nothing(
    algorithm: str,
    shape: str,
    page_size: int,
    target: Path,
    drafts: dict[str, Path],
    eight: list[list[int]],
) -> None:
    """Eight requests are admitted on the hope that they end at once; they do not."""
    spec = spec_of(algorithm, drafts[algorithm], **SHAPES[shape])
    tight = make(target, spec, page_size=page_size, max_total_tokens=208)
    tight.engine.scheduler.admission.demand.share = 0.0
    assert run(tight, EIGHT, max_tokens=32) == eight
    assert tight.engine.scheduler.num_retractions > 0


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    slow_but(
        [("STANDALONE", "tree"), ("EAGLE", "chain")],
        [("STANDALONE", "chain"), ("STANDALONE", "tree"), ("EAGLE", "chain"), ("EAGLE3", "tree")],
    ),
)
def test_up_to_the_end_of_the_context(
    algorithm: str, shape: str, target: Path, drafts: dict[str, Path]
) -> None:
    """Drafts become short, and no slot past the row is touched; nor past the whole memory."""
    spec = spec_of(algorithm, drafts[algorithm], **SHAPES[shape])
    expected = run(make(target, None, context_length=40), PROMPTS[:3], max_tokens=None)
    full = make(target, spec, context_length=40)
    assert run(full, PROMPTS[:3], max_tokens=None) == expected
    assert [len(tokens) for tokens in expected] == [25, 21, 39]
    alone = make(target, spec, context_length=40, max_total_tokens=40)
    assert [run(alone, [prompt], max_tokens=None)[0] for prompt in PROMPTS[:3]] == expected


@pytest.mark.parametrize(("shape", "setting"), each_value(1, ["chain", "static tree"], SETTINGS))
def test_the_target_itself_as_the_drafter_is_always_right(
    shape: str, setting: str, target: Path, plain: list[list[int]]
) -> None:
    """Every round that can draft num_steps tokens has them all accepted. A tree shaped by rank
    holds the path of best tokens down to the last level."""
    llm = make(target, spec_of("STANDALONE", target, **SHAPES[shape]), **SETTINGS[setting])
    assert run(llm) == first(NEW_TOKENS, plain)
    assert run(llm, max_tokens=AGAIN) == first(AGAIN, plain)
    totals = llm.engine.scheduler.spec_totals
    missed = [totals.num_drafts - count for count in totals.accepted_per_pos]
    # Only where the output ends do rounds draft less.
    assert missed[0] == 0
    assert missed[-1] <= 2 * len(PROMPTS)
    if shape == "chain":
        assert totals.num_accepted_tokens == totals.num_draft_tokens
    drafter = llm.engine.drafter
    assert isinstance(drafter, StandaloneWorker)
    assert not drafter.written, "requests that left are forgotten"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_perfectly_predictable_target(
    algorithm: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """A target without layers says what its last token suggests; these drafters know. The target
    knows itself."""
    target = checkpoints.almost_bigram(tmp_path / "target", small_models["llama"], 0.0)
    if algorithm == "STANDALONE":
        draft = target
    elif algorithm == "EAGLE":
        draft = checkpoints.oracle_eagle(tmp_path / "draft", target)
    else:
        draft = checkpoints.oracle_eagle3(tmp_path / "draft", target)
    llm = make(target, spec_of(algorithm, draft, num_steps=4))
    params = SamplingParams(max_tokens=1 + 5 * 6, temperature=0.0, ignore_eos=True)
    for one in llm.generate(PROMPTS, params):
        assert one.spec.histogram == [0, 0, 0, 0, 6]
        assert one.spec.mean_acceptance_length == 4 + 1
    assert llm.engine.stats().spec.accepted_per_pos == [6 * len(PROMPTS)] * 4


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_drafts_of_the_target_itself_always_stand(shape: str, target: Path) -> None:
    """Its distribution is the target's through penalties, temperature and top-k, so that block and
    sibling verification reject nothing."""
    spec = spec_of("STANDALONE", target, draft_sampling=True, **SHAPES[shape])
    llm = make(target, spec)
    run(llm, temperature=0.8, top_k=9, repetition_penalty=1.2, seed=4)
    totals = llm.engine.scheduler.spec_totals
    assert totals.accepted_per_pos[0] == totals.num_drafts
    assert totals.num_drafts - totals.accepted_per_pos[-1] <= len(PROMPTS)


@pytest.mark.parametrize("verify", ["rejection", "block", "target_only", "sibling"])
def test_a_seed_fixes_what_sampled_drafts_come_to(
    verify: str, target: Path, drafts: dict[str, Path]
) -> None:
    """Alone and in company, whatever rule weighs the drafts."""
    shape = SHAPES["tree" if verify == "sibling" else "chain"]
    spec = spec_of("STANDALONE", drafts["STANDALONE"], draft_sampling=True, verify=verify, **shape)
    params = SamplingParams(max_tokens=13, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    llm = make(target, spec, disable_radix_cache=True)
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS[1:4]]
    together = llm.generate(PROMPTS[1:4], params)
    assert [one.token_ids for one in together] == alone
    assert sum(one.spec.num_accepted for one in together) > 0


WARM = SamplingParams(
    max_tokens=16, temperature=0.7, top_p=0.9, seed=7, ignore_eos=True, min_p=0.01
)
MATCHED = [WARM, replace(WARM, temperature=0.0), replace(WARM, presence_penalty=0.5)]


@pytest.fixture(scope="module")
def seeded(target: Path) -> list[list[int]]:
    outputs = make(target, None).generate(PROMPTS[:3], MATCHED)
    return [one.token_ids for one in outputs]


@pytest.mark.parametrize(
    ("algorithm", "shape", "sampled"),
    each_value(
        1,
        [("STANDALONE", "static tree"), ("EAGLE", "chain"), ("EAGLE3", "tree")],
        [False, True],
    ),
)
def test_a_seed_fixes_the_output_of_matched_drafts(
    algorithm: str,
    shape: str,
    sampled: bool,
    target: Path,
    drafts: dict[str, Path],
    seeded: list[list[int]],
) -> None:
    """Among greedy requests, and whether drafts were sampled or not."""
    spec = spec_of(
        algorithm, drafts[algorithm], draft_sampling=sampled, verify="match", **SHAPES[shape]
    )
    found = make(target, spec).generate(PROMPTS[:3], MATCHED)
    assert [one.token_ids for one in found] == seeded
