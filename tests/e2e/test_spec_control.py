"""Requests that limit their own drafts: no token changes, theirs or others', and nothing deeper is
drafted for them, whatever the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig, SpecControl
from specengine.core.batch import ScheduleBatch
from specengine.core.spec import DraftProposal
from specengine.core.spec_stats import SpecStats
from specengine.engine.llm import Generation
from tests.draft import eagle_checkpoints as checkpoints
from tests.draft.mtp_reading import add_mtp
from tests.e2e.test_identity_neural import noisy

NEW_TOKENS = 24  # fewer would meet no draft from the text
AGAIN = 10  # from prompts that are cached
PROMPTS = ["abcabcabcabcabc", "to be or not to be, that is " * 3, "0123456789" * 5, "abab" * 4]
FREE, OFF = SpecControl(), SpecControl(enabled=False)
MIXED = [FREE, OFF, SpecControl(num_steps=1), SpecControl(num_steps=2)]
CHAIN: dict[str, Any] = {"num_steps": 4}
TREE: dict[str, Any] = {"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 14}
TEXTUAL = {"ngram_min_match": 1, "num_draft_tokens": 8}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("NGRAM", TEXTUAL),
    ("NGRAM", {**TEXTUAL, "ngram_branches": 3}),
    ("SUFFIX", {"num_draft_tokens": 8}),
    ("SUFFIX", {"num_draft_tokens": 12, "suffix_branches": 3}),
    ("STANDALONE", CHAIN),
    ("STANDALONE", {**TREE, "hybrid_suffix": True, "hybrid_suffix_min_match": 3}),
    ("EAGLE", CHAIN),
    ("EAGLE", TREE),
    ("EAGLE3", CHAIN),
    ("EAGLE3", TREE),
    ("MTP", CHAIN),
]
CASE = pytest.mark.parametrize("case", CASES, ids=str)
# Each drafter, as a chain or as a tree; the others in make test-all.
ONE_SHAPE_EACH = pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, marks=[] if number in (0, 3, 4, 5, 6, 9, 10) else [pytest.mark.slow])
        for number, one in enumerate(CASES)
    ],
    ids=str,
)
Case = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target, and a drafter of each algorithm that is right sometimes."""
    root = tmp_path_factory.mktemp("control")
    target = checkpoints.almost_bigram(root / "target", small_models["llama"], 0.03)
    return {
        "target": target,
        "MTP": add_mtp(target, root / "mtp", "deepseek"),
        "STANDALONE": noisy(root / "standalone", target),
        "EAGLE": checkpoints.oracle_eagle(root / "eagle", target, noise=0.3),
        "EAGLE3": checkpoints.oracle_eagle3(root / "eagle3", target, 250, focus=20.0),
    }


def make(folders: dict[str, Path], case: Case | None, **more: Any) -> LLM:
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048} | more
    if case is None:
        return LLM(str(folders["target"]), **flags)
    algorithm, options = case
    if algorithm == "MTP":
        return LLM(
            str(folders["MTP"]), SpecConfig(algorithm="MTP", adaptive=False, **options), **flags
        )
    if algorithm in folders:
        options = {**options, "draft_model_path": str(folders[algorithm])}
    return LLM(
        str(folders["target"]), SpecConfig(algorithm=algorithm, adaptive=False, **options), **flags
    )


def run(llm: LLM, controls: list[SpecControl], new_tokens: int = NEW_TOKENS) -> list[Generation]:
    params = [
        SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, speculative=one)
        for one in controls
    ]
    done = llm.generate(PROMPTS, params)
    llm.engine.scheduler.check_invariant()
    return done


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> list[list[int]]:
    return [one.token_ids for one in run(make(folders, None), [FREE] * len(PROMPTS))]


@CASE
def test_limits_hold_in_a_mixed_batch(
    case: Case, folders: dict[str, Path], plain: list[list[int]]
) -> None:
    llm = make(folders, case)
    found = run(llm, MIXED)
    assert [generation.token_ids for generation in found] == plain
    free, off, one, two = (generation.spec for generation in found)
    again = run(llm, MIXED, AGAIN)
    assert [generation.token_ids for generation in again] == [tokens[:AGAIN] for tokens in plain]
    assert off.num_draft_tokens == off.num_accepted == 0
    assert off.num_rounds == NEW_TOKENS - 1
    for stats, depth in ((one, 1), (two, 2)):
        assert stats.num_draft_tokens > 0
        assert len(stats.histogram) <= depth + 1
    if not llm.engine.drafter.proposes_tree:
        assert one.num_draft_tokens <= one.num_rounds
        assert two.num_draft_tokens <= 2 * two.num_rounds
    alike = run(make(folders, case), [FREE] * len(PROMPTS))[0].spec
    assert free == alike, "the neighbours' limits cost it nothing"


@ONE_SHAPE_EACH
def test_nobody_drafts_where_nobody_wants_it(
    case: Case, folders: dict[str, Path], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the drafter, having seen those rounds, goes on where it is wanted again."""
    llm = make(folders, case)

    def refuse(batch: ScheduleBatch) -> DraftProposal:
        raise AssertionError("asked to draft")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "draft", refuse)
        silent = run(llm, [OFF] * len(PROMPTS))
    assert [one.token_ids for one in silent] == plain
    totals = llm.engine.stats().spec
    assert (totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens) == (0, 0, 0)
    assert run(llm, [FREE] * len(PROMPTS))[0].token_ids == plain[0]
    assert totals.num_drafts > 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["block", "sibling"])
def test_sampled_drafts_are_cut_as_well(shape: dict[str, Any], folders: dict[str, Path]) -> None:
    llm = make(folders, ("EAGLE3", {**shape, "draft_sampling": True}))
    params = SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=0.7,
        seed=3,
        ignore_eos=True,
        speculative=SpecControl(num_steps=1),
    )
    stats = SpecStats()
    for one in llm.generate(PROMPTS, params):
        stats.num_accepted += one.spec.num_accepted
        assert len(one.spec.histogram) <= 2
    assert stats.num_accepted > 0
