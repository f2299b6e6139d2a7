"""MiniCPM as it is published, which transformers computes as Granite; and its sparse attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM, MiniCPM3Config, MiniCPM3ForCausalLM

from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import save_small_model

PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(70)]
# config.json of MiniCPM-2B, with other sizes: it does not state tie_word_embeddings, nor head_dim.
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.1,
    "intermediate_size": 112,
    "max_position_embeddings": 4096,
    "model_type": "minicpm",
    "num_attention_heads": 6,
    "num_hidden_layers": 5,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 320,
    "scale_emb": 12,
    "dim_model_base": 32,
    "scale_depth": 1.4,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "long_factor": [1.0 + i for i in range(8)],
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "original_max_position_embeddings": 4096,
}
SPARSE = {"kernel_size": 32, "block_size": 64, "window_size": 2048, "topk": 64, "dense_len": 8192}


def granite(fields: dict[str, Any], is_tied: bool) -> Any:
    """Transformers' Granite with MiniCPM's scaling, of random weights: sqrt(5) layers, 16 numbers a
    head, hidden_size over dim_model_base 3."""
    rope = fields.get("rope_scaling") or {"rope_type": "default"}
    given = {name: fields[name] for name in GraniteConfig().to_dict() if name in fields}
    given |= {
        "rope_parameters": {"rope_theta": 10000.0, **rope},
        "tie_word_embeddings": is_tied,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 / 5**0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 3.0,
    }
    given.pop("model_type")
    config = GraniteConfig(**given)
    torch.manual_seed(7)
    model = GraniteForCausalLM(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model


def publish(folder: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def load(folder: Path, context_length: int | None = None) -> Any:
    source = resolve_model(ModelConfig(model=str(folder)))
    cpu = torch.device("cpu")
    return load_model(source, find_model_class, torch.float32, cpu, context_length=context_length)


def assert_as(reference: Any, model: Any, mini_runner: Any) -> None:
    found = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("form", ["tied unsaid", "head of its own", "longrope, 2 KV heads"])
def test_published_checkpoint_equals_granite_of_equal_multipliers(
    form: str, tmp_path: Path, mini_runner: Any
) -> None:
    """MiniCPM-2B, MiniCPM-1B's kind, and MiniCPM4's."""
    fields, is_tied = dict(PUBLISHED), form == "tied unsaid"
    if form == "longrope, 2 KV heads":
        fields |= {"num_key_value_heads": 2, "rope_scaling": LONGROPE}
    if not is_tied:
        fields["tie_word_embeddings"] = False
    reference = granite(fields, is_tied)
    tensors = dict(reference.state_dict())
    if is_tied:
        del tensors["lm_head.weight"]
    assert_as(reference, load(publish(tmp_path / "m", fields, tensors)), mini_runner)


def test_minicpm3_as_it_is_published_equals_transformers(tmp_path: Path, mini_runner: Any) -> None:
    """With the older rope_scaling, and fields that transformers does not read."""
    save_small_model("minicpm3", tmp_path / "small", seed=5)
    fields = json.loads((tmp_path / "small" / "config.json").read_text())
    for name in ("rope_parameters", "head_dim", "qk_head_dim", "tie_word_embeddings"):
        fields.pop(name)
    scaling = LONGROPE | {"original_max_position_embeddings": fields["max_position_embeddings"]}
    scaling["factor"] = 1.0  # as the lengths say; MiniCPM3 of transformers 5.17 needs it stated
    scaling |= {name: scaling[name][:4] for name in ("long_factor", "short_factor")}
    fields |= {"rope_scaling": scaling, "model_type": "minicpm3", "auto_map": {"AutoConfig": "c.M"}}
    folder = publish(tmp_path / "m", fields, load_file(tmp_path / "small" / "model.safetensors"))
    reference = MiniCPM3ForCausalLM.from_pretrained(
        folder,
        config=MiniCPM3Config.from_dict(dict(fields)),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    assert_as(reference.eval(), load(folder), mini_runner)


def sparse(folder: Path, **fields: Any) -> Path:
    """MiniCPM4.1's configuration, which asks for sparse attention of long texts."""
    given = {**PUBLISHED, "max_position_embeddings": 32768, "sparse_config": SPARSE, **fields}
    reference = granite(PUBLISHED, is_tied=True)
    tensors = dict(reference.state_dict())
    del tensors["lm_head.weight"]
    return publish(folder, given, tensors)


@pytest.mark.parametrize("context", [None, 8193])
def test_sparse_attention_is_refused_where_texts_reach_it(
    context: int | None, tmp_path: Path
) -> None:
    folder = sparse(tmp_path / "m")
    with pytest.raises(
        ModelLoadError, match=r"sparse_config.*from 8192 tok.*--context-length 8192"
    ):
        load(folder, context)


def test_sparse_configuration_is_dense_in_shorter_contexts(
    tmp_path: Path, mini_runner: Any
) -> None:
    model = load(sparse(tmp_path / "m"), 8192)
    assert_as(granite(PUBLISHED, is_tied=True), model, mini_runner)


def test_sparse_attention_of_all_texts_is_refused(tmp_path: Path) -> None:
    folder = sparse(tmp_path / "m", sparse_config={**SPARSE, "dense_len": -1})
    with pytest.raises(
        ModelLoadError, match=r"sparse attention \(InfLLM\).*take sparse_config out"
    ):
        load(folder, 128)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 8}, "num_experts 8 is not supported by MiniCPM"),
        ({"hidden_act": "fatrelu"}, "activation 'fatrelu' is not supported"),
    ],
)
def test_other_forms_are_refused_by_the_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """MiniCPM-MoE and MiniCPM-S."""
    tensors = {"model.embed_tokens.weight": torch.zeros(320, 96)}
    folder = publish(tmp_path / "m", {**PUBLISHED, **fields}, tensors)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)
