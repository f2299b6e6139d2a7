"""Kernels compiled before graphs are captured: nearly all, or none where caches have them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.engine.rehearsal import rehearse, telling_sizes
from specengine.kernels import compilations, rehearsal
from tests.kernels import offline_triton

Asked = dict[str, Any]

WITHOUT_A_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are asked for in the place of a GPU"
)


# Rows of text's drafts are 16 long: kernels of their own, where no model drafts.
HYBRID = {"eagle_topk": 1, "hybrid_suffix": True, "num_steps": 5, "num_draft_tokens": 16}
HYBRID_TREES = HYBRID | {"eagle_topk": 2, "num_steps": 3}
KINDS: dict[str, dict[str, Any]] = {
    "chains": {"eagle_topk": 1, "num_draft_tokens": 4},
    "trees": {"eagle_topk": 4, "num_draft_tokens": 16},
    "weighed chains": {"eagle_topk": 1, "num_draft_tokens": 4, "draft_sampling": True},
    "weighed trees": {"eagle_topk": 4, "num_draft_tokens": 16, "verify": "target_only"},
    "sampled trees": {"eagle_topk": 4, "num_draft_tokens": 16, "draft_sampling": True},
    "relaxed chains": {"eagle_topk": 1, "num_draft_tokens": 4, "verify": "relaxed"},
    "relaxed trees": {"eagle_topk": 4, "num_draft_tokens": 16, "verify": "relaxed"},
    "trees of text": {"algorithm": "NGRAM", "ngram_branches": 2, "num_draft_tokens": 16},
    "EAGLE3 beside text": HYBRID,
    "STANDALONE beside text": {"algorithm": "STANDALONE"} | HYBRID,
    "EAGLE3 trees beside text": HYBRID_TREES,
    "STANDALONE trees beside text": {"algorithm": "STANDALONE", "suffix_branches": 2}
    | HYBRID_TREES,
    "EAGLE3 beside trees of text": HYBRID | {"suffix_branches": 2},
}


def spec_of(kind: dict[str, Any], drafters: dict[str, str]) -> dict[str, Any]:
    spec = {"algorithm": "EAGLE3"} | kind
    path = drafters.get(spec["algorithm"])
    return spec if path is None else spec | {"draft_model_path": path}


@pytest.fixture(scope="module")
def asked_by_kind(
    target: Path, drafters: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Asked]:
    """In one process, which takes longer to start than to answer."""
    pytest.importorskip("triton")
    specs = [json.dumps(spec_of(kind, drafters)) for kind in KINDS.values()]
    folder = tmp_path_factory.mktemp("caches")
    found: list[Asked] = offline_triton.run(
        "tests.engine.offline_capture", folder, str(target), *specs
    )
    return dict(zip(KINDS, found, strict=True))


@pytest.fixture(params=["chains", "trees"])
def asked(asked_by_kind: dict[str, Asked], request: pytest.FixtureRequest) -> Asked:
    """Of a rehearsal of EAGLE-3's graphs; and of their capture, which the rehearsal missed."""
    return asked_by_kind[request.param]


@WITHOUT_A_GPU
def test_a_rehearsal_asks_for_what_the_capture_needs(asked: Asked) -> None:
    """Nearly all; of what takes long to compile, for all that chains need."""
    kernels, missed = Counter(asked["kernels"]), Counter(asked["missed"])
    assert kernels["few_row"] > 4
    assert kernels["_rope_attention_kernel"] > 3
    assert missed.total() <= kernels.total() // 20
    if not kernels["_tree_step_kernel"]:
        assert not {"few_row", "_rope_attention_kernel", "_paged_attention_kernel"} & set(missed)


@WITHOUT_A_GPU
def test_a_rehearsal_of_trees_of_text_misses_nothing(asked_by_kind: dict[str, Asked]) -> None:
    asked = asked_by_kind["trees of text"]
    assert asked["rounds"] == "GraphTreeRound"
    assert not asked["missed"]
    assert {"_tree_shape_kernel", "_accept_tree_kernel"} <= asked["kernels"].keys()


@WITHOUT_A_GPU
@pytest.mark.parametrize("name", [name for name in KINDS if " beside " in name])
def test_a_rehearsal_of_a_model_beside_text_misses_nothing(
    name: str, asked_by_kind: dict[str, Asked]
) -> None:
    """Nor of rounds in which text drafts for some, or for all."""
    asked = asked_by_kind[name]
    assert asked["rounds"] == ("GraphHybridTreeRound" if "trees" in name else "GraphHybridRound")
    assert not asked["missed"]
    assert asked["acts"] < asked["of"] / 4


@WITHOUT_A_GPU
def test_a_rehearsal_is_shorter_than_the_capture(asked: Asked) -> None:
    assert asked["acts"] < asked["of"] / 4


@WITHOUT_A_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_captured_waits_for_the_device(
    kind: str, asked_by_kind: dict[str, Asked]
) -> None:
    """Nor has a shape that follows from what lies there."""
    operators = set(asked_by_kind[kind]["operators"])
    assert operators > {"linear"}
    waiting = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique"}
    assert not operators & waiting


@WITHOUT_A_GPU
def test_a_rule_that_weighs_drafts_is_rehearsed(asked_by_kind: dict[str, Asked]) -> None:
    kernels, missed = (asked_by_kind["weighed chains"][name] for name in ("kernels", "missed"))
    of_rule = {"_begin_kernel", "_judge_block_kernel", "_draw_kernel"}
    assert of_rule <= kernels.keys()
    assert not of_rule & missed.keys()
    assert not of_rule & asked_by_kind["chains"]["kernels"].keys()


@WITHOUT_A_GPU
@pytest.mark.parametrize(
    ("kind", "of_kind"),
    [
        ("weighed trees", {"_walk_kernel", "_draw_kernel", "_accept_path_kernel"}),
        ("sampled trees", {"accept_sibling", "draw_siblings", "_accept_path_kernel"}),
    ],
)
def test_rules_for_trees_are_rehearsed(
    kind: str, of_kind: set[str], asked_by_kind: dict[str, Asked]
) -> None:
    asked = asked_by_kind[kind]
    assert asked["rounds"] == "GraphWeighedTreeRound"
    assert of_kind <= asked["kernels"].keys()
    assert not of_kind & asked["missed"].keys()
    assert not of_kind & asked_by_kind["trees"]["kernels"].keys()


@WITHOUT_A_GPU
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [("relaxed chains", "GraphRelaxedRound"), ("relaxed trees", "GraphRelaxedTreeRound")],
)
def test_relaxed_rounds_are_rehearsed(
    kind: str, rounds: str, asked_by_kind: dict[str, Asked]
) -> None:
    """Those of greedy requests, too."""
    asked = asked_by_kind[kind]
    assert asked["rounds"] == rounds
    assert "_accept_relaxed_kernel" in asked["kernels"]
    assert "_accept_relaxed_kernel" not in asked["missed"]


@pytest.mark.parametrize(
    ("sizes", "telling"),
    [
        ([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 256], [256, 96, 64, 48, 32, 16, 1]),
        ([1, 2, 4, 8], [8, 1]),
        ([5, 40], [40, 5]),
        ([128], [128]),
    ],
)
def test_telling_sizes(sizes: list[int], telling: list[int]) -> None:
    assert telling_sizes(sizes) == telling


def test_caches_that_have_the_first_acts_kernels_end_a_rehearsal() -> None:
    played = []
    rehearse([lambda: played.append(1), lambda: played.append(2), lambda: played.append(3)], 2)
    assert played == [1, 2]


def test_a_kernel_that_was_compiled_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    played = []

    def act() -> None:
        stage = rehearsal.current()
        assert stage is not None
        stage.ask("a kernel", compilations.note)
        played.append(stage)

    rehearse([act] * 3, 1)
    assert len(played) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_first_start_compiles_ahead_and_a_second_nothing(
    target: Path, drafters: dict[str, str], tmp_path: Path
) -> None:
    given = tmp_path, str(target), drafters["EAGLE3"]
    cold = offline_triton.run("tests.engine.cold_start", *given)
    warm = offline_triton.run("tests.engine.cold_start", *given)
    assert cold["unforeseen"] <= cold["compiled"] / 10
    assert (warm["compiled"], warm["unforeseen"]) == (0, 0)
    assert cold["tokens"] == warm["tokens"]
