"""Multimodal checkpoints load their language part, and answer as the whole does to text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ModelLoadError
from specengine.runner.loader.language_part import language_config
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.conftest import save_tokenizer
from tests.draft import eagle_checkpoints

PROMPT = [(7 * i * i + 3 * i) % 300 + 10 for i in range(70)]
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
}
SEES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_SEES: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}
# (model_type, class, language family, text, vision)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3ForCausalLM",
        {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]},
        SEES,
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "MistralForCausalLM",
        {"model_type": "mistral"},
        {"model_type": "pixtral", **SEES, "head_dim": 16},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlamaForCausalLM",
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", **SEES},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2ForCausalLM",
        {"rope_parameters": MROPE},
        {**QWEN_SEES, "intermediate_size": 48, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": 112, "num_local_experts": 2, "attention_chunk_size": 512},
        {
            **SEES,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        {"rope_parameters": MROPE},
        {
            **QWEN_SEES,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [],
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3MoeForCausalLM",
        {
            "rope_parameters": MROPE,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
        {
            **QWEN_SEES,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [],
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        HYBRID,
        {**QWEN_SEES, "intermediate_size": 48, "out_hidden_size": 64},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        HYBRID | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
        {**QWEN_SEES, "intermediate_size": 48, "out_hidden_size": 64},
    ),
}


@pytest.fixture(params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_whole(request.param, tmp_path)


def save_whole(model_type: str, folder: Path, **fields: Any) -> Path:
    """A small random multimodal model; fields: of its text, in place of those in CASES."""
    name, _, text, vision = CASES[model_type]
    torch.manual_seed(3)
    model_class = getattr(transformers, name)
    text_config = {**SIZES, **text, **fields}
    config = model_class.config_class(text_config=text_config, vision_config=vision)
    model = model_class(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return folder


def logits_of(folder: Path, mini_runner: Any) -> Tensor:
    source = resolve_model(ModelConfig(model=str(folder)))
    model = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    found: Tensor = mini_runner(model).logits(ForwardMode.EXTEND, [PROMPT])
    return found


def test_language_part_answers_as_the_whole(folder: Path, mini_runner: Any) -> None:
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    name, family, _, _ = CASES[model_type]
    assert resolve_model(ModelConfig(model=str(folder))).architectures == [family]
    whole = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    # Llama 4's whole model of transformers 5.24 looks for outputs of images that text has not.
    reads = whole.language_model if model_type == "llama4" else whole
    with torch.no_grad():
        expected = reads(torch.tensor([PROMPT])).logits[0]
    found = logits_of(folder, mini_runner)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    # As most of them are published.
    tensors = load_file(folder / "model.safetensors")
    older = {
        name.replace("model.language_model.", "language_model.model.")
        .replace("model.vision_tower.", "vision_tower.")
        .replace("model.visual.", "visual."): as_published(model_type, name, tensor)
        for name, tensor in tensors.items()
    }
    save_file(older, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, mini_runner), found)


def as_published(model_type: str, name: str, tensor: Tensor) -> Tensor:
    """Qwen3-VL's experts have a row an input."""
    is_turned = model_type == "qwen3_vl_moe" and ".experts." in name
    return tensor.transpose(1, 2).contiguous() if is_turned else tensor


# Windows; positions of three kinds; chunks of attention and experts; recurrent layers.
DRAFTED: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen2_5_vl": {},
    "llama4": {"attention_chunk_size": 32},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}


@pytest.mark.parametrize("model_type", DRAFTED)
def test_random_eagle3_changes_no_token_of_a_language_part(model_type: str, tmp_path: Path) -> None:
    target = save_whole(model_type, tmp_path / "target", num_hidden_layers=3, **DRAFTED[model_type])
    save_tokenizer(target)
    draft = eagle_checkpoints.eagle3(tmp_path / "draft", target)

    def greedy(spec: SpecConfig | None) -> list[list[int]]:
        llm = LLM(str(target), spec, dtype="float32", max_total_tokens=1024)
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        found = [one.token_ids for one in llm.generate([PROMPT, PROMPT[:1]], params)]
        llm.engine.scheduler.check_invariant()
        assert spec is None or llm.engine.scheduler.spec_totals.num_draft_tokens > 0
        return found

    options = {"draft_model_path": str(draft), "num_steps": 3, "adaptive": False}
    plain = greedy(None)
    for topk in (1, 3):
        spec = SpecConfig(algorithm="EAGLE3", eagle_topk=topk, num_draft_tokens=4 * topk, **options)
        assert greedy(spec) == plain


def test_language_part_without_a_family_is_refused_by_name(tmp_path: Path) -> None:
    text = {**SIZES, "model_type": "opt"}
    fields = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "text_config": text}))
    source = resolve_model(ModelConfig(model=str(tmp_path), load_format="dummy"))
    with pytest.raises(ModelLoadError, match="OPTForCausalLM is not supported; known: Llama"):
        load_model(source, find_model_class, torch.float32, torch.device("cpu"))


def test_part_that_is_no_language_model_is_refused_by_name() -> None:
    text = SimpleNamespace(model_type="novel_text")
    whole = SimpleNamespace(architectures=None, get_text_config=lambda decoder: text)
    with pytest.raises(ValueError, match="of model_type 'novel_text', is not supported"):
        language_config(whole, {})
