"""Kernels compiled before graphs are captured: all, or none where caches have them."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specengine.engine.precompile import precompile_calls, representative_sizes
from specengine.kernels import compilations, precompile
from tests.conftest import place_of_run
from tests.halves import slow_but
from tests.kernels import offline_triton
from tests.support.rounds import ON_CPU, ON_GPU

Asked = dict[str, Any]

# Drafts of lookup are 16 nodes: rounds without a model's drafts have kernels of their own.
HYBRID = {"eagle_topk": 1, "hybrid_suffix": True, "num_steps": 5, "num_draft_tokens": 16}
HYBRID_TREES = HYBRID | {"eagle_topk": 2, "num_steps": 3}
KINDS: dict[str, dict[str, Any]] = {
    "chains": {"eagle_topk": 1, "num_draft_tokens": 4},
    "trees": {"eagle_topk": 4, "num_draft_tokens": 16},
    "stochastic chains": {"eagle_topk": 1, "num_draft_tokens": 4, "draft_sampling": True},
    "stochastic trees": {"eagle_topk": 4, "num_draft_tokens": 16, "verify": "target_only"},
    "sampled trees": {"eagle_topk": 4, "num_draft_tokens": 16, "draft_sampling": True},
    "relaxed chains": {"eagle_topk": 1, "num_draft_tokens": 4, "verify": "relaxed"},
    "relaxed trees": {"eagle_topk": 4, "num_draft_tokens": 16, "verify": "relaxed"},
    "lookup trees": {"algorithm": "NGRAM", "ngram_branches": 2, "num_draft_tokens": 16},
    "EAGLE3 hybrid": HYBRID,
    "STANDALONE hybrid": {"algorithm": "STANDALONE"} | HYBRID,
    "EAGLE3 hybrid trees": HYBRID_TREES,
    "STANDALONE hybrid trees": {"algorithm": "STANDALONE", "suffix_branches": 2} | HYBRID_TREES,
    "EAGLE3 chains, lookup trees": HYBRID | {"suffix_branches": 2},
}

HYBRIDS = [name for name, kind in KINDS.items() if "hybrid_suffix" in kind]
# Their rules, layouts and sources are all among those of other kinds.
SLOW = [
    "relaxed chains",
    "STANDALONE hybrid",
    "EAGLE3 hybrid trees",
    "EAGLE3 chains, lookup trees",
]
FAST = [name for name in KINDS if name not in SLOW]
# Of the captures of these, `make test` runs a twelfth: sizes are those of chains.
IN_PART = [name for name in FAST if name != "chains"]


def spec_of(kind: dict[str, Any], drafters: dict[str, str]) -> dict[str, Any]:
    spec = {"algorithm": "EAGLE3"} | kind
    path = drafters.get(spec["algorithm"])
    return spec if path is None else spec | {"draft_model_path": path}


@dataclass
class AskedByKind:
    """In a process for each half of the kinds, which takes longer to start than to answer. What one
    process of a run was told, the others read."""

    folder: Path  # of all processes of a run
    target: Path
    drafters: dict[str, str]
    found: dict[str, Asked] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Asked:
        if name not in self.found:
            self.found |= self.told("slow" if name in SLOW else "fast")
        return self.found[name]

    def told(self, half: str) -> dict[str, Asked]:
        with (self.folder / f"{half}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # others wait
            file.seek(0)
            if not (text := file.read()):
                names = {"slow": SLOW, "fast": FAST}[half]
                text = json.dumps(self.ask({one: 12 if one in IN_PART else 1 for one in names}))
                file.write(text)
                file.flush()
        found: dict[str, Asked] = json.loads(text)
        return found

    def ask(self, times: dict[str, int]) -> dict[str, Asked]:
        """times: as many captures as run, by kind."""
        sections = [json.dumps([spec_of(KINDS[one], self.drafters), n]) for one, n in times.items()]
        found: list[Asked] = offline_triton.run(
            "tests.engine.offline_capture", self.folder, str(self.target), *sections
        )
        return dict(zip(times, found, strict=True))


@pytest.fixture(scope="module")
def asked_by_kind(
    target: Path, drafters: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AskedByKind:
    pytest.importorskip("triton")
    folder = place_of_run(tmp_path_factory) / "compile-ahead"
    folder.mkdir(exist_ok=True)
    return AskedByKind(folder, target, drafters)


@pytest.fixture(params=["chains", "trees"])
def asked(asked_by_kind: AskedByKind, request: pytest.FixtureRequest) -> Asked:
    """Kernels that precompiling EAGLE-3's graphs asks for, and those that it missed."""
    return asked_by_kind[request.param]


@ON_CPU
def test_precompiling_asks_for_all_that_captures_need(asked: Asked) -> None:
    """Captures of idle moments too, rounds that sample and the drafter's reading of prompts: a
    request that comes amid one waits until its kernel is compiled, for over a second."""
    kernels = Counter(asked["kernels"])
    assert kernels["few_row"] > 4
    assert kernels["_rope_attention_kernel"] > 3
    assert not asked["missed"]


@ON_CPU
def test_precompiling_lookup_trees_misses_nothing(asked_by_kind: AskedByKind) -> None:
    asked = asked_by_kind["lookup trees"]
    assert asked["rounds"] == ["LookupTrees", "Branching", "NoneType"]
    assert not asked["missed"]
    assert {"_tree_shape_kernel", "_accept_tree_kernel"} <= asked["kernels"].keys()


@ON_CPU
@pytest.mark.parametrize("name", slow_but([one for one in HYBRIDS if one in FAST], HYBRIDS))
def test_precompiling_hybrid_rounds_misses_nothing(name: str, asked_by_kind: AskedByKind) -> None:
    """Lookup drafts for some requests of a round, or for all."""
    asked = asked_by_kind[name]
    assert asked["rounds"] == [
        "HybridDraft",
        "Branching" if "trees" in name else "Chain",
        "NoneType",
    ]
    assert not asked["missed"]
    assert asked["calls"] < asked["of"] / 4


@ON_CPU
@pytest.mark.slow
def test_precompiling_misses_nothing_at_any_size(asked_by_kind: AskedByKind) -> None:
    asked = asked_by_kind.ask(dict.fromkeys(IN_PART, 1))
    assert {name: one["missed"] for name, one in asked.items()} == {name: {} for name in IN_PART}


@ON_CPU
def test_precompiling_runs_a_quarter_of_the_graphs(asked: Asked) -> None:
    assert asked["calls"] < asked["of"] / 4


@ON_CPU
@pytest.mark.parametrize("kind", slow_but(FAST, KINDS))
def test_captured_rounds_never_wait_for_the_device(kind: str, asked_by_kind: AskedByKind) -> None:
    """No shape follows from values that lie there."""
    operators = set(asked_by_kind[kind]["operators"])
    assert operators > {"linear"}
    waiting = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique"}
    assert not operators & waiting


@ON_CPU
def test_stochastic_rule_of_chains_is_precompiled(asked_by_kind: AskedByKind) -> None:
    kernels, missed = (asked_by_kind["stochastic chains"][name] for name in ("kernels", "missed"))
    of_rule = {"_begin_kernel", "_judge_block_kernel", "_draw_kernel"}
    assert of_rule <= kernels.keys()
    assert not of_rule & missed.keys()
    assert not of_rule & asked_by_kind["chains"]["kernels"].keys()


@ON_CPU
@pytest.mark.parametrize(
    ("kind", "of_kind"),
    [
        ("stochastic trees", {"_walk_kernel", "_draw_kernel", "_accept_path_kernel"}),
        ("sampled trees", {"accept_sibling", "draw_siblings", "_accept_path_kernel"}),
    ],
)
def test_stochastic_rules_of_trees_are_precompiled(
    kind: str, of_kind: set[str], asked_by_kind: AskedByKind
) -> None:
    asked = asked_by_kind[kind]
    assert asked["rounds"] == ["DeviceDraft", "Branching", "Stochastic"]
    assert of_kind <= asked["kernels"].keys()
    assert not of_kind & asked["missed"].keys()
    assert not of_kind & asked_by_kind["trees"]["kernels"].keys()


@ON_CPU
@pytest.mark.parametrize(
    ("kind", "layout"),
    slow_but(
        [("relaxed trees", "Branching")],
        [("relaxed chains", "Chain"), ("relaxed trees", "Branching")],
    ),
)
def test_relaxed_rounds_are_precompiled(kind: str, layout: str, asked_by_kind: AskedByKind) -> None:
    """Those of greedy requests as well."""
    asked = asked_by_kind[kind]
    assert asked["rounds"] == ["DeviceDraft", layout, "Relaxed"]
    assert "_accept_relaxed_kernel" in asked["kernels"]
    assert "_accept_relaxed_kernel" not in asked["missed"]


@pytest.mark.parametrize(
    ("sizes", "representative"),
    [
        ([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 256], [256, 96, 64, 48, 32, 16, 1]),
        ([1, 2, 4, 8], [8, 1]),
        ([5, 40], [40, 5]),
        ([128], [128]),
    ],
)
def test_representative_sizes(sizes: list[int], representative: list[int]) -> None:
    assert representative_sizes(sizes) == representative


def test_precompiling_ends_where_the_first_kernels_are_cached() -> None:
    played = []
    precompile_calls(
        [lambda: played.append(1), lambda: played.append(2), lambda: played.append(3)], 2
    )
    assert played == [1, 2]


def test_precompiling_goes_on_where_a_kernel_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def call() -> None:
        stage = precompile.current()
        assert stage is not None
        stage.ask("a kernel", compilations.note)
        played.append(stage)

    precompile_calls([call] * 3, 1)
    assert len(played) == 3


@pytest.mark.parametrize("_", [pytest.param(None, marks=ON_GPU)])
def test_first_start_compiles_ahead_and_second_compiles_nothing(
    _: None, target: Path, drafters: dict[str, str], tmp_path: Path
) -> None:
    given = tmp_path, str(target), drafters["EAGLE3"]
    cold = offline_triton.run("tests.engine.cold_start", *given)
    warm = offline_triton.run("tests.engine.cold_start", *given)
    assert cold["compiled_late"] <= cold["compiled"] / 10
    assert (warm["compiled"], warm["compiled_late"]) == (0, 0)
    assert cold["tokens"] == warm["tokens"]
