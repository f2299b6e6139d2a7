"""Options in pairs: each pair is refused by name before anything is loaded, or says what an engine
without any option says, whatever comes, goes and changes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError
from specengine.core.together import GIVEN, REFUSED
from specengine.engine.outputs import RequestOutput
from specengine.layers.quantization import linears
from specengine.runner.fallbacks import HOOKED
from tests.conftest import save_tokenizer
from tests.halves import slow_but
from tests.support.device_rounds import run_on_device
from tests.support.families import save_small_model
from tests.support.quantised import FORMATS, quantise_model

Said = dict[tuple[str, int], list[int]]

BASE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 2048}
OPTIONS: dict[str, dict[str, Any]] = {
    "pdmux": {"enable_pdmux": True, "pdmux_min_tokens": 24, "pdmux_layers": 1},
    "pieces": {"cuda_graph_mode": "piecewise", "piecewise_cuda_graph_tokens": (8, 32, 96, 256)},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "chunks": {"chunked_prefill_size": 32},
    "short of memory": {"max_total_tokens": 200},
    "sleep": {"enable_sleep_mode": True},
    "update": {},
    "hooks": {},
    "rounds on the device": {},
    "drafts": {},
}
NGRAM = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=4, ngram_min_match=1)

# By family. Each pair of options that may go together is in one row at least, also of those that
# `make test` runs.
ROWS: list[tuple[str, str]] = [
    ("llama", "pdmux, pieces, sleep, update, drafts"),
    ("llama", "mixed, pieces, hooks, sleep, short of memory"),
    ("qwen3next", "pdmux, rounds on the device, chunks, sleep, update"),
    ("qwen3next", "mixed, hooks, update, drafts, short of memory"),
    ("qwen3next", "pdmux, pieces, chunks"),
    ("deepseekv3", "pdmux, pieces, rounds on the device, chunks, short of memory, drafts"),
    ("deepseekv3", "mixed, rounds on the device, sleep, update"),
    ("gptoss", "chunks, hooks, sleep, rounds on the device"),
    ("llama4", "mixed, pieces, rounds on the device, drafts"),
    ("llama4", "pdmux, sleep, short of memory"),
    ("llama", "pdmux, hooks, chunks, drafts"),
    ("packed experts", "pdmux, pieces, sleep, drafts"),
    ("packed experts", "mixed, rounds on the device, update"),
    ("packed experts", "chunks, hooks"),
]

SLOW = [
    ("qwen3next", "pdmux, pieces, chunks"),
    ("deepseekv3", "mixed, rounds on the device, sleep, update"),
    ("llama4", "mixed, pieces, rounds on the device, drafts"),
]
FAST = [row for row in ROWS if row not in SLOW]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(2, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
FORM = GrammarSpec.regex("(ab|cd|[xyz]){4,8}")
PREFIX = prompt(9, 70)  # of two prompts, found in the cache by one of them
ABORTED = "x"
ARRIVALS: dict[int, list[tuple[str, list[int], SamplingParams]]] = {
    0: [("a", prompt(1, 7), GREEDY), ("b", prompt(2, 11), replace(GREEDY, n=2))],
    2: [
        ("c", PREFIX + prompt(3, 10), GREEDY),
        ("g", prompt(4, 45), replace(GREEDY, ignore_eos=False, grammar=FORM)),
    ],
    3: [("p", prompt(5, 50), replace(GREEDY, priority=-5)), ("f", prompt(6, 5), GREEDY)],
    5: [
        ("n", PREFIX + prompt(7, 10), replace(GREEDY, n=2)),
        (ABORTED, prompt(8, 60), GREEDY),
    ],
}


def play(llm: LLM, amid: Callable[[int], list[RequestOutput]] = lambda step: []) -> Said:
    """What each choice says. amid: before a step; may step as well, and gives what came of it."""
    found, step, engine = Said(), 0, llm.engine
    while engine.has_work or step <= max(ARRIVALS):
        for rid, ids, sampling in ARRIVALS.get(step, []):
            engine.add_request(rid, ids, sampling)
        if step == 7:
            engine.abort(ABORTED)
        outputs = [*amid(step), *engine.step()]
        found |= {(one.rid, one.index): one.token_ids for one in outputs if one.finish_reason}
        engine.scheduler.check_invariant()
        step += 1
    found.pop((ABORTED, 0), None)
    return found


class Pairs:
    """An engine with several options, while requests come and go."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.names = names
        flags = BASE | {key: value for name in names for key, value in OPTIONS[name].items()}
        self.llm = LLM(str(folder), NGRAM if "drafts" in names else None, **flags)
        if "rounds on the device" in names:
            run_on_device(self.llm, sizes=(1, 2, 4, 8, 16))
        self.seen: list[str] = []
        if "hooks" in names:
            self.llm.add_layer_hook("layers.*", lambda one: self.seen.append(one.layer))

    def say(self, other: Path | None = None) -> Said:
        """other: weights that take the place of the first amid requests, for two steps."""
        return play(self.llm, lambda step: self._between(step, other))

    def _between(self, step: int, other: Path | None) -> list[RequestOutput]:
        if "sleep" in self.names and step in (4, 9):
            self.llm.sleep(1 if step == 4 else 2)
            outputs = self.llm.engine.step()  # of rounds that were in flight
            assert not self.llm.engine.has_work
            self.llm.wake()
            return outputs
        if other is not None and step == 6:
            self.llm.update_weights(str(other))
        return []

    def check_use(self) -> None:
        """Each option was really used."""
        names, stats = self.names, self.llm.engine.stats()
        if "pdmux" in names:
            assert stats.split is not None
            assert self.llm.engine.split is not None
            kind = f"fallback: {HOOKED}" if "hooks" in names else "calls"
            assert self.llm.engine.split.counters[kind] > 2
            assert ("calls" in self.llm.engine.split.counters) != ("hooks" in names)
        if "rounds on the device" in names:
            rounds = self.llm.engine.device_rounds
            assert rounds is not None
            kind = f"fallback: {HOOKED}" if "hooks" in names else "replays"
            assert rounds.counters[kind] > 5
        if "pieces" in names:
            pieces = stats.graphs["piecewise"]
            used = pieces.fallbacks.get(HOOKED, 0) if "hooks" in names else pieces.replays
            assert used > 2
        assert bool(self.seen) == ("hooks" in names)


@pytest.fixture(scope="module")
def folders(
    small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """Of a family, and other weights of the same form."""
    made = dict[str, tuple[Path, Path]]()
    place = tmp_path_factory.mktemp("pairs")

    def folders_of(family: str) -> tuple[Path, Path]:
        if family in made:
            return made[family]
        one, other = place / family / "one", place / family / "other"
        if family == "packed experts":
            sizes = {"moe_intermediate_size": 64, "intermediate_size": 128}
            for seed, folder in enumerate((one, other)):
                save_small_model("qwen3moe", folder / "source", seed, **sizes)
                save_tokenizer(folder / "source")
                form = FORMATS["compressed w4a16"]
                quantise_model(folder / "source", folder / "made", form)
            made[family] = (one / "made" / "quantised", other / "made" / "quantised")
        else:
            save_small_model(family, other, 77)
            save_tokenizer(other)
            made[family] = (small_models[family], other)
        return made[family]

    return folders_of


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], Said]:
    """What an engine without options says."""
    known = dict[Path, Said]()

    def said(folder: Path) -> Said:
        if folder not in known:
            known[folder] = Pairs(folder, []).say()
        return known[folder]

    return said


@pytest.mark.parametrize(("family", "options"), slow_but(FAST, ROWS))
def test_options_together_change_no_token(
    family: str,
    options: str,
    folders: Callable[[str], tuple[Path, Path]],
    plain: Callable[[Path], Said],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After other weights came amid requests, the engine says what a new one of those says."""
    if family == "packed experts":
        monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    folder, other = folders(family)
    pairs = Pairs(folder, options.split(", "))
    assert pairs.say() == plain(folder)
    if "update" in pairs.names:
        pairs.say(other)
        assert pairs.say() == plain(other) != plain(folder)
    pairs.check_use()


FLAGS: dict[str, dict[str, Any]] = {
    "--tp-size": {"tp_size": 2},
    "--dp-size": {"dp_size": 2},
    "--enable-dp-attention": {"dp_size": 2, "enable_dp_attention": True},
    "--enable-symm-mem": {"enable_symm_mem": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-mixed-chunk": {"enable_mixed_chunk": True},
    "--enable-sleep-mode": {"enable_sleep_mode": True},
    "--cuda-graph-mode with pieces": {"cuda_graph_mode": "full-and-piecewise"},
    "--cuda-graph-profile": {"cuda_graph_profile": "log"},
    "--cuda-graph-profile FILE": {"cuda_graph_profile": "graphs.md"},
    "--disable-cuda-graph-padding": {"disable_cuda_graph_padding": True},
    "--speculative-cost-table": {"speculative_cost_table": "costs.json"},
    "--trace": {"trace": "x.trace"},
    "--quantization int8 or int4": {"quantization": "int8"},
}


@pytest.mark.parametrize("pair", REFUSED, ids=" x ".join)
def test_pair_is_refused_where_flags_are_read(pair: tuple[str, str]) -> None:
    one, other = (FLAGS[name] for name in pair)
    for alone in (one, other):
        config_from_flags(alone)
    with pytest.raises(ConfigError, match=f"{pair[0]} does not go together with {pair[1]}"):
        config_from_flags({**one, **other})


# Columns of the table on the page "the runner"; rows have the same order, but for the last.
COLUMNS = {
    "--enable-pdmux": 0,
    "--enable-mixed-chunk": 2,
    "--tp-size": 3,
    "--dp-size": 4,
    "--enable-dp-attention": 5,
    "--cuda-graph-profile": 9,
}


def test_page_of_the_runner_tells_which_pairs_are_refused() -> None:
    """In its table, and those of other options in a clause below it; and no other pair."""
    page = (Path(__file__).parents[2] / "docs" / "runner.md").read_text()
    section = page.split("## What goes with what\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table[2:]]
    expected = {pair for pair in REFUSED if {*pair} <= COLUMNS.keys()}
    told = {
        (one, other)
        for one, row in COLUMNS.items()
        for other, column in COLUMNS.items()
        if row < len(rows[0]) - 1 and rows[row][column] == "refused"
    }
    assert {frozenset(pair) for pair in told} == {frozenset(pair) for pair in expected}
    assert rows[COLUMNS["--dp-size"]][COLUMNS["--cuda-graph-profile"]] == "log"
    clauses = section.split(table[-1])[1].replace("\n", " ").split(";")
    for one, other in REFUSED:
        if (one, other) not in expected and not one.endswith(" FILE"):
            flags = [f"`{name.split(' or ')[0]}`" for name in (one, other)]
            assert any(all(flag in clause for flag in flags) for clause in clauses), (one, other)


def test_ranks_sum_in_one_kernel_where_forwards_are_on_one_stream_or_it_is_told() -> None:
    def sums(**flags: Any) -> bool:
        return config_from_flags({"tp_size": 2, **flags}).sums_in_one_kernel

    assert sums()
    assert not sums(**FLAGS["--enable-pdmux"])
    assert not sums(**FLAGS["--enable-dp-attention"])
    assert sums(**FLAGS["--enable-dp-attention"], enable_symm_mem=True)
    assert not sums(enable_symm_mem=False)


def test_all_that_is_not_refused_is_in_a_row_together() -> None:
    """Of OPTIONS, but for those that have other tests."""
    flags = dict(zip(OPTIONS, OPTIONS, strict=True)) | {
        "pdmux": "--enable-pdmux",
        "mixed": "--enable-mixed-chunk",
        "sleep": "--enable-sleep-mode",
        "pieces": "--cuda-graph-mode with pieces",
    }
    assert FLAGS.keys() == GIVEN.keys()
    rows = [set(options.split(", ")) for _, options in FAST]
    assert {family for family, _ in FAST} == {family for family, _ in ROWS}
    refused = {frozenset(pair) for pair in REFUSED}
    refused.add(frozenset({"--enable-mixed-chunk", "chunks"}))
    missing = [
        (one, other)
        for one in OPTIONS
        for other in OPTIONS
        if one < other
        and frozenset({flags[one], flags[other]}) not in refused
        and not any({one, other} <= row for row in rows)
    ]
    assert missing == []
