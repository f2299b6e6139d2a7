"""Fields of config.json that a GGUF file states in several keys, or in its tensors. Families use
them in their GgufFormat; gguf_config.py does for all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from specengine.core.errors import ModelLoadError

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

WINDOW = "attention.sliding_window"  # behind the architecture, as the keys below
_PATTERN = "attention.sliding_window_pattern"


def biases(file: GgufFile, **stems: str | tuple[str, ...]) -> dict[str, bool]:
    """stems: field of config.json -> GGUF name of a layer's tensor, or several; true where the file
    has the bias of one."""
    names = set(file.tensor_names)
    found = {}
    for field, given in stems.items():
        each = (given,) if isinstance(given, str) else given
        found[field] = any(f"blk.0.{stem}.bias" in names for stem in each)
    return found


def window(file: GgufFile) -> int | None:
    """Tokens that layers with a window see; None where the file states none. Some write 0 for
    it."""
    found: int | None = file.get(f"{{arch}}.{WINDOW}")
    return found or None


def num_layers(file: GgufFile) -> int:
    """Layers of the target. Those that predict further tokens (MTP) follow them as blocks."""
    mtp: int = file.get("{arch}.nextn_predict_layers", 0)
    return int(file.require("{arch}.block_count")) - mtp


def layer_types(file: GgufFile, period: int) -> list[str]:
    """`layer_types` of config.json. A file may state which layers have a window, one by one or by
    its own period; most do not: the last of each `period` layers sees all tokens, the others have a
    window, where the file has one."""
    count = num_layers(file)
    told = file.get(f"{{arch}}.{_PATTERN}", period)
    if window(file) is None:
        return ["full_attention"] * count
    if isinstance(told, int):
        slides = [bool(layer % told < told - 1) for layer in range(count)]
    else:
        slides = [bool(one) for one in told][:count]
    if len(slides) != count:
        raise ModelLoadError(
            f"{file.path}: {_PATTERN} is of {len(slides)} layers, the model has {count}"
        )
    return ["sliding_attention" if one else "full_attention" for one in slides]


def rope_by_type(file: GgufFile, theta_of_windows: float | None = None) -> dict[str, Any]:
    """`rope_parameters` of a family in which layers with a window rotate without scaling.
    theta_of_windows: of those layers, where the file has no `rope.freq_base_swa`; None is that of
    the others."""
    full = rope_parameters(file)
    default = full["rope_theta"] if theta_of_windows is None else theta_of_windows
    theta = shortest(file.get("{arch}.rope.freq_base_swa", default))
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def rope_parameters(file: GgufFile) -> dict[str, Any]:
    """`rope_parameters` of config.json, but for what a family states."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": shortest(file.get("{arch}.rope.freq_base", 10000.0)),
    }
    rotated, head = file.get("{arch}.rope.dimension_count"), head_dim(file)
    if rotated is not None and rotated < head:
        rope["partial_rotary_factor"] = rotated / head
    kind = file.get("{arch}.rope.scaling.type", "none")
    names = file.tensor_names
    if "rope_factors_short.weight" in names and "rope_factors_long.weight" in names:
        rope |= _longrope(file)
    elif "rope_freqs.weight" in names:
        rope |= _frequency_factors(file)
    elif kind == "linear":
        factor = shortest(file.require("{arch}.rope.scaling.factor"))
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= _yarn(file)
    elif kind != "none":
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} is not supported")
    return rope


def rope_of_part(file: GgufFile) -> dict[str, Any]:
    """`rope_parameters`, with `partial_rotary_factor` also where it is 1: for configurations that
    take a part by default."""
    return {"partial_rotary_factor": 1.0, **rope_parameters(file)}


def head_dim(file: GgufFile) -> int:
    hidden = int(file.require("{arch}.embedding_length"))
    heads = int(file.require("{arch}.attention.head_count"))
    return int(file.get("{arch}.attention.key_length", hidden // heads))


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _longrope(file: GgufFile) -> dict[str, Any]:
    """Two sets of divisors, of short and of long contexts. Files without the original context have
    it as their own (MiniCPM4)."""
    context = file.require("{arch}.context_length")
    original = file.get("{arch}.rope.scaling.original_context_length", context)
    factors = {
        f"{name}_factor": _values(file, f"rope_factors_{name}.weight") for name in ("short", "long")
    }
    attention = file.get("{arch}.rope.scaling.attn_factor")
    if attention is not None:
        factors["attention_factor"] = shortest(attention)
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        **factors,
    }


def _frequency_factors(file: GgufFile) -> dict[str, Any]:
    """A GGUF file stores llama3's scaling as one divisor for each frequency, without parameters;
    rope type "longrope" with equal short and long factors expresses exactly that."""
    factors = _values(file, "rope_freqs.weight")
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": file.require("{arch}.context_length"),
    }


def _values(file: GgufFile, name: str) -> Any:
    return file.dequantized(name).flatten().tolist()


def _yarn(file: GgufFile) -> dict[str, Any]:
    factor = shortest(file.require("{arch}.rope.scaling.factor"))
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.require(
            "{arch}.rope.scaling.original_context_length"
        ),
    }
    for name in ("beta_fast", "beta_slow"):
        value = file.get(f"{{arch}}.rope.scaling.yarn_{name}")
        if value is not None:
            yarn[name] = shortest(value)
    # The file's factor multiplies the paper's 0.1 ln(s) + 1; the configuration's replaces it.
    multiplier = file.get("{arch}.rope.scaling.attn_factor")
    if multiplier is not None:
        yarn["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return yarn
