"""MTP layers under the names that published checkpoints give them, as vLLM 0.24 and FastDeploy read
them: the layer drafts, and each of its tensors is asked for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ModelLoadError
from specengine.draft.mtp.load import load_mtp
from specengine.draft.mtp.model import MtpModel
from tests.draft.test_mtp_model import Runner, assert_near, load_models, load_target
from tests.halves import slow_but
from tests.support.device_rounds import run_on_device
from tests.support.families import VOCAB, save_small_model
from tests.support.mtp_targets import predictable
from tests.support.quantised import FORMATS, quantise_model

SIZE, EXPERTS = 64, "{expert}"
_ATTENTION = "self_attn.{q,k,v,o}_proj.weight"
_HEAD_NORMS = "self_attn.{q,k}_norm.weight"
_QKV_BIAS = "self_attn.{q,k,v}_proj.bias"
_LATENT = (
    "self_attn.{q_a_proj,q_a_layernorm,q_b_proj,kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}"
    ".weight"
)
_NORMS = "{input,post_attention}_layernorm.weight"
_DENSE = "mlp.{gate,up,down}_proj.weight"
_EACH_EXPERT = f"mlp.experts.{EXPERTS}.{{gate,up,down}}_proj.weight"
_ROUTED = (
    "mlp.gate.{weight,e_score_correction_bias}",
    "mlp.shared_experts.{gate,up,down}_proj.weight",
)
_SHARED_GATE = (
    "mlp.gate.weight",
    "mlp.shared_expert_gate.weight",
    "mlp.shared_expert.{gate,up,down}_proj.weight",
)
_NEXTN = "{eh_proj,enorm,hnorm,embed_tokens,shared_head.norm,shared_head.head}.weight"


@dataclass(frozen=True)
class Published:
    """layer: how tensors of the decoder layer begin. parts: of it, braces standing for several
    names. beside: whole names. donor: fields of a small model whose last layer has the shapes.
    is_nested: the text is part of a multimodal checkpoint."""

    family: str
    layer: str
    parts: tuple[str, ...]
    beside: tuple[str, ...] = ()
    donor: dict[str, Any] = field(default_factory=dict)
    is_nested: bool = False


_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
_GATED = (_ATTENTION, _HEAD_NORMS, _NORMS)
_QWEN = ("mtp.{fc,norm,pre_fc_norm_embedding,pre_fc_norm_hidden}.weight",)
PUBLISHED = {
    "DeepSeek-V3": Published(
        "deepseekv3", "model.layers.3", (_LATENT, _NORMS, _EACH_EXPERT, *_ROUTED, _NEXTN)
    ),
    "GLM-4.5-Air": Published(
        "glm4moe",
        "model.layers.3",
        (_ATTENTION, _QKV_BIAS, _NORMS, _EACH_EXPERT, *_ROUTED, _NEXTN),
        donor={"use_qk_norm": False},
    ),
    "GLM-4.7-Flash": Published(
        "glm4moelite",
        "model.layers.3",
        (_LATENT, _NORMS, _EACH_EXPERT, *_ROUTED, _NEXTN),
        donor={"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "Qwen3-Next-80B-A3B": Published(
        "qwen3next", "mtp.layers.0", (*_GATED, _EACH_EXPERT, *_SHARED_GATE), _QWEN, _FULL
    ),
    "Qwen3.5-27B": Published(
        "qwen3_5", "mtp.layers.0", (*_GATED, _DENSE), _QWEN, _FULL, is_nested=True
    ),
    "Qwen3.5-35B-A3B": Published(
        "qwen3_5moe",
        "mtp.layers.0",
        (*_GATED, "mlp.experts.{gate_up,down}_proj", *_SHARED_GATE),
        _QWEN,
        _FULL,
        is_nested=True,
    ),
    "MiMo-7B": Published(
        "mimo",
        "model.mtp_layers.0",
        (
            _ATTENTION,
            _QKV_BIAS,
            _NORMS,
            _DENSE,
            "{token_layernorm,hidden_layernorm,input_proj,final_layernorm}.weight",
        ),
    ),
    "ERNIE-4.5-21B-A3B": Published(
        "ernie4_5_moe",
        "model.mtp_block.0",
        (_ATTENTION, _NORMS, _DENSE),
        ("model.mtp_{emb_norm,hidden_norm,linear_proj}.0.weight",),
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
}
_JOINS = ("eh_proj", "fc", "input_proj", "linear_proj")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_TABLES = ("embed_tokens", "shared_head.head")


def spelled(text: str, experts: int) -> Iterator[str]:
    """Each name that braces stand for."""
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        yield text
        return
    several = map(str, range(experts)) if found[0] == EXPERTS else found[1].split(",")
    for one in several:
        yield from spelled(text[: found.start()] + one + text[found.end() :], experts)


def shape_of(name: str, published: Published, donor: dict[str, Tensor]) -> torch.Size:
    """By the donor's last layer, but for what a decoder layer has not."""
    like = name.replace(f"{published.layer}.", "model.layers.3.")
    if like in donor:
        return donor[like].shape
    stem = re.sub(r"\.\d+$", "", name.removesuffix(".weight"))
    if stem.endswith(_TABLES):
        return torch.Size([VOCAB, SIZE])
    if stem.endswith(_JOINS):
        return torch.Size([SIZE, 2 * SIZE])
    if ".experts." in stem:
        start, _, kind = like.rpartition(".")
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        rows, columns = donor[f"{start}.0.{parts[0]}.weight"].shape
        count = sum(bool(re.match(rf"{start}\.\d+\.down_proj", one)) for one in donor)
        return torch.Size([count, rows * len(parts), columns])
    assert "norm" in stem, name
    return torch.Size([SIZE])


def merged_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of a layer as Qwen3.5 has them: [experts, rows of gate, then of up, columns]."""
    made = {name: one for name, one in tensors.items() if ".experts." not in name}
    for start in {
        name.partition("experts.")[0] + "experts" for name in tensors.keys() - made.keys()
    }:
        count = sum(name.startswith(f"{start}.") for name in tensors) // 3
        each = {
            kind: torch.stack([tensors[f"{start}.{n}.{kind}_proj.weight"] for n in range(count)])
            for kind in ("gate", "up", "down")
        }
        made[f"{start}.gate_up_proj"] = torch.cat([each["gate"], each["up"]], dim=1)
        made[f"{start}.down_proj"] = each["down"]
    return made


def nest(folder: Path) -> None:
    """A text model's directory as the language part of a multimodal one."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    [name] = text.pop("architectures")
    model_type = text["model_type"].removesuffix("_text")
    fields = {
        "architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": model_type,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | {"model_type": f"{model_type}_text", "mtp_num_hidden_layers": 1},
        "vision_config": {"model_type": model_type, "depth": 1, "hidden_size": 32, "num_heads": 2},
    }
    path.write_text(json.dumps(fields))


def publish(published: Published, tmp_path: Path) -> tuple[Path, list[str]]:
    """A target of three layers with its MTP layer, in one checkpoint; the layer's names."""
    fields = {"num_hidden_layers": 4, **published.donor}
    donor = load_file(
        save_small_model(published.family, tmp_path / "donor", 3, **fields) / "model.safetensors"
    )
    fields = {name: one[:3] if isinstance(one, list) else one for name, one in fields.items()}
    fields["num_hidden_layers"] = 3
    folder = save_small_model(published.family, tmp_path / "target", 3, **fields)
    tensors = load_file(folder / "model.safetensors")
    experts = len({one[1] for name in donor if (one := re.search(r"\.experts\.(\d+)\.", name))})
    texts = [f"{published.layer}.{part}" for part in published.parts] + list(published.beside)
    names = [name for text in texts for name in spelled(text, experts)]
    if "experts.{gate_up,down}_proj" in " ".join(published.parts):
        tensors = merged_experts(tensors)
    if published.is_nested:
        nest(folder)
        tensors = {
            re.sub(r"^model\.", "model.language_model.", name): one for name, one in tensors.items()
        }
        tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(32)
    else:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    generator = torch.Generator().manual_seed(3)
    for name in names:
        shape = shape_of(name, published, donor)
        noise = torch.randn(shape, generator=generator)
        tensors[name] = noise * 0.12 if len(shape) > 1 else 1 + 0.2 * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, names


@pytest.fixture(scope="module", params=list(PUBLISHED))
def checkpoint(
    request: pytest.FixtureRequest,
    small_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[str]]:
    published = PUBLISHED[request.param]
    folder, names = publish(published, tmp_path_factory.mktemp(published.family))
    for path in small_models["llama"].glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder, names


FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
SPEC = SpecConfig(algorithm="MTP", adaptive=False, num_steps=2)


def spoken(llm: LLM) -> list[tuple[list[int], int, int]]:
    """Of each prompt the tokens, and how many steps and accepted tokens they took."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found = llm.generate(["The quick brown fox", "0123456789" * 5], params)
    return [(one.token_ids, one.spec.num_rounds, one.spec.num_accepted) for one in found]


@pytest.fixture(scope="module")
def plain(checkpoint: tuple[Path, list[str]]) -> list[list[int]]:
    return [tokens for tokens, *_ in spoken(LLM(str(checkpoint[0]), **FLAGS))]


ON_DEVICE = ("DeepSeek-V3", "Qwen3-Next-80B-A3B", "MiMo-7B", "ERNIE-4.5-21B-A3B")  # each form
PLACES = [(name, name in ON_DEVICE) for name in PUBLISHED]


@pytest.mark.parametrize(
    ("checkpoint", "on_device"),
    slow_but(PLACES, product(PUBLISHED, [False, True])),
    indirect=["checkpoint"],
)
def test_published_layer_drafts_and_changes_no_token(
    on_device: bool, checkpoint: tuple[Path, list[str]], plain: list[list[int]]
) -> None:
    llm = LLM(str(checkpoint[0]), SPEC, **FLAGS)
    if on_device:
        run_on_device(llm)
    assert [tokens for tokens, *_ in spoken(llm)] == plain
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0


@pytest.mark.parametrize("experts", ["first and last", pytest.param("all", marks=pytest.mark.slow)])
def test_each_published_tensor_is_asked_for(
    experts: str, checkpoint: tuple[Path, list[str]]
) -> None:
    """But for tables, in whose place the target's serve."""
    folder, names = checkpoint
    numbers = [int(one[1]) for name in names if (one := _EXPERT.search(name))]
    if experts != "all":
        between = {f".experts.{number}." for number in numbers} - {
            f".experts.{number}." for number in (0, max(numbers, default=0))
        }
        names = [name for name in names if not any(one in name for one in between)]
    path = folder / "model.safetensors"
    tensors, target = load_file(path), load_target(folder)
    try:
        for name in names:
            if name.removesuffix(".weight").endswith(_TABLES):
                continue
            save_file({one: x for one, x in tensors.items() if one != name}, path)
            with pytest.raises(ModelLoadError):
                load_mtp(target)
    finally:
        save_file(tensors, path, metadata={"format": "pt"})
    load_mtp(target)


def test_layer_without_a_norm_of_its_own_follows_new_weights_of_the_target(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    """ERNIE's: the drafts are those of an engine that started with the new weights."""
    first, _ = publish(PUBLISHED["ERNIE-4.5-21B-A3B"], tmp_path)
    for path in small_models["llama"].glob("*token*"):
        (first / path.name).write_bytes(path.read_bytes())
    predictable(first, "ernie", 1, residue=0.2)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    tensors = load_file(second / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(SIZE, generator=generator)
    tensors["model.norm.weight"] += noise
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    llm, started = (LLM(str(one), SPEC, **FLAGS) for one in (first, second))
    before = spoken(llm)
    llm.update_weights(str(second))
    assert spoken(llm) == spoken(started) != before


def states_of(model: MtpModel) -> Tensor:
    """What the layer gives of nine rows."""
    hidden = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(2))
    return Runner(model)(list(range(5, 14)), hidden)[0]


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-Next-80B-A3B", "MiMo-7B"])
def test_layer_in_fp8_blocks_computes_what_its_weights_say(name: str, tmp_path: Path) -> None:
    """Its joining projection stays in floating point, as DeepSeek-V3 publishes it."""
    folder, names = publish(PUBLISHED[name], tmp_path)
    pair = quantise_model(folder, tmp_path / "made", FORMATS["fp8 blocks of 128"])
    own = load_file(folder / "model.safetensors")
    [joins] = [one for one in names if one.removesuffix(".weight").endswith(_JOINS)]
    for place in (pair.quantised, pair.dense):
        path = place / "model.safetensors"
        kept = {one: x for one, x in load_file(path).items() if not one.startswith(joins)}
        save_file(kept | {joins: own[joins]}, path, metadata={"format": "pt"})
    [quantised], [dense] = load_models(pair.quantised), load_models(pair.dense)
    assert_near(states_of(quantised), states_of(dense))


@pytest.mark.parametrize("has_config", [True, False], ids=["with its config", "without config"])
def test_layer_in_fp8_blocks_may_be_named_by_its_folder(has_config: bool, tmp_path: Path) -> None:
    """Codes and scales are read there as in the target's own folder."""
    folder, names = publish(PUBLISHED["Qwen3-Next-80B-A3B"], tmp_path)
    made = quantise_model(folder, tmp_path / "made", FORMATS["fp8 blocks of 128"]).quantised
    apart = Path(shutil.copytree(made, tmp_path / "apart"))
    tensors = load_file(apart / "model.safetensors")
    layer = {name: one for name, one in tensors.items() if name.startswith("mtp.")}
    assert len(layer) > len(names)  # scales among them
    save_file(layer, apart / "model.safetensors", metadata={"format": "pt"})
    if not has_config:
        (apart / "config.json").unlink()
    [own], [named] = load_models(made), load_models(made, draft_model_path=str(apart))
    assert torch.equal(states_of(own), states_of(named))


@pytest.mark.parametrize("has_config", [True, False], ids=["with its config", "without config"])
def test_layer_in_floating_point_may_stand_beside_a_quantised_target(
    has_config: bool, tmp_path: Path
) -> None:
    folder, _ = publish(PUBLISHED["Qwen3-Next-80B-A3B"], tmp_path)
    pair = quantise_model(folder, tmp_path / "made", FORMATS["fp8 blocks of 128"])
    apart = Path(shutil.copytree(pair.dense, tmp_path / "apart"))
    if not has_config:
        (apart / "config.json").unlink()
    [own], [named] = (
        load_models(place, draft_model_path=str(apart)) for place in (pair.dense, pair.quantised)
    )
    assert_near(states_of(own), states_of(named))
