"""A small random Llama on disk, with a draft of every kind, for proofs that are given no model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_VOCAB = 300
_SPECIALS = ["<eos>", "<bos>"]
_SIZE, _INNER, _HEADS, _KV_HEADS, _LAYERS = 64, 112, 4, 2, 3
_UNSAID = (0, 1, 150, 299)  # tokens that the EAGLE-3 draft's own vocabulary lacks

_Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TinyModels:
    """Directories. Weights are random: drafts are right by chance, and often, where output is made
    of few tokens."""

    target: Path
    standalone: Path
    eagle: Path
    eagle3: Path
    mtp: Path  # one layer
    mtp_layers: Path  # three, one a step
    dflash: Path

    def draft_of(self, algorithm: str) -> Path | None:
        """None where the algorithm needs no draft model."""
        return {
            "STANDALONE": self.standalone,
            "EAGLE": self.eagle,
            "EAGLE3": self.eagle3,
            "MTP": self.mtp,
            "DFLASH": self.dflash,
        }.get(algorithm)


def save_tiny_models(folder: Path) -> TinyModels:
    names = ("target", "standalone", "eagle", "eagle3", "mtp", "mtp-layers", "dflash")
    models = TinyModels(*(folder / name for name in names))
    save_tiny_model(models.target, seed=0)
    save_tiny_model(models.standalone, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        _save_eagle(models.eagle)
        _save_eagle3(models.eagle3)
        _save_mtp(models.mtp, num_layers=1)
        _save_mtp(models.mtp_layers, num_layers=3)
        _save_dflash(models.dflash)
    return models


def save_tiny_model(folder: Path, seed: int) -> None:
    """Weights as transformers saves them, and a tokenizer with a token a byte. Sharper than usual,
    so that greedy text is no tie between all tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=512,
        initializer_range=0.12,
        num_hidden_layers=_LAYERS,
        eos_token_id=0,
        bos_token_id=1,
        **_measures(),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    disable_progress_bar()
    model.save_pretrained(folder)
    _save_tokenizer(folder)


def _measures() -> dict[str, Any]:
    return {
        "vocab_size": _VOCAB,
        "hidden_size": _SIZE,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
    }


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = _SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<unused{i}>" for i in range(_VOCAB - len(names))]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    eos, bos = _SPECIALS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.save_pretrained(folder)


def _save_eagle(folder: Path) -> None:
    tensors = _layer("layers.0", _SIZE) | {"fc.weight": _weight(_SIZE, 2 * _SIZE)}
    _save(folder, tensors, {"model_type": "llama", "num_hidden_layers": 1, **_measures()})


def _save_eagle3(folder: Path) -> None:
    """With a vocabulary of its own, SGLang's layout."""
    said = torch.tensor([token for token in range(_VOCAB) if token not in _UNSAID])
    tensors = _layer("midlayer", 2 * _SIZE) | {
        "midlayer.input_layernorm.weight": _weight(_SIZE),
        "midlayer.hidden_norm.weight": _weight(_SIZE),
        "fc.weight": _weight(_SIZE, _LAYERS * _SIZE),
        "norm.weight": _weight(_SIZE),
        "lm_head.weight": 3 * _weight(len(said), _SIZE),
        "d2t": said - torch.arange(len(said)),
    }
    # What follows one token tells little of what follows another: the head is sharp, and attention,
    # through which alone tokens reach a state, is strong.
    tensors["midlayer.self_attn.o_proj.weight"] *= 5
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(said),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(range(_LAYERS))},
        **_measures(),
    }
    _save(folder, tensors, config)


def _save_mtp(folder: Path, num_layers: int) -> None:
    """DeepSeek-V3's form."""
    tensors: _Tensors = {}
    for index in range(_LAYERS, _LAYERS + num_layers):
        name = f"model.layers.{index}"
        tensors |= _layer(name, _SIZE) | {
            f"{name}.input_layernorm.weight": _weight(_SIZE),
            f"{name}.enorm.weight": _weight(_SIZE),
            f"{name}.hnorm.weight": _weight(_SIZE),
            f"{name}.eh_proj.weight": _weight(_SIZE, 2 * _SIZE),
            f"{name}.shared_head.norm.weight": _weight(_SIZE),
        }
    _save(folder, tensors, {})


def _save_dflash(folder: Path) -> None:
    """Two layers, z-lab's layout."""
    head_dim = _SIZE // _HEADS
    tensors = {
        "fc.weight": _weight(_SIZE, _LAYERS * _SIZE),
        "hidden_norm.weight": _weight(_SIZE),
        "norm.weight": _weight(_SIZE),
    }
    for index in range(2):
        name = f"layers.{index}"
        tensors |= _layer(name, _SIZE) | {
            f"{name}.input_layernorm.weight": _weight(_SIZE),
            f"{name}.self_attn.q_norm.weight": _weight(head_dim),
            f"{name}.self_attn.k_norm.weight": _weight(head_dim),
        }
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": head_dim,
        "block_size": 4,
        "dflash_config": {"target_layer_ids": list(range(_LAYERS)), "mask_token_id": _UNSAID[-1]},
        **_measures(),
    }
    _save(folder, tensors, config)


def _layer(name: str, input_size: int) -> _Tensors:
    """A decoder layer but for the norm before attention, which reads input_size."""
    kv_size = _SIZE * _KV_HEADS // _HEADS
    return {
        f"{name}.self_attn.q_proj.weight": _weight(_SIZE, input_size),
        f"{name}.self_attn.k_proj.weight": _weight(kv_size, input_size),
        f"{name}.self_attn.v_proj.weight": _weight(kv_size, input_size),
        f"{name}.self_attn.o_proj.weight": _weight(_SIZE, _SIZE),
        f"{name}.mlp.gate_proj.weight": _weight(_INNER, _SIZE),
        f"{name}.mlp.up_proj.weight": _weight(_INNER, _SIZE),
        f"{name}.mlp.down_proj.weight": _weight(_SIZE, _INNER),
        f"{name}.post_attention_layernorm.weight": _weight(_SIZE),
    }


def _weight(*shape: int) -> Tensor:
    """The weight of a matrix, or of a norm."""
    return 0.12 * torch.randn(shape) if len(shape) > 1 else 1 + 0.2 * torch.randn(shape)


def _save(folder: Path, tensors: _Tensors, config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
