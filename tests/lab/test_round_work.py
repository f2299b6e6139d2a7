"""What a round cannot do without, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.engine.loop import Engine
from specengine.lab.card import Card, measure_card
from specengine.lab.round_work import Drafts, Work, least_seconds, round_work
from tests.draft.eagle_checkpoints import eagle3

LAYER = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 112  # of the small Llama: q, k, v, o and the MLP
HEAD = 64 * 320
KV = 3 * 2 * 32 * 4  # bytes a token


@pytest.fixture(scope="module")
def folder(small_models: dict[str, Path]) -> str:
    return str(small_models["llama"])


def test_plain_decoding(folder: str) -> None:
    engine = LLM(folder, device="cpu", dtype="float32", max_total_tokens=256).engine
    parts = round_work(engine, batch_size=2, nodes=0, context=50)
    assert parts == {
        "verify": Work(4 * 3 * LAYER + 2 * 50 * KV, 2 * 3 * LAYER * 2),
        "verify head": Work(4 * HEAD, 2 * HEAD * 2),
    }


def test_a_drafter_reads_its_head_each_step(folder: str, tmp_path: Path) -> None:
    draft = eagle3(tmp_path / "draft", Path(folder), draft_vocab=100)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(draft), num_steps=3)
    engine = LLM(folder, spec, device="cpu", dtype="float32", max_total_tokens=256).engine
    parts = round_work(engine, batch_size=2, nodes=3, context=50)
    assert list(parts) == ["draft", "draft head", "verify", "verify head", "observe"]
    assert parts["draft head"].bytes == 3 * 4 * 64 * 100
    assert parts["verify head"].operations == 2 * HEAD * 2 * 4
    own_kv = 2 * 4 * 16 * 4 * 2 * 50
    fuse = 4 * 3 * 64 * 64
    layer = parts["draft"].bytes / 2 - own_kv
    assert parts["observe"].bytes == layer + fuse + own_kv
    assert set(round_work(engine, 2, 0, 50)) == {"verify", "verify head"}, "nothing was drafted"


def test_experts_are_read_as_rows_choose_them(small_models: dict[str, Path]) -> None:
    """Three layers of four experts, two a row: 2, then 3 and 3.5 of them on average."""
    folder = str(small_models["mixtral"])
    engine = LLM(folder, device="cpu", dtype="float32", max_total_tokens=256).engine
    (one, two, three) = (round_work(engine, rows, 0, 0)["verify"] for rows in (1, 2, 3))
    expert = 3 * 4 * 3 * 64 * 112
    assert two.bytes - one.bytes == expert
    assert three.bytes - two.bytes == expert / 2
    attention = 64 * 32 * (4 + 2 * 2) + 4 * 32 * 64
    assert one.bytes == 2 * expert + 3 * 4 * (attention + 4 * 64)
    assert one.operations == 3 * 2 * (attention + 4 * 64 + 2 * 3 * 64 * 112)


def engine_of(folder: str, draft: Path, topk: int, nodes: int | None) -> Engine:
    """An engine that drafts three steps."""
    eagle3(draft, Path(folder), draft_vocab=100)
    spec = SpecConfig(
        algorithm="EAGLE3",
        draft_model_path=str(draft),
        num_steps=3,
        eagle_topk=topk,
        num_draft_tokens=nodes,
    )
    return LLM(folder, spec, device="cpu", dtype="float32", max_total_tokens=256).engine


def test_a_tree_reads_its_head_each_level(folder: str, tmp_path: Path) -> None:
    """However many nodes it finds, 4 + 16 + 16 here, cut to 15."""
    chain = round_work(engine_of(folder, tmp_path / "chain", 1, None), 2, nodes=3, context=50)
    tree = round_work(engine_of(folder, tmp_path / "tree", 4, 16), 2, nodes=15, context=50)
    for part in ("draft", "draft head", "observe", "verify", "verify head"):
        assert tree[part].bytes == chain[part].bytes, part
    assert tree["draft head"].operations == 2 * 64 * 100 * (2 + 2 * 4 + 2 * 4)
    assert tree["draft"].operations == 4 * chain["draft"].operations
    assert tree["observe"].operations == chain["observe"].operations, "a path, not the tree"
    assert tree["verify head"].operations == 2 * HEAD * 2 * 16


def test_levels_of_a_tree(folder: str, tmp_path: Path) -> None:
    engine = engine_of(folder, tmp_path / "draft", 2, 11)
    assert Drafts.of(engine, 2) == Drafts(2, 1.0, 2)
    assert Drafts.of(engine, 6) == Drafts(6, 2.0, 2)
    assert Drafts.of(engine, 10) == Drafts(10, 3.0, 2)
    assert Drafts.of(engine, 8).levels == 2.5, "of rounds with 6 and 10"
    assert Drafts.of(engine, 1).levels == 0.5, "half of the rounds drafted nothing"


def test_the_slower_of_reading_and_multiplying_counts() -> None:
    card = Card("by hand", "float32", copy=100.0, matmul=1000.0)
    assert card.seconds(200, 1000) == 2.0
    assert least_seconds({"a": Work(200, 1000), "b": Work(100, 5000)}, card) == 7.0


def test_a_card_is_measured() -> None:
    card = measure_card(torch.device("cpu"), torch.float32)
    assert card.copy > 1e7
    assert card.matmul > 1e7
    assert measure_card(torch.device("cpu"), torch.float32, copy=5.0).copy == 5.0
