"""Targets whose MTP layers often guess their next tokens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.draft.mtp_reading import Reading

TARGETS = {"deepseek": "llama", "qwen3_next": "qwen3", "mimo": "qwen2", "ernie": "llama"}


def predictable(folder: Path, form: str, layers: int, residue: float) -> Path:
    """Scale what the layers add to the embedding by `residue`, those of the target and of MTP. With
    0 the last token alone decides the next one, for both alike."""
    reading = Reading.of(folder)
    weights, size = reading.weights, reading.config["hidden_size"]
    weights["model.embed_tokens.weight"] *= 8  # to the size of a normed one
    if reading.config["tie_word_embeddings"]:  # which would repeat the last token for ever
        weights["lm_head.weight"] = torch.randn(reading.embed_table.shape) * 0.12
        reading.config["tie_word_embeddings"] = False
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= residue
    for index in range(layers):
        layer = f"model.layers.{reading.config['num_hidden_layers'] + index}"
        inner = f"model.mtp_layers.{index}"
        projection, embedding_norm, final_norm = {
            "deepseek": (f"{layer}.eh_proj", f"{layer}.enorm", f"{layer}.shared_head.norm"),
            "qwen3_next": ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.norm"),
            "ernie": (
                f"model.mtp_linear_proj.{index}",
                f"model.mtp_emb_norm.{index}",
                "model.norm",
            ),
            "mimo": (f"{inner}.input_proj", f"{inner}.token_layernorm", f"{inner}.final_layernorm"),
        }[form]
        halves = weights[f"{projection}.weight"].chunk(2, dim=1)
        identity, rest = torch.eye(size), halves[0] * residue
        pair = [rest, identity] if form == "mimo" else [identity, rest]
        weights[f"{projection}.weight"] = torch.cat(pair, dim=1)
        weights[f"{embedding_norm}.weight"] = torch.ones(size)
        weights[f"{final_norm}.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(reading.config))
    return folder
