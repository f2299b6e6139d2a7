"""Small random models of the registered families, as transformers makes and saves them.

A family needs nothing here, but for _NAMED_OTHERWISE: its registered name finds transformers'
class, or that of the family whose configuration it extends, and `small_config` of its class shows
what it has.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specengine.core.registry import MODEL_FAMILIES, load_place

VOCAB = 320
CONTEXT = 512
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.12,
}
# Norms and biases of these are as transformers starts them: tests of drafters were written for the
# texts that they say.
AS_STARTED = ("llama", "mistral", "qwen2", "qwen3", "mimo")
_SUFFIX = "ForCausalLM"


def _granite_of_minicpm(given: dict[str, Any]) -> dict[str, Any]:
    """MiniCPM's scaling (its published modeling_minicpm.py) in Granite's fields."""
    head_dim = given["hidden_size"] // given["num_attention_heads"]
    return {
        "embedding_multiplier": given["scale_emb"],
        "residual_multiplier": given["scale_depth"] / given["num_hidden_layers"] ** 0.5,
        "attention_multiplier": head_dim**-0.5,
        "logits_scaling": given["hidden_size"] / given["dim_model_base"],
    }


# Of families whose configuration names otherwise what transformers' class of them computes: their
# fields -> those of that class, beside them.
_NAMED_OTHERWISE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "minicpm": _granite_of_minicpm,
}
# Short name in tests -> architecture.
FAMILIES: dict[str, str] = {name.removesuffix(_SUFFIX).lower(): name for name in MODEL_FAMILIES}


def reference_class(family: str) -> Any:
    """Transformers' model class, which computes what the family computes."""
    return transformers_class(FAMILIES[family])


def transformers_class(architecture: str) -> Any:
    import transformers

    extended = vars(load_place(MODEL_FAMILIES[architecture])).get("extends_config")
    if extended is None:
        return getattr(transformers, architecture)
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[extended]]


def small_config(family: str, **fields: Any) -> Any:
    """fields: in place of those that small models have."""
    model = load_place(MODEL_FAMILIES[FAMILIES[family]])
    given = {"architectures": [FAMILIES[family]], **_SMALL, **model.small_config, **fields}
    beside = _NAMED_OTHERWISE[family](given) if family in _NAMED_OTHERWISE else {}
    return reference_class(family).config_class(**given, **beside)


def has_experts(family: str) -> bool:
    """By the fields that its small model is given: asked when tests are collected, by each process
    of a run, which would take seconds to import transformers' models for it."""
    model = load_place(MODEL_FAMILIES[FAMILIES[family]])
    return any("experts" in field for field in model.small_config)


def save_small_model(family: str, folder: Path, seed: int, **fields: Any) -> Path:
    """Weights and configuration; fields as in small_config. Norms and biases differ from each
    other, as trained ones do, but in AS_STARTED. No router is zero, as some versions start it: all
    experts would be equally good, and which are taken is chance."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = reference_class(family)(small_config(family, **fields)).eval().float()
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight") and not parameter.any():
                torch.nn.init.normal_(parameter, std=_SMALL["initializer_range"])
            if parameter.dim() == 1 and family not in AS_STARTED:
                parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    if fields["architectures"] != [FAMILIES[family]]:  # it saves under its own name
        fields |= {"architectures": [FAMILIES[family]], "model_type": family}
        path.write_text(json.dumps(fields))
    return folder


class SmallModels(dict[str, Path]):
    """Folders of small models by family, each made when first asked for. place: a folder which
    processes may share; what one of them has made, the others find."""

    def __init__(self, place: Path, finish: Callable[[Path], None]) -> None:
        super().__init__()
        self.place, self.finish = place, finish
        place.mkdir(exist_ok=True)

    def __missing__(self, family: str) -> Path:
        folder = self.place / family
        if not folder.exists():
            made = Path(tempfile.mkdtemp(dir=self.place))
            save_small_model(family, made, seed=list(FAMILIES).index(family))
            self.finish(made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                shutil.rmtree(made)
        self[family] = folder
        return folder


def reference_model(folder: Path, family: str) -> Any:
    """The model of such a folder, in float32. Two mistakes of transformers 5.17 are mended: SDPA,
    its default there, drops the soft capping of scores (Gemma 2), and experts of gpt-oss clamp at 7
    whatever the configuration says."""
    kind = reference_class(family)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    limit = getattr(model.config, "swiglu_limit", None)
    for module in model.modules():
        if limit is not None and hasattr(module, "limit"):
            module.limit = limit
    return model


def assert_greedy(model: Any, prompt: list[int], output: list[int]) -> None:
    """A reference model decodes this. Greedy decoding is a fixed point: the output is its if and
    only if each token is the best one after those before it."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    assert logits_TV.argmax(-1).tolist() == output
