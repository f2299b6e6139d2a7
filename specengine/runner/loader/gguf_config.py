"""A Hugging Face configuration from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.core.registry import MODEL_FAMILIES
from specengine.runner.loader.family import GgufFormat, gguf_formats
from specengine.runner.loader.gguf_fields import head_dim, num_layers, rope_parameters, shortest
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
        **_feed_forward(file),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim(file),
        "max_position_embeddings": file.require("{arch}.context_length"),
        format.epsilon: _epsilon(file),
        "rope_parameters": rope_parameters(file),
        "tie_word_embeddings": "output.weight" not in names,
        "hidden_act": "silu",
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        **_family_fields(file, format),
    }


def _feed_forward(file: GgufFile) -> dict[str, int]:
    """The size of a feed-forward layer. Models may have experts alone."""
    key = "{arch}.feed_forward_length"
    if file.get(key) is None and file.get("{arch}.expert_feed_forward_length") is not None:
        return {}
    return {"intermediate_size": file.require(key)}


def _epsilon(file: GgufFile) -> float:
    """Of RMS norms, or else of LayerNorms."""
    layer = file.get("{arch}.attention.layer_norm_epsilon")
    key = "{arch}.attention.layer_norm_rms_epsilon"
    return shortest(file.require(key) if layer is None else file.get(key, layer))


def _family_fields(file: GgufFile, format: GgufFormat) -> dict[str, Any]:
    found = {ours: file.require(f"{{arch}}.{key}") for key, ours in format.metadata.items()}
    found |= {ours: file.get(f"{{arch}}.{key}") for key, ours in format.optional.items()}
    shown = {ours: shortest(x) if isinstance(x, float) else x for ours, x in found.items()}
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
    others = ", ".join(name for name in MODEL_FAMILIES if name not in found)
    raise ModelLoadError(
        f"{file.path}: GGUF architecture {file.architecture!r} is not supported; known: "
        f"{', '.join(known)}. Of {others}, and of a file of another model of the same family, take "
        "the directory of safetensors"
    )
