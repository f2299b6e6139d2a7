"""The drafters that ship: their names, their files, and who gets them without asking."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from safetensors import safe_open

from specengine import LLM, SpecConfig
from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.loaded import draft_directory
from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS, draft_path_of
from specengine.engine.factories import drafters_with_models
from specengine.runner.loader.builtin import BUILTIN_MODELS, shipped_directory

NAME = "smollm2-135m-eagle3"
SMOLLM2 = ModelConfig(model="smollm2")
EAGLE3 = SpecConfig(algorithm="EAGLE3")

# What the loaders of SGLang and of vLLM take for Llama's EAGLE-3 form; vLLM renames midlayer.
TENSORS = {
    "d2t": ([12288], "I64"),  # offsets: token of the target less token of the draft
    "t2d": ([49152], "BOOL"),
    "fc.weight": ([576, 3 * 576], "BF16"),
    "lm_head.weight": ([12288, 576], "BF16"),
    "norm.weight": ([576], "BF16"),
    "midlayer.hidden_norm.weight": ([576], "BF16"),
    "midlayer.input_layernorm.weight": ([576], "BF16"),
    "midlayer.post_attention_layernorm.weight": ([576], "BF16"),
    "midlayer.self_attn.q_proj.weight": ([576, 2 * 576], "BF16"),
    "midlayer.self_attn.k_proj.weight": ([192, 2 * 576], "BF16"),
    "midlayer.self_attn.v_proj.weight": ([192, 2 * 576], "BF16"),
    "midlayer.self_attn.o_proj.weight": ([576, 576], "BF16"),
    "midlayer.mlp.gate_proj.weight": ([2816, 576], "BF16"),
    "midlayer.mlp.up_proj.weight": ([2816, 576], "BF16"),
    "midlayer.mlp.down_proj.weight": ([576, 2816], "BF16"),
}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 2816,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "vocab_size": 49152,
    "draft_vocab_size": 12288,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,  # true would make SGLang drop lm_head
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    # vLLM takes this, the layers by what they read, and SGLang that, by their outputs from 0.
    "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 14, 26],
        "use_aux_hidden_state": True,
    },
}


def test_names_of_tensors_and_configuration() -> None:
    folder = draft_directory(NAME)
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert found == TENSORS
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    tokens = d2t + d2t.new_ones(len(d2t)).cumsum(0) - 1
    assert tokens.tolist() == t2d.nonzero().flatten().tolist()


@pytest.mark.parametrize("name", SHIPPED_DRAFTERS)
def test_of_each(name: str) -> None:
    drafter = SHIPPED_DRAFTERS[name]
    assert drafter.algorithm in drafters_with_models()
    assert drafter.target in BUILTIN_MODELS
    assert name not in BUILTIN_MODELS
    files = {path.name: path.stat().st_size for path in drafter.directory.iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= set(files)
    assert sum(files.values()) <= 30e6


def test_who_gets_one_without_asking() -> None:
    assert draft_path_of(EAGLE3, SMOLLM2) == NAME
    assert draft_path_of(SpecConfig(algorithm="eagle3"), SMOLLM2) == NAME
    own = SpecConfig(algorithm="EAGLE3", draft_model_path="mine")
    assert draft_path_of(own, SMOLLM2) == "mine"
    assert draft_path_of(EAGLE3, ModelConfig(model="another")) is None
    assert draft_path_of(EAGLE3, ModelConfig(model="smollm2", load_format="dummy")) is None
    for algorithm in (None, "NGRAM", "EAGLE", "STANDALONE", "MTP"):
        assert draft_path_of(SpecConfig(algorithm=algorithm), SMOLLM2) is None
    tiny = {"EAGLE3": "tiny-eagle3", "MTP": "tiny-mtp", "NEXTN": "tiny-mtp"}
    tiny["standalone"] = "tiny-standalone"
    for algorithm, wanted in tiny.items():
        assert draft_path_of(SpecConfig(algorithm=algorithm), ModelConfig(model="tiny")) == wanted


def test_the_tiny_family_is_small() -> None:
    tiny = [one.directory for one in SHIPPED_DRAFTERS.values() if one.target == "tiny"]
    folders = [*tiny, shipped_directory("tiny")]
    assert len(folders) == 4
    assert sum(path.stat().st_size for one in folders for path in one.iterdir()) < 15e6


def test_another_target_is_refused(small_models: dict[str, Path]) -> None:
    target = str(small_models["llama"])
    with pytest.raises(ConfigError, match="name it with --speculative-draft-model-path"):
        LLM(target, EAGLE3, max_total_tokens=512)
    named = SpecConfig(algorithm="EAGLE3", draft_model_path=NAME)
    with pytest.raises(ModelLoadError, match="take the draft of this target"):
        LLM(target, named, max_total_tokens=512)


@pytest.mark.parametrize("name", ["smollm2-eagle4", "~no-such-user/drafts"])
def test_an_unknown_name_is_refused_with_those_known(name: str) -> None:
    with pytest.raises(ModelLoadError, match=NAME):
        draft_directory(name)


def test_the_log_says_what_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "specengine"):
        LLM("tiny", EAGLE3, max_total_tokens=512)
    assert "drafting with tiny-eagle3, the drafter that ships for tiny" in caplog.text
