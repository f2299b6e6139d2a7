"""Every cause, planted in a good drafter, is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specengine.lab.doctor.diagnose import Examination, diagnose
from specengine.lab.doctor.hypothesis import View
from specengine.lab.doctor.report import Diagnosis
from tests.draft.eagle_checkpoints import eagle3, save
from tests.lab import doctor_world as world

pytestmark = pytest.mark.slow

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Plant = Callable[[Tensors, Config], None]
IDS = "eagle_aux_hidden_state_layer_ids"
ATTENTION = "midlayer.self_attn."


@dataclass(frozen=True)
class Pair:
    target: Path
    draft: Path
    texts: list[Any]


@pytest.fixture(scope="module")
def pair(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    target = world.save_target(root / "target", small_models["llama"])
    texts = world.texts_of(target)
    return Pair(target, world.train(root / "draft", target, texts), texts)


def planted(pair: Pair, folder: Path, plant: Plant) -> Path:
    shutil.copytree(pair.draft, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    plant(tensors, config)
    return save(folder, tensors, config)


def examine(target: Path, draft: Path, fixed: Path | None = None, **flags: Any) -> Diagnosis:
    config = world.config_of(target, draft, **flags)
    examination = Examination(
        config, world.PROMPTS, world.NEW_TOKENS, with_reference=False, fixed=fixed
    )
    return diagnose(examination, lambda what: None)


def sglang_ids(*ids: int) -> Plant:
    return lambda tensors, config: config.update(eagle_config={IDS: list(ids)})


def vllm_ids(*ids: int) -> Plant:
    def plant(tensors: Tensors, config: Config) -> None:
        del config["eagle_config"]
        config[IDS] = list(ids)

    return plant


def order(*places: int) -> Plant:
    def plant(tensors: Tensors, config: Config) -> None:
        blocks = tensors["fc.weight"].chunk(3, dim=1)
        tensors["fc.weight"] = torch.cat([blocks[place] for place in places], dim=1)

    return plant


def absolute_d2t(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def lost_d2t(tensors: Tensors, config: Config) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])


def swapped_halves(tensors: Tensors, config: Config) -> None:
    for name in "qkv":
        weight = tensors[f"{ATTENTION}{name}_proj.weight"]
        tensors[f"{ATTENTION}{name}_proj.weight"] = torch.cat(weight.chunk(2, 1)[::-1], dim=1)


def swapped_norms(tensors: Tensors, config: Config) -> None:
    one, other = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def swapped_both(tensors: Tensors, config: Config) -> None:
    swapped_halves(tensors, config)
    swapped_norms(tensors, config)


def flag(name: str) -> Plant:
    return lambda tensors, config: config.update({name: True})


def nested_flag(name: str) -> Plant:
    return lambda tensors, config: config["eagle_config"].update({name: True})


def needless_norms(tensors: Tensors, config: Config) -> None:
    tensors.update({f"fc_norm.{place}.weight": torch.ones(world.SIZE) for place in range(3)})


def norms_less_one(tensors: Tensors, config: Config) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "norm" in name:
            tensors[name] = tensor - 1


def rows_in_pairs(tensors: Tensors, config: Config) -> None:
    for name in "qk":
        rows = tensors[f"{ATTENTION}{name}_proj.weight"]
        halves = rows.view(world.HEADS, 2, -1, rows.shape[1])
        tensors[f"{ATTENTION}{name}_proj.weight"] = halves.transpose(1, 2).reshape(rows.shape)


def rows_in_halves_of_halves(tensors: Tensors, config: Config) -> None:
    for name in "qk":
        rows = tensors[f"{ATTENTION}{name}_proj.weight"]
        pairs = rows.view(world.HEADS, -1, 2, rows.shape[1])
        tensors[f"{ATTENTION}{name}_proj.weight"] = pairs.transpose(1, 2).reshape(rows.shape)


def slow_rotation(tensors: Tensors, config: Config) -> None:
    config["rope_theta"] = 3.0


def foreign_embedding(tensors: Tensors, config: Config) -> None:
    tensors["embed_tokens.weight"] = torch.randn(320, world.SIZE)


def short_embedding(tensors: Tensors, config: Config) -> None:
    tensors["embed_tokens.weight"] = torch.randn(300, world.SIZE)


def two_mistakes(tensors: Tensors, config: Config) -> None:
    lost_d2t(tensors, config)
    sglang_ids(2, 4, 5)(tensors, config)


def two_refusals(tensors: Tensors, config: Config) -> None:
    absolute_d2t(tensors, config)
    short_embedding(tensors, config)


CAUSES: list[tuple[str, Plant, list[str]]] = [
    ("vLLM's ids for SGLang's", sglang_ids(2, 4, 5), ["layer ids: [1, 3, 4]"]),
    ("SGLang's ids for vLLM's", vllm_ids(1, 3, 4), ["layer ids: [1, 3, 4]"]),
    ("one id", sglang_ids(0, 3, 4), ["layer ids: [1, 3, 4]"]),
    ("feature order", order(2, 0, 1), ["feature order: order"]),
    ("absolute d2t", absolute_d2t, ["d2t: "]),
    ("lost d2t", lost_d2t, ["d2t: t2d says"]),
    ("halves", swapped_halves, ["concatenation: the other way round"]),
    ("names of norms", swapped_norms, ["concatenation: each other's name"]),
    ("halves and norms", swapped_both, ["concatenation: and so are their norms"]),
    ("residual flag", flag("norm_before_residual"), ["norm flags: norm_before_residual false"]),
    ("output flag", flag("norm_output"), ["norm flags: norm_output false"]),
    (
        "nested flag",
        nested_flag("norm_before_residual"),
        ["norm flags: norm_before_residual false"],
    ),
    ("feature norms", needless_norms, ["norm flags: without fc_norm"]),
    ("norms less 1", norms_less_one, ["norm flags: less 1"]),
    ("GGUF's rows", rows_in_pairs, ["q/k rows: in pairs"]),
    ("unpermuted twice", rows_in_halves_of_halves, ["q/k rows: once too often"]),
    ("rope_theta", slow_rotation, ["rotary frequencies: the target's"]),
    ("embedding", foreign_embedding, ["embedding and head: own embedding"]),
    ("rows missing", short_embedding, ["embedding and head: own embedding"]),
    ("two refusals", two_refusals, ["embedding and head and d2t: as offsets"]),
    ("two mistakes", two_mistakes, ["d2t: t2d says", "layer ids: [1, 3, 4]"]),
]


def test_a_good_drafter_is_healthy(pair: Pair) -> None:
    found = examine(pair.target, pair.draft)
    assert found.status == "healthy"
    assert found.causes == []
    assert found.before is not None
    assert found.before.first.value > 0.9


@pytest.mark.parametrize(
    ("plant", "named"), [one[1:] for one in CAUSES], ids=[c[0] for c in CAUSES]
)
def test_causes_are_found(pair: Pair, tmp_path: Path, plant: Plant, named: list[str]) -> None:
    """And the drafter is written as it was before."""
    fixed = tmp_path / "fixed"
    found = examine(pair.target, planted(pair, tmp_path / "draft", plant), fixed)
    assert found.status == "cause found"
    assert len(found.causes) == len(named)
    for cause, wanted in zip(found.causes, named, strict=True):
        suspect, words = wanted.split(": ")
        assert cause.suspect == suspect
        assert words in cause.claim
    assert found.after is not None
    assert found.after.first.value > 0.9
    once, now = (load_file(folder / "model.safetensors") for folder in (pair.draft, fixed))
    torch.testing.assert_close(now, once)


def test_what_is_written_is_healthy(pair: Pair, tmp_path: Path) -> None:
    draft = planted(pair, tmp_path / "draft", two_mistakes)
    assert examine(pair.target, draft, tmp_path / "fixed").written == str(tmp_path / "fixed")
    assert examine(pair.target, tmp_path / "fixed").status == "healthy"


VIEWS = [
    (View(token_shift=-1), "token shift", "took the current token, and not the next one"),
    (View(token_shift=-1, label_shift=-1), "token shift", "known by then"),
    (View(token_shift=1, label_shift=1), "token shift", "one token earlier"),
]


@pytest.mark.parametrize(("view", "suspect", "words"), VIEWS, ids=str)
def test_rows_that_were_fed_otherwise(
    pair: Pair, tmp_path: Path, view: View, suspect: str, words: str
) -> None:
    """No edit of the files mends that, and none is written."""
    draft = world.train(tmp_path / "draft", pair.target, pair.texts, view)
    found = examine(pair.target, draft, tmp_path / "fixed")
    [cause] = found.causes
    assert (cause.suspect, found.status) == (suspect, "cause found")
    assert words in cause.claim
    assert "train again" in cause.remedy
    assert found.written is None
    assert not (tmp_path / "fixed").exists()


def test_positions_that_stood_still(pair: Pair, tmp_path: Path) -> None:
    draft = world.train(tmp_path / "draft", pair.target, pair.texts, View(position_step=0))
    [cause] = examine(pair.target, draft).causes
    assert cause.suspect == "positions"


def test_a_drafter_that_learnt_nothing(pair: Pair, tmp_path: Path) -> None:
    draft = eagle3(tmp_path / "draft", pair.target)
    found = examine(pair.target, draft)
    assert (found.status, found.causes) == ("no cause found", [])
    assert "hardly trained" in found.verdict[-1]
    assert not found.checks[0].holds, "and its vocabulary is small"


def test_a_drafter_of_another_vocabulary(pair: Pair, tmp_path: Path) -> None:
    """The engine refuses it, and nothing that is tried helps: its own words are the verdict."""
    draft = planted(pair, tmp_path / "draft", lambda tensors, config: config.update(vocab_size=999))
    found = examine(pair.target, draft)
    assert (found.status, found.causes, found.before) == ("cause found", [], None)
    assert f"the draft {draft} was made for a target of vocab_size 999" in found.verdict[-1]


def test_another_chat_template(pair: Pair, tmp_path: Path) -> None:
    """The template that it was pair with lies beside the draft."""
    draft = shutil.copytree(pair.draft, tmp_path / "draft")
    tokenizer = world.tokenizer_of(pair.target)
    (draft / "chat_template.jinja").write_text(tokenizer.chat_template)
    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}{{ m.content }}! {{ m.role }}{% endfor %} >>> ")
    found = examine(pair.target, draft, chat_template=str(other))
    [cause] = found.causes
    assert cause.suspect == "chat template"
    assert "beside the draft" in cause.claim
