"""An EAGLE-3 draft of the right shape and random weights: with a forced accepted length, it costs
what a trained one does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specengine.core.errors import ConfigError
from specengine.draft.rope import draft_rope

ALGORITHM = "EAGLE3"  # that such a draft is of, as core.registry.DRAFTERS calls it


@contextmanager
def random_eagle3(config: Any, draft_vocab: int) -> Iterator[Path]:
    """A folder with such a draft for a target of this Hugging Face configuration; it is deleted
    afterwards. Raises ConfigError where it could not be."""
    with tempfile.TemporaryDirectory(prefix="random-eagle3-") as folder:
        write_random_eagle3(Path(folder), config, draft_vocab)
        yield Path(folder)


def write_random_eagle3(folder: Path, config: Any, draft_vocab: int) -> None:
    """In SGLang's layout. Raises ConfigError where the draft could not be."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    if not 0 < draft_vocab <= config.vocab_size:
        raise ConfigError(
            f"a random draft of {draft_vocab} tokens: the target has {config.vocab_size}, and the "
            "draft's must be some of these"
        )
    layers = feature_layers(config.num_hidden_layers)
    # A target's other fields would make of the draft what it is not: latent attention, for one.
    known = {name for name in LlamaConfig().to_dict() if not name.startswith("_")}
    kept = {name: one for name, one in config.to_dict().items() if name in known}
    written = {
        **kept,
        "rope_parameters": draft_rope(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    (folder / "config.json").write_text(json.dumps(written, default=str))
    save_file(_tensors(config, draft_vocab), folder / "model.safetensors")


def feature_layers(count: int) -> list[int]:
    """A low, a middle and a high one of `count` layers: 1, n/2 - 1, n - 4 where there are enough.
    Raises ConfigError for fewer than three."""
    if count < 3:
        raise ConfigError(f"EAGLE-3 takes features of three layers, and the target has {count}")
    low = min(1, count - 3)
    middle = max(low + 1, count // 2 - 1)
    return [low, middle, max(middle + 1, count - 4)]


def _tensors(config: Any, draft_vocab: int) -> dict[str, torch.Tensor]:
    hidden, wide = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = config.num_attention_heads
    queries, keys = heads * head, (getattr(config, "num_key_value_heads", None) or heads) * head
    shapes = {
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
        "fc.weight": (hidden, 3 * hidden),
        "lm_head.weight": (draft_vocab, hidden),
    }
    random = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(shape, generator=random).mul_(0.02).bfloat16()
        for name, shape in shapes.items()
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"midlayer.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    made["norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    made["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    return made
