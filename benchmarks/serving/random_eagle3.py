"""Writes an EAGLE-3 draft of the right shape and random weights, for measuring speed with
`--speculative-simulate-accept-length`.

    python benchmarks/serving/random_eagle3.py FOLDER --target smollm2-shape --draft-vocab 16384
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specengine.core.config import ModelConfig
from specengine.runner.loader.source import resolve_model


def tensors(config: Any, draft_vocab: int) -> dict[str, torch.Tensor]:
    hidden, wide = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
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
    made = {name: torch.randn(shape).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        made[f"midlayer.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    made["norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    made["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="smollm2-shape")
    parser.add_argument("--draft-vocab", type=int, default=16384)
    args = parser.parse_args()
    config = resolve_model(ModelConfig(model=args.target, load_format="dummy")).hf_config
    layers = config.num_hidden_layers
    written = {
        **{k: v for k, v in config.to_dict().items() if not k.startswith("_")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": args.draft_vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, layers // 2 - 1, layers - 4]},
    }
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(written, default=str))
    torch.manual_seed(0)
    save_file(tensors(config, args.draft_vocab), args.folder / "model.safetensors")


if __name__ == "__main__":
    main()
