"""A Hugging Face configuration from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.family import GgufFormat, gguf_formats
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.hf_config import make_config


def gguf_hf_config(file: GgufFile) -> Any:
    """The configuration that describes the model in `file`."""
    fields = gguf_config_dict(file)
    try:
        return make_config(fields)
    except Exception as error:
        raise ModelLoadError(f"{file.path}: its metadata make no valid model: {error}") from error


def gguf_config_dict(file: GgufFile) -> dict[str, Any]:
    """The contents of the equivalent config.json."""
    architecture, format = find_gguf_format(file)
    hidden = file.require("{arch}.embedding_length")
    heads = file.require("{arch}.attention.head_count")
    names = file.tensor_names
    if "token_embd.weight" not in names:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    return {
        "model_type": format.model_type,
        "architectures": [architecture],
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": file.require("{arch}.feed_forward_length"),
        "num_hidden_layers": file.require("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("{arch}.attention.head_count_kv", heads),
        "head_dim": file.get("{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": file.require("{arch}.context_length"),
        "rms_norm_eps": _shortest(file.require("{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(file),
        "tie_word_embeddings": "output.weight" not in names,
        "hidden_act": "silu",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        **_family_fields(file, format),
    }


def _family_fields(file: GgufFile, format: GgufFormat) -> dict[str, Any]:
    found = {ours: file.require(f"{{arch}}.{key}") for key, ours in format.metadata.items()}
    found |= {ours: file.get(f"{{arch}}.{key}") for key, ours in format.optional.items()}
    shown = {ours: _shortest(x) if isinstance(x, float) else x for ours, x in found.items()}
    return shown | format.fields(file)


def eos_token_ids(file: GgufFile) -> list[int]:
    """Every token that ends a turn: end of text, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = {file.get(key) for key in keys}
    return sorted(token for token in ids if token is not None)


def find_gguf_format(file: GgufFile) -> tuple[str, GgufFormat]:
    """The family of a file, as config.json names it, and how it is held. Raises ModelLoadError for
    a family without GGUF, or none that is known."""
    found = dict(gguf_formats())
    for architecture, format in found.items():
        if file.architecture in format.architectures and format.owns(file):
            return architecture, format
    known = dict.fromkeys(name for format in found.values() for name in format.architectures)
    raise ModelLoadError(
        f"{file.path}: GGUF architecture {file.architecture!r} is not supported; known: "
        f"{', '.join(known)}. If the family is supported, take its directory of safetensors"
    )


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _shortest(file.get("{arch}.rope.freq_base", 10000.0)),
    }
    kind = file.get("{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensor_names:
        rope |= _frequency_factors(file)
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": file.require("{arch}.rope.scaling.factor")}
    elif kind == "yarn":
        rope |= _yarn(file)
    elif kind != "none":
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} is not supported")
    return rope


def _frequency_factors(file: GgufFile) -> dict[str, Any]:
    """A GGUF file stores llama3's scaling as one divisor for each frequency, without parameters;
    rope type "longrope" with equal short and long factors expresses exactly that."""
    factors = file.dequantized("rope_freqs.weight").flatten().tolist()
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": file.require("{arch}.context_length"),
    }


def _yarn(file: GgufFile) -> dict[str, Any]:
    factor = file.require("{arch}.rope.scaling.factor")
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
            yarn[name] = _shortest(value)
    # The file's factor multiplies the paper's 0.1 ln(s) + 1; the configuration's replaces it.
    multiplier = file.get("{arch}.rope.scaling.attn_factor")
    if multiplier is not None:
        yarn["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return yarn


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
