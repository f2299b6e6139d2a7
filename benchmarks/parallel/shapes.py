"""Directories with a configuration and a tokenizer alone, for --load-format dummy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specengine.runner.loader.builtin import BUILTIN_MODELS
from specengine.runner.loader.tokenizer import byte_tokenizer

# By name: a built-in shape, and what differs.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "30b-a3b, 8 layers": ("qwen3-30b-a3b-shape", {"num_hidden_layers": 8}),
    "30b-a3b, 8 layers, few tokens": (
        "qwen3-30b-a3b-shape",
        {"num_hidden_layers": 8, "vocab_size": 32768},
    ),
    "small experts": (
        "qwen3-30b-a3b-shape",
        {
            "num_hidden_layers": 8,
            "vocab_size": 4096,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
}


def write_shape(name: str, folder: Path) -> str:
    """A directory in `folder`. name: of `_SHAPES`, or a built-in shape."""
    base, differs = _SHAPES.get(name, (name, {}))
    config = BUILTIN_MODELS[base].config | differs
    place = folder / name.replace(" ", "-").replace(",", "")
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    byte_tokenizer(config["vocab_size"]).save_pretrained(place)
    return str(place)
