"""GGUF files of small models, as llama.cpp's converter writes them.

Written from the published format alone: tensors' names are those of the library `gguf`, which the
converter maps with; metadata and changes of values are stated here by architecture. Nothing is
taken from the families' GgufFormat, which the files are to test.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

from tests.support import gguf_hybrid as hybrid
from tests.support import gguf_reordered as reordered

Fields = dict[str, Any]
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Conversion:
    """What is the architecture's own. small: fields of the small model, where a GGUF file tells
    less than config.json. permutes: rows of q and k, from halves to pairs. shift: added to gains
    of norms. metadata: keys behind the architecture's, of config.json's fields. tensors: of the
    checkpoint, before they are named. without: keys that older files lack."""

    architecture: str
    small: Fields = field(default_factory=dict)
    permutes: bool = False
    shift: float = 0.0
    metadata: Callable[[Fields], Fields] = lambda fields: {}
    tensors: Callable[[dict[str, Tensor], Fields], dict[str, Tensor]] = lambda found, fields: found
    without: tuple[str, ...] = ()


def convert(
    folder: Path,
    path: Path,
    conversion: Conversion,
    kinds: dict[str, Any] | None = None,
    tensors_a_part: int = 0,
    has_tokenizer: bool = False,
) -> Path:
    """The model of a folder as a GGUF file. kinds: part of a GGUF name -> type of the tensor.
    tensors_a_part: where the file is split. has_tokenizer: with a vocabulary, of any texts."""
    fields = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, conversion.architecture, split_max_tensors=tensors_a_part)
    for key, value in {**_common(fields), **conversion.metadata(fields)}.items():
        if key not in conversion.without:
            _add(writer, f"{conversion.architecture}.{key}", value)
    if has_tokenizer:
        _add_tokenizer(writer, fields["vocab_size"])
    found = conversion.tensors(_stacked(load_file(folder / "model.safetensors")), fields)
    for name, tensor in _named(found, conversion, fields):
        kind = next((kind for part, kind in (kinds or {}).items() if part in name), None)
        values = tensor.float().contiguous().numpy()
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{token}>" for token in range(3, size))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


def _common(fields: Fields) -> Fields:
    """What the converter writes of every model that has the field."""
    keys = {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "norm_epsilon": "attention.layer_norm_epsilon",
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
    found = {key: fields[name] for name, key in keys.items() if fields.get(name) is not None}
    if fields.get("head_dim"):
        found |= {"attention.key_length": fields["head_dim"]}
        found |= {"attention.value_length": fields["head_dim"]}
    return found | _rope(fields["rope_parameters"])


def _rope(parameters: Fields) -> Fields:
    full = parameters.get("full_attention", parameters)
    found = {"rope.freq_base": float(full["rope_theta"])}
    if "sliding_attention" in parameters:
        found["rope.freq_base_swa"] = float(parameters["sliding_attention"]["rope_theta"])
    kind = full.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(full["factor"])}
    if kind == "yarn":
        original = full["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
        for name in ("beta_fast", "beta_slow"):
            if full.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = float(full[name])
    return found


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' tensors as one of all of them."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        one = _EXPERT.fullmatch(name)
        if one is None:
            found[name] = tensor
        else:
            experts.setdefault(f"{one[1]}.{one[3]}.{one[4]}", {})[int(one[2])] = tensor
    stacks = {name: torch.stack([each[n] for n in sorted(each)]) for name, each in experts.items()}
    return found | stacks


def _named(
    tensors: dict[str, Tensor], conversion: Conversion, fields: Fields
) -> Iterator[tuple[str, Tensor]]:
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == conversion.architecture)
    names = gguf.get_tensor_name_map(kind, fields["num_hidden_layers"])
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields.get("num_key_value_heads")}
    for name, tensor in tensors.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None and name.startswith(("blk.", "rope_", "token_")):
            found = name
        assert found is not None, f"the library has no name of {name}"
        layer = name.split(".")[-2]
        if conversion.permutes and layer in heads:
            tensor = permute(tensor, heads[layer])
        if name.endswith("norm.weight"):
            tensor = tensor + conversion.shift
        yield found, tensor


def permute(rows: Tensor, heads: int) -> Tensor:
    """The two halves of each head, interleaved."""
    first, second = rows.reshape(heads, 2, -1, *rows.shape[1:]).unbind(1)
    return torch.stack([first, second], dim=2).reshape(rows.shape)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _rotated(fields: Fields) -> int:
    head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    parameters = fields["rope_parameters"]
    return int(head * parameters.get("partial_rotary_factor", 1.0))


def _keys(**named: str) -> Callable[[Fields], Fields]:
    """named: field of config.json -> key, with "__" for a dot."""
    return lambda fields: {key.replace("__", "."): fields[name] for name, key in named.items()}


def _window(fields: Fields) -> Fields:
    return {"attention.sliding_window": fields["sliding_window"]}


def _slides(fields: Fields) -> list[bool]:
    return [kind == "sliding_attention" for kind in fields["layer_types"]]


def _gemma2(fields: Fields) -> Fields:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**_window(fields), **{name: fields[name] for name in caps}}


def _phi3(fields: Fields) -> Fields:
    rope, factors = fields["rope_parameters"], {}
    original = fields["original_max_position_embeddings"]
    if rope.get("long_factor"):
        scale = fields["max_position_embeddings"] / original
        root = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        factors = {"rope.scaling.attn_factor": root}
    return {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": _rotated(fields),
        "attention.sliding_window": fields["sliding_window"] or 0,
        **factors,
    }


def _longrope_tensors(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    rope = fields["rope_parameters"]
    for kind in ("long", "short"):
        if rope.get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = torch.tensor(rope[f"{kind}_factor"])
    return found


def _minicpm(fields: Fields) -> Fields:
    return {
        "embedding_scale": float(fields["scale_emb"]),
        "residual_scale": fields["scale_depth"] / fields["num_hidden_layers"] ** 0.5,
        "logit_scale": fields["hidden_size"] / fields["dim_model_base"],
    }


def _exaone4(fields: Fields) -> Fields:
    if fields.get("sliding_window") is None:
        return {}
    return {**_window(fields), "attention.sliding_window_pattern": _slides(fields)}


def _qwen_moe(fields: Fields) -> Fields:
    sizes = {"expert_feed_forward_length": fields["moe_intermediate_size"]}
    shared = fields.get("shared_expert_intermediate_size")
    return sizes | ({} if shared is None else {"expert_shared_feed_forward_length": shared})


def _quantised_gates(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    """llama-quantize drops the first dimension of one row."""
    gates = [name for name in found if name.endswith("shared_expert_gate.weight")]
    assert gates
    return found | {name: found[name].view(-1) for name in gates}


def _with_merged_experts(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """--fuse-gate-up-exps: rows of gate, then those of up."""
    made = dict(found)
    for name in found:
        if name.endswith(".mlp.experts.gate_proj.weight"):
            start = name.removesuffix("gate_proj.weight")
            parts = [made.pop(f"{start}{one}_proj.weight") for one in ("gate", "up")]
            made[f"{start}gate_up_proj.weight"] = torch.cat(parts, dim=1)
    return made


def _with_merged_attention(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    """As checkpoints of the first GLM-4 have q, k and v."""
    made = dict(found)
    for name in found:
        layer, marker, kind = name.partition(".self_attn.q_proj.")
        if marker:
            parts = [made.pop(f"{layer}.self_attn.{one}_proj.{kind}") for one in "qkv"]
            made[f"blk.{layer.rpartition('.')[2]}.attn_qkv.{kind}"] = torch.cat(parts)
    return made


def _gpt_oss(fields: Fields) -> Fields:
    return {**_window(fields), "expert_feed_forward_length": fields["intermediate_size"]}


def _gpt_oss_tensors(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    """Rows of gate and up take turns in the checkpoint, whose matrices are transposed."""
    made = {}
    for name, tensor in found.items():
        if ".experts." not in name:
            made[f"{name}.weight" if name.endswith("sinks") else name] = tensor
            continue
        start, _, leaf = name.rpartition(".")
        kind = "bias" if leaf.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.transpose(1, 2)
        if leaf.startswith("gate_up"):
            made[f"{start}.gate_proj.{kind}"] = rows[:, ::2]
            made[f"{start}.up_proj.{kind}"] = rows[:, 1::2]
        else:
            made[f"{start}.down_proj.{kind}"] = rows
    return made


def _mixtral_tensors(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    """Experts get the names of Llama's own checkpoints."""
    old = ".block_sparse_moe.experts."
    return {name.replace(f"model{'.'}layers", "layers").replace(old, ".feed_forward.experts.")
            if old in name else name: tensor for name, tensor in found.items()}  # fmt: skip


def _deepseek(fields: Fields) -> Fields:
    """Attention is written as it is absorbed: one key and value head, of the compressed size."""
    rotated, rank = fields["qk_rope_head_dim"], fields["kv_lora_rank"]
    dense = fields.get("mlp_layer_types", []).count("dense")
    found = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": fields["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": fields["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": fields.get("first_k_dense_replace", dense),
        **_routed(fields),
    }
    if fields.get("q_lora_rank") is not None:
        found["attention.q_lora_rank"] = fields["q_lora_rank"]
    extent = fields["rope_parameters"].get("mscale_all_dim")
    if extent is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * extent
    return found


def _routed(fields: Fields) -> Fields:
    is_sigmoid = fields["model_type"] != "deepseek_v2"
    found = {
        "expert_count": fields["n_routed_experts"],
        "expert_feed_forward_length": fields["moe_intermediate_size"],
        "expert_shared_count": fields["n_shared_experts"],
        "expert_weights_scale": float(fields["routed_scaling_factor"]),
        "expert_gating_func": 2 if is_sigmoid else 1,
    }
    return found | ({"expert_weights_norm": True} if fields.get("norm_topk_prob") else {})


def _split_kv_b(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    made, sizes = {}, [fields["qk_nope_head_dim"], fields["v_head_dim"]]
    for name, tensor in found.items():
        if not name.endswith("kv_b_proj.weight"):
            made[name] = tensor
            continue
        heads = tensor.view(fields["num_attention_heads"], sum(sizes), -1)
        key, value = torch.split(heads, sizes, dim=1)
        made[name.replace("kv_b_proj", "k_b_proj")] = key.transpose(1, 2)
        made[name.replace("kv_b_proj", "v_b_proj")] = value
    return _corrections(made, fields)


def _corrections(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    own, theirs = "e_score_correction_bias", "e_score_correction.bias"
    return {name.replace(own, theirs): tensor for name, tensor in found.items()}


def _glm4_moe(fields: Fields) -> Fields:
    """With a block that predicts a further token."""
    return {
        "block_count": fields["num_hidden_layers"] + 1,
        "nextn_predict_layers": 1,
        "rope.dimension_count": _rotated(fields),
        "leading_dense_block_count": fields["first_k_dense_replace"],
        **_routed(fields),
    }


def _glm4_moe_tensors(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    extra = f"blk.{fields['num_hidden_layers']}.nextn.eh_proj.weight"
    return _corrections(found, fields) | {extra: torch.ones(4, 8)}


def _hunyuan(fields: Fields) -> Fields:
    """Frequencies as of a larger base, and a context that config.json need not tell."""
    rope, dim = fields["rope_parameters"], fields["head_dim"]
    return {
        "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1,
        "rope.scaling.original_context_length": 262144,
        "context_length": 262144,
    }


def _dots1(fields: Fields) -> Fields:
    return {
        "leading_dense_block_count": fields["first_k_dense_replace"],
        **_routed(fields),
        "expert_weights_norm": fields["norm_topk_prob"],
    }


def _granite_moe_tensors(found: dict[str, Tensor], fields: Fields) -> dict[str, Tensor]:
    """gate and up stand in one tensor in the checkpoint."""
    made = {}
    for name, tensor in found.items():
        if name.endswith("input_linear.weight"):
            layer = name.split(".")[2]
            gate, up = tensor.chunk(2, dim=1)
            made |= {f"blk.{layer}.ffn_gate_exps.weight": gate}
            made |= {f"blk.{layer}.ffn_up_exps.weight": up}
        else:
            made[name] = tensor
    return made


_WINDOWS_OF_2 = ["sliding_attention", "full_attention"] * 2
_WINDOWS_OF_4 = (["sliding_attention"] * 3 + ["full_attention"]) * 2
_WINDOWS_OF_6 = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
_OLMO3_ROPE = {
    "full_attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 64,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}

_WHOLE_HEAD = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}

_SCALES = _keys(
    attention_multiplier="attention__scale",
    embedding_multiplier="embedding_scale",
    residual_multiplier="residual_scale",
    logits_scaling="logit_scale",
)
_MINICPM_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 512,
}

# Family as tests name it -> how it is converted; a family may have several forms.
CONVERSIONS: dict[str, list[Conversion]] = {
    "llama": [Conversion("llama", permutes=True)],
    "mistral": [Conversion("llama", permutes=True, metadata=_window)],
    "qwen2": [Conversion("qwen2")],
    "qwen3": [Conversion("qwen3")],
    "gemma2": [
        Conversion(
            "gemma2",
            {"query_pre_attn_scalar": 32, "num_hidden_layers": 4, "layer_types": _WINDOWS_OF_2},
            shift=1.0,
            metadata=_gemma2,
        )
    ],
    "gemma3": [
        Conversion(
            "gemma3",
            {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": _WINDOWS_OF_6},
            shift=1.0,
            metadata=_window,
            without=without,
        )
        for without in ((), ("rope.freq_base_swa",))
    ],
    "phi3": [
        Conversion("phi3", metadata=_phi3, tensors=_longrope_tensors),
        Conversion(
            "phi3",
            {
                "sliding_window": None,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            metadata=_phi3,
        ),
    ],
    "granite": [Conversion("granite", permutes=True, metadata=_SCALES)],
    "olmo2": [Conversion("olmo2")],
    "olmo3": [
        Conversion(
            "olmo2",
            {"num_hidden_layers": 4, "layer_types": _WINDOWS_OF_4[:4]},
            metadata=lambda fields: {
                **_window(fields),
                "attention.sliding_window_pattern": _slides(fields),
            },
        )
    ],
    "smollm3": [
        Conversion(
            "smollm3",
            {
                "num_hidden_layers": 5,
                "no_rope_layers": [1, 1, 1, 0, 1],
                "use_sliding_window": False,
                "sliding_window": None,
            },
            permutes=True,
        )
    ],
    "glm": [
        Conversion("chatglm", metadata=lambda f: {"rope.dimension_count": _rotated(f)}),
        Conversion(
            "chatglm",
            metadata=lambda f: {"rope.dimension_count": _rotated(f)},
            tensors=_with_merged_attention,
        ),
    ],
    "glm4": [
        Conversion("glm4", metadata=lambda f: {"rope.dimension_count": _rotated(f)}),
    ],
    "cohere2": [
        Conversion(
            "cohere2",
            {"num_hidden_layers": 5, "layer_types": _WINDOWS_OF_4[:5]},
            metadata=lambda fields: {
                **_window(fields),
                "logit_scale": fields["logit_scale"],
                "rope.dimension_count": _rotated(fields),
                "rope.scaling.type": "none",
            },
        )
    ],
    "exaone4": [
        Conversion("exaone4", metadata=_exaone4),
        Conversion(
            "exaone4",
            {"num_hidden_layers": 5, "layer_types": _WINDOWS_OF_4[:5]},
            metadata=_window,
        ),
        Conversion("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    ],
    "seedoss": [
        Conversion("seed_oss"),
        Conversion("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ],
    "starcoder2": [Conversion("starcoder2", {"sliding_window": 4096})],
    "qwen2moe": [
        Conversion("qwen2moe", {"decoder_sparse_step": 1}, metadata=_qwen_moe),
        Conversion(
            "qwen2moe", {"decoder_sparse_step": 1}, metadata=_qwen_moe, tensors=_quantised_gates
        ),
    ],
    "qwen3moe": [Conversion("qwen3moe", {"mlp_only_layers": []}, metadata=_qwen_moe)],
    "mixtral": [Conversion("llama", permutes=True, tensors=_mixtral_tensors)],
    "deepseekv2": [
        Conversion("deepseek2", metadata=_deepseek, tensors=_split_kv_b),
        Conversion(  # as DeepSeek-V2-Lite
            "deepseek2",
            {"topk_method": "greedy", "n_group": None, "topk_group": None},
            metadata=_deepseek,
            tensors=_split_kv_b,
        ),
    ],
    "deepseekv3": [Conversion("deepseek2", metadata=_deepseek, tensors=_split_kv_b)],
    "glm4moe": [Conversion("glm4moe", metadata=_glm4_moe, tensors=_glm4_moe_tensors)],
    "granitemoe": [
        Conversion("granitemoe", permutes=True, metadata=_SCALES, tensors=_granite_moe_tensors)
    ],
    "olmoe": [Conversion("olmoe")],
    "minicpm": [
        Conversion("minicpm", permutes=True, metadata=_minicpm),
        Conversion(
            "minicpm",
            {"rope_parameters": _MINICPM_ROPE},
            permutes=True,
            metadata=lambda fields: {**_minicpm(fields), "rope.scaling.type": "longrope"},
            tensors=_longrope_tensors,
        ),
    ],
    "nemotron": [
        Conversion(
            "nemotron",
            shift=1.0,
            metadata=lambda fields: {
                "attention.layer_norm_epsilon": fields["norm_eps"],
                "rope.dimension_count": _rotated(fields),
                "rope.scaling.type": "none",
            },
        )
    ],
    "minimaxm2": [
        Conversion(
            "minimax-m2",
            metadata=lambda fields: {
                "expert_feed_forward_length": fields["intermediate_size"],
                "rope.dimension_count": fields["rotary_dim"],
            },
            tensors=_corrections,
        )
    ],
    "llama4": [
        Conversion(
            "llama4",
            {
                **_LLAMA4,
                "num_hidden_layers": 5,
                "no_rope_layers": [1, 1, 1, 0, 1],
                "moe_layers": [1, 3],
                "interleave_moe_layer_step": 2,
            },
            metadata=reordered.llama4,
            tensors=reordered.llama4_tensors,
        ),
        Conversion(
            "llama4",
            {
                **_LLAMA4,
                "no_rope_layers": [1, 1, 1],
                "layer_types": ["full_attention"] * 3,
                "moe_layers": [0, 1, 2],
                "num_local_experts": 128,
                "use_qk_norm": False,
            },
            metadata=reordered.llama4,
            tensors=reordered.llama4_tensors,
        ),
    ],
    "ernie4_5_moe": [
        Conversion("ernie4_5-moe", metadata=reordered.ernie, tensors=reordered.ernie_tensors),
        Conversion(
            "ernie4_5-moe",
            {"moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False},
            metadata=reordered.ernie,
            tensors=reordered.squeezed_ernie_tensors,
        ),
    ],
    "stablelm": [
        Conversion(
            "stablelm",
            small,
            metadata=reordered.stablelm,
            tensors=reordered.stablelm_tensors,
            without=("rope.freq_base",),
        )
        for small in (
            {},
            {
                "qk_layernorm": False,
                "use_parallel_residual": False,
                "use_qkv_bias": False,
                "rope_parameters": _WHOLE_HEAD,
            },
        )
    ],
    "gptneox": [
        Conversion(
            "gptneox",
            small,
            metadata=reordered.gptneox,
            tensors=reordered.gptneox_tensors,
            without=("rope.freq_base", "attention.head_count_kv"),
        )
        for small in ({}, {"use_parallel_residual": False, "rope_parameters": _WHOLE_HEAD})
    ],
    "qwen3next": [
        Conversion(
            "qwen3next",
            {**hybrid.SMALL, "mlp_only_layers": []},
            metadata=hybrid.sizes,
            tensors=tensors,
        )
        for tensors in (hybrid.next_tensors, hybrid.old_next_tensors)
    ],
    "qwen3_5": [
        Conversion("qwen35", hybrid.SMALL, metadata=hybrid.sizes_3_5, tensors=hybrid.tensors_3_5),
        Conversion(
            "qwen35",
            hybrid.SMALL_BY_4,
            metadata=hybrid.sizes_with_mtp,
            tensors=hybrid.tensors_with_mtp,
            without=("full_attention_interval",),
        ),
        Conversion(
            "qwen35",
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            metadata=lambda fields: {
                **hybrid.sizes_3_5(fields),
                "attention.recurrent_layers": [False, True, False],
            },
            tensors=hybrid.tensors_3_5,
            without=("full_attention_interval",),
        ),
    ],
    "qwen3_5moe": [
        Conversion(
            "qwen35moe",
            {**hybrid.SMALL, "intermediate_size": 0},
            metadata=hybrid.sizes_3_5,
            tensors=hybrid.tensors_3_5,
            without=("feed_forward_length",),
        ),
        Conversion(
            "qwen35moe",
            hybrid.SMALL,
            metadata=hybrid.sizes_3_5,
            tensors=lambda found, fields: _with_merged_experts(
                _quantised_gates(hybrid.tensors_3_5(found, fields), fields)
            ),
        ),
    ],
    "arcee": [
        Conversion(
            "arcee", small, permutes=True, metadata=lambda f: {"rope.dimension_count": _rotated(f)}
        )
        for small in ({}, {"attention_bias": True, "mlp_bias": True})
    ],
    "hunyuandensev1": [
        Conversion("hunyuan-dense", {"max_position_embeddings": 262144}, metadata=_hunyuan),
        Conversion("hunyuan-dense", {"rope_parameters": _WHOLE_HEAD, "attention_bias": True}),
    ],
    "dots1": [Conversion("dots1", {"sliding_window": None}, metadata=_dots1, tensors=_corrections)],
    "gptoss": [
        Conversion("gpt-oss", {"swiglu_limit": 7.0}, metadata=_gpt_oss, tensors=_gpt_oss_tensors)
    ],
}


def forms() -> Iterable[tuple[str, int]]:
    return [(family, form) for family, each in CONVERSIONS.items() for form in range(len(each))]


F16 = GGMLQuantizationType.F16
