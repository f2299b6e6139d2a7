"""What is wrong in a GGUF file is refused by the name of the tensor, or of the metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import save_small_model
from tests.support.gguf_files import CONVERSIONS, convert

Tensors = dict[str, Tensor]
ATTENTION = "model.layers.0.linear_attn"


def load(
    family: str,
    folder: Path,
    tensors: Callable[[Tensors], Tensors] = lambda found: found,
    metadata: dict[str, Any] | None = None,
) -> None:
    """tensors, metadata: in place of what the converter writes."""
    form = CONVERSIONS[family][0]
    small = save_small_model(family, folder / "small", 3, **form.small)
    changed = replace(
        form,
        tensors=lambda found, fields: tensors(form.tensors(found, fields)),
        metadata=lambda fields: form.metadata(fields) | (metadata or {}),
    )
    path = convert(small, folder / "small.gguf", changed)
    source = resolve_model(ModelConfig(model=str(path)))
    load_model(source, find_model_class, torch.float32, torch.device("cpu"))


def without(part: str) -> Callable[[Tensors], Tensors]:
    def change(found: Tensors) -> Tensors:
        left = {name: tensor for name, tensor in found.items() if part not in name}
        assert len(left) < len(found)
        return left

    return change


# Family -> part of a name in the converter's hands, and the tensor that is then missing.
MISSING = {
    "qwen3next": ("layers.0.linear_attn.A_log", f"{ATTENTION}.A_log"),
    "qwen3_5": ("layers.0.linear_attn.in_proj_b", f"{ATTENTION}.in_proj_b.weight"),
    "qwen3_5moe": ("layers.1.mlp.shared_expert_gate", "layers.1.mlp.shared_expert_gate.weight"),
    "llama4": ("layers.0.self_attn.k_proj", "layers.0.self_attn.k_proj.weight"),
    "ernie4_5_moe": ("layers.1.mlp.moe_statics", "layers.1.mlp.gate.e_score_correction_bias"),
    "stablelm": ("layers.0.self_attn.k_layernorm", "layers.0.self_attn.k_norm.weight"),
    "gptneox": ("layers.1.attention.query_key_value.w", "layers.1.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("family", MISSING)
def test_a_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    part, named = MISSING[family]
    with pytest.raises(ModelLoadError, match=rf"missing tensor .*{named}"):
        load(family, tmp_path, without(part))


@pytest.mark.parametrize(
    ("part", "dim"), [("in_proj_qkv", 0), ("in_proj_z", 0), ("conv1d", 0), ("out_proj", 1)]
)
@pytest.mark.parametrize("more", [-32, 32])
def test_sizes_that_are_not_those_of_the_heads_are_named(
    part: str, dim: int, more: int, tmp_path: Path
) -> None:
    def change(found: Tensors) -> Tensors:
        name = f"{ATTENTION}.{part}.weight"
        tensor = found[name]
        size = tensor.shape[dim] + more
        return {**found, name: torch.cat([tensor, tensor], dim).narrow(dim, 0, size)}

    with pytest.raises(ModelLoadError, match=rf"tensor {ATTENTION}\.{part}\.weight has shape"):
        load("qwen3_5", tmp_path, change)


def test_decays_that_are_no_exponents_are_refused(tmp_path: Path) -> None:
    """As of a converter that stores A_log itself."""
    name = f"{ATTENTION}.A_log"
    with pytest.raises(ModelLoadError, match=rf"ssm_a of {ATTENTION}\.A_log is above 0"):
        load("qwen3next", tmp_path, lambda found: {**found, name: -found[name]})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ssm.inner_size": 190}, r"6 value heads do not divide 190 \(inner_size\)"),
        ({"full_attention_interval": 0}, "full_attention_interval 0 is no period"),
        (
            {"attention.recurrent_layers": [True]},
            "recurrent_layers is of 1 layers, the model has 3",
        ),
        ({"ssm.group_count": 4}, "6 value heads over 4 key heads"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load("qwen3_5", tmp_path, metadata=metadata)


def test_experts_in_other_layers_than_a_llama_4_file_tells_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"unexpected tensor model\.layers\.0\.mlp\."):
        load("llama4", tmp_path, metadata={"interleave_moe_layer_step": 1})
