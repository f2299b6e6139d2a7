"""Converts GGUF tensor names and layouts to those of Hugging Face checkpoints."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_config import find_gguf_format
from specengine.runner.loader.gguf_fields import num_layers
from specengine.runner.loader.gguf_file import GgufFile

logger = logging.getLogger(__name__)

_FLOATING = ("f32", "f16", "bf16", "f64")
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
    block = re.fullmatch(r"blk\.(\d+)\.((\w+)((?:\.\w+)?))", name)
    if block is None:
        return None
    layer, names = f"model.layers.{block[1]}", _BLOCK | dict(block_names)
    whole, stem, suffix = block[2], block[3], block[4]
    if whole in names:
        return f"{layer}.{names[whole]}"
    return f"{layer}.{names[stem]}{suffix}" if stem in names else None


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the row order that pairs neighbouring rotary dimensions: within each head, rows
    (0, 1), (2, 3), ... become 0, 2, 4, ... followed by 1, 3, 5, ..."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


@dataclass(frozen=True)
class Kept:
    """Types of GGUF whose matrices come as they are, uint8 [rows, bytes], the type in place of
    `weight` in their names: of linear layers, but for the embedding, of which rows are looked up,
    and of experts."""

    linear: Collection[str] = ()
    experts: Collection[str] = ()


def iterate_gguf_weights(file: GgufFile, kept: Kept | None = None) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, float32 tensor) of every weight in the file, an expert at a time. kept:
    None dequantises all."""
    reader = _Reader(file, kept or Kept())
    yield from reader.format.change(reader.weights(), file)
    if kept is not None:
        reader.log_dense()


class _Reader:
    def __init__(self, file: GgufFile, kept: Kept) -> None:
        self.file, self.kept = file, kept
        self.format: GgufFormat = find_gguf_format(file)[1]
        self.heads = {"attn_q": _heads(file, "head_count")}
        self.heads["attn_k"] = _heads(file, "head_count_kv", self.heads["attn_q"])
        self.dense: Counter[str] = Counter()  # quantised types -> their tensors that are not kept

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        beyond = _blocks_of_mtp(self.file)
        for name in self.file.tensor_names:
            if name in _NOT_WEIGHTS or name.startswith(beyond):
                continue
            target = checkpoint_name(name, self.format.tensors)
            if target is None:
                raise ModelLoadError(
                    f"{self.file.path}: unexpected tensor {name} for architecture "
                    f"{self.file.architecture!r}"
                )
            if "*" in target:
                for expert in range(self.file.num_experts(name)):
                    own = target.replace("*", str(expert))
                    yield self._matrix(name, own, self.kept.experts, expert)
            else:
                yield self._linear(name, target)

    def _linear(self, name: str, target: str) -> tuple[str, Tensor]:
        kind = name.split(".")[-2]
        target, tensor = self._matrix(name, target, () if name == _EMBEDDING else self.kept.linear)
        if self.format.has_rotary_pairs and kind in self.heads:
            tensor = unpermute(tensor, self.heads[kind])
        if self.format.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - self.format.norm_offset
        return target, tensor

    def _matrix(
        self, name: str, target: str, kept: Collection[str], expert: int | None = None
    ) -> tuple[str, Tensor]:
        found = self.file.blocks(name, kept, expert)
        if found is not None:
            return f"{target.removesuffix('weight')}{found[0]}", found[1]
        if name != _EMBEDDING:
            self.dense[self.file.type_name(name)] += not expert  # once a tensor
        return target, self.file.dequantized(name, expert)

    def log_dense(self) -> None:
        found = {kind: count for kind, count in self.dense.items() if kind not in _FLOATING}
        if found:
            logger.warning(
                "%s: tensors become dense, as no product multiplies their blocks: %s",
                self.file.path.name,
                ", ".join(f"{count} in {kind}" for kind, count in sorted(found.items())),
            )


def _blocks_of_mtp(file: GgufFile) -> tuple[str, ...]:
    """How the tensors of blocks begin that predict further tokens, behind those of the target."""
    blocks = range(num_layers(file), int(file.require("{arch}.block_count")))
    return tuple(f"blk.{block}." for block in blocks)


def _heads(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.get(f"{{arch}}.attention.{key}", default)
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{file.path}: {key} must be one number above 0, got {value!r}")
    return value
