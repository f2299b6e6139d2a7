"""FP8 experts that a checkpoint keeps in one tensor a layer, as Qwen3-VL, ModelOpt (Llama 4) and
transformers write them, say what the dense ones say that they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.experts import Experts
from specengine.layers.quantization import linears
from tests.support.families import save_small_model
from tests.support.quantised import FORMATS, Pair, quantise_model
from tests.support.quantised_models import difference, load

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """family: of the small model. form: of all its products. scale: what ends the names of scales.
    swapped: a row is an input. shares: one scale for all experts."""

    family: str
    form: str
    scale: str
    swapped: bool
    shares: bool = False


KINDS = {
    "transformers": Kind("qwen3moe", "fp8 blocks", "_scale_inv", False),
    "Qwen3-VL": Kind("qwen3moe", "fp8 blocks", "_scale_inv", True),
    "a scale a row": Kind("qwen3moe", "compressed fp8 rows", "_weight_scale", False),
    "a scale an expert": Kind("qwen3_5moe", "fp8 tensor", "_weight_scale_inv", False),
    "ModelOpt": Kind("llama4", "modelopt", "_weight_scale", True, shares=True),
}


def upright(tensor: Tensor, swapped: bool) -> Tensor:
    return tensor.transpose(1, 2).contiguous() if swapped and tensor.dim() == 3 else tensor


def joined(tensors: Tensors, swapped: bool) -> Tensors:
    """With all experts of a layer in one tensor, whatever was saved."""
    found: dict[str, list[Tensor]] = {}
    rest: Tensors = {}
    for name, tensor in tensors.items():
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if one is None:
            rest[name] = tensor
        elif one[3] == "down":
            found.setdefault(f"{one[1]}.down_proj", []).append(tensor)
        elif one[3] == "gate":
            both = torch.cat([tensor, tensors[name.replace(".gate_proj", ".up_proj")]])
            found.setdefault(f"{one[1]}.gate_up_proj", []).append(both)
    return rest | {name: upright(torch.stack(ones), swapped) for name, ones in found.items()}


def packed(weight: Tensor, kind: Kind) -> tuple[Tensors, Tensor]:
    """Tensors by the end of their names, and the weight that they stand for. Experts are numbered
    as they stand in a file: fewer than ten."""
    rows = upright(weight, kind.swapped)
    parts = [rows.flatten(0, 1)] if kind.shares else list(rows)
    made = [FORMATS[kind.form].pack(part) for part in parts]
    codes = torch.cat([one.tensors["weight"] for one in made]).view(rows.shape)
    tensors = {"": upright(codes, kind.swapped)}
    for leaf in made[0].tensors:
        end = kind.scale if "weight_scale" in leaf else f"_{leaf}"
        if leaf != "weight":
            scales = [one.tensors[leaf] for one in made]
            tensors[end] = scales[0] if kind.shares else upright(torch.stack(scales), kind.swapped)
    return tensors, upright(torch.cat([one.dense for one in made]).view(rows.shape), kind.swapped)


def made(kind: Kind, folder: Path, size: int = 128) -> Pair:
    sizes = {"moe_intermediate_size": size, "intermediate_size": size, "intermediate_size_mlp": 128}
    source = save_small_model(kind.family, folder / "source", 5, **sizes)
    path = source / "model.safetensors"
    saved = joined(load_file(path), kind.swapped)
    save_file(saved, path, metadata={"format": "pt"})
    pair = quantise_model(source, folder, FORMATS[kind.form])
    for place, is_dense in ((pair.quantised, False), (pair.dense, True)):
        path, tensors = place / "model.safetensors", load_file(place / "model.safetensors")
        for name in [
            name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        ]:
            found, dense = packed(tensors.pop(name), kind)
            tensors |= (
                {name: dense} if is_dense else {f"{name}{end}": t for end, t in found.items()}
            )
        save_file(tensors, path, metadata={"format": "pt"})
    return pair


@pytest.mark.parametrize("name", list(KINDS))
def test_experts_of_one_tensor_say_what_dense_ones_say(
    name: str, tmp_path: Path, mini_runner: Any
) -> None:
    pair = made(KINDS[name], tmp_path)
    assert load_file(pair.quantised / "model.safetensors").keys() & {
        f"model.layers.2.{part}.experts.gate_up_proj{KINDS[name].scale}"
        for part in ("mlp", "feed_forward")
    }
    assert difference(pair, mini_runner) < 1e-5


@pytest.mark.parametrize("name", ["Qwen3-VL", "ModelOpt"])
def test_experts_of_one_tensor_stay_in_fp8(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    pair = made(KINDS[name], tmp_path)
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    whole, kind = load_file(pair.dense / "model.safetensors"), KINDS[name]
    layers = [
        (name, one)
        for name, one in load(pair.quantised).named_modules()
        if isinstance(one, Experts)
    ]
    assert layers
    for path, found in layers:
        assert found.packed is not None
        start = path.replace(".mlp.", ".feed_forward." if kind.family == "llama4" else ".mlp.")
        for stack, part in ((found.packed.gate_up, "gate_up"), (found.packed.down, "down")):
            expected = upright(whole[f"{start}.{part}_proj"], kind.swapped)
            for expert, rows in enumerate(expected):
                torch.testing.assert_close(stack.one(expert).dequantised(), rows)


@pytest.mark.parametrize("form", ["compressed w4a16", "compressed fp8 rows"])
def test_llama_4_with_a_tensor_for_each_expert_says_what_the_dense_one_says(
    form: str, tmp_path: Path, mini_runner: Any
) -> None:
    """As llm-compressor writes it, and Meta in FP8."""
    sizes = {"intermediate_size": 64, "intermediate_size_mlp": 128}
    source = save_small_model("llama4", tmp_path / "source", 5, **sizes)
    path, apart = source / "model.safetensors", {}
    for name, tensor in load_file(source / "model.safetensors").items():
        start, marker, product = name.rpartition(".experts.")
        rows = tensor.transpose(1, 2) if marker else tensor
        names = ("gate_proj", "up_proj") if product == "gate_up_proj" else (product,)
        for expert, one in enumerate(rows if marker else []):
            for part, half in zip(names, one.chunk(len(names)), strict=True):
                apart[f"{start}.experts.{expert}.{part}.weight"] = half.contiguous()
        if not marker:
            apart[name] = tensor
    save_file(apart, path, metadata={"format": "pt"})
    assert difference(quantise_model(source, tmp_path, FORMATS[form]), mini_runner) < 1e-5


def test_blocks_of_both_gate_and_up_are_refused(tmp_path: Path) -> None:
    pair = made(KINDS["transformers"], tmp_path, size=48)
    with pytest.raises(ModelLoadError, match=r"gate_up_proj_scale_inv .* both gate and up"):
        load(pair.quantised)


SPLIT = ExpertTensors("e.gate_up", "e.down")


@pytest.mark.parametrize("is_early", [True, False])
def test_scales_go_behind_their_weight_whichever_comes_first(is_early: bool) -> None:
    given = [
        ("l.e.gate_up", torch.zeros(2, 128, 4)),
        ("l.e.gate_up_scale_inv", torch.rand(2, 2, 1)),
    ]
    found = list(SPLIT.split(given[::-1] if is_early else given))
    assert [name for name, _ in found[:4]] == [
        f"l.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")
    ]
    assert dict(found[4:]) == {
        f"l.mlp.experts.{expert}.{part}_proj.weight_scale_inv": given[1][1][expert, row : row + 1]
        for expert in (0, 1)
        for row, part in enumerate(("gate", "up"))
    }


@pytest.mark.parametrize("shape", [(5,), (3, 2, 1), (2, 3, 1)])
def test_scales_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    given = [("l.e.gate_up", torch.zeros(2, 128, 4)), ("l.e.gate_up_scale_inv", torch.ones(shape))]
    with pytest.raises(ModelLoadError, match=r"l\.e\.gate_up_scale_inv has shape"):
        list(SPLIT.split(given))


def test_scales_without_their_weight_are_left() -> None:
    given = [("l.e.down_scale_inv", torch.ones(2))]
    assert list(SPLIT.split(given)) == given
