"""Converts GGUF tensor names and layouts to those of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_config import find_gguf_format
from specengine.runner.loader.gguf_fields import num_layers
from specengine.runner.loader.gguf_file import GgufFile

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING = "token_embd.weight"
# Rotary factors belong to the configuration (gguf_fields.py).
_NOT_WEIGHTS = frozenset(
    {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
)


def checkpoint_name(name: str, block_names: Mapping[str, str]) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for an unknown one. block_names: of the family's
    layers, in place of Llama's or beside them."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None:
        return None
    layer, names = f"model.layers.{block[1]}", _BLOCK | dict(block_names)
    if f"{block[2]}.{suffix}" in names:
        return f"{layer}.{names[f'{block[2]}.{suffix}']}"
    return f"{layer}.{names[block[2]]}.{suffix}" if block[2] in names else None


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the row order that pairs neighbouring rotary dimensions: within each head, rows
    (0, 1), (2, 3), ... become 0, 2, 4, ... followed by 1, 3, 5, ..."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def iterate_gguf_weights(
    file: GgufFile, kept: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, float32 tensor) of every weight in the file, an expert at a time. kept:
    types whose matrices come as they are, uint8 [rows, bytes], the type in place of `weight` in
    their names; not of the embedding, of which rows are looked up."""
    format = find_gguf_format(file)[1]
    yield from format.change(_stored_weights(file, format, kept))


def _stored_weights(
    file: GgufFile, format: GgufFormat, kept: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    heads = {"attn_q": _heads(file, "head_count")}
    heads["attn_k"] = _heads(file, "head_count_kv", heads["attn_q"])
    beyond = _blocks_of_mtp(file)
    for name in file.tensor_names:
        if name in _NOT_WEIGHTS or name.startswith(beyond):
            continue
        target = checkpoint_name(name, format.tensors)
        if target is None:
            raise ModelLoadError(
                f"{file.path}: unexpected tensor {name} for architecture {file.architecture!r}"
            )
        if "*" in target:
            yield from _experts(file, name, target, kept)
            continue
        found = None if name == _EMBEDDING else file.blocks(name, kept)
        tensor = file.dequantized(name) if found is None else found[1]
        if found is not None:
            target = f"{target.removesuffix('weight')}{found[0]}"
        kind = name.split(".")[-2]
        if format.has_rotary_pairs and kind in heads:
            tensor = unpermute(tensor, heads[kind])
        if format.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - format.norm_offset
        yield target, tensor


def _experts(
    file: GgufFile, name: str, target: str, kept: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """target: with `*` where an expert's number stands."""
    for expert in range(file.num_experts(name)):
        found = file.blocks(name, kept, expert)
        own = target.replace("*", str(expert))
        if found is None:
            yield own, file.dequantized(name, expert)
        else:
            yield f"{own.removesuffix('weight')}{found[0]}", found[1]


def _blocks_of_mtp(file: GgufFile) -> tuple[str, ...]:
    """How the tensors of blocks begin that predict further tokens, behind those of the target."""
    blocks = range(num_layers(file), int(file.require("{arch}.block_count")))
    return tuple(f"blk.{block}." for block in blocks)


def _heads(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.get(f"{{arch}}.attention.{key}", default)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{file.path}: {key} must be one number above 0, got {value!r}")
    return value
