"""The tensors of an EAGLE-3 draft in the two layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.draft.eagle.convert_config import Eagle3Config
from specengine.draft.eagle.layer import parameter_name
from specengine.runner.loader.hf_directory import iterate_safetensors
from specengine.runner.loader.language_part import language_name

_LAYER = "layers.0."
_KNOWN = re.compile(
    r"d2t|t2d|(fc|norm|lm_head|embed_tokens|input_norm|fc_norm\.\d+)\.weight|layers\.0\.("
    r"self_attn\.[qkvo]_proj\.(weight|bias)|mlp\.(gate|up|down)_proj\.(weight|bias)|"
    r"(input_layernorm|hidden_norm|post_attention_layernorm)\.weight)"
)
# The target's, which older checkpoints of speculators carry along.
_TARGETS_OWN = ("verifier_norm.weight", "verifier_lm_head.weight")


def read_tensors(pairs: Iterable[tuple[str, Tensor]], name: str) -> dict[str, Tensor]:
    """By the names of the model's parameters. Raises ModelLoadError for tensors that are not known,
    or that come twice."""
    tensors: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in pairs:
        parameter = parameter_name(key)
        if parameter in _TARGETS_OWN:
            continue
        if not _KNOWN.fullmatch(parameter) or parameter in tensors:
            unknown.append(key)
        tensors[parameter] = tensor
    if unknown:
        raise ModelLoadError(
            f"the draft {name} has the tensors {', '.join(sorted(unknown))}, which have no "
            "counterpart in the other layout, or come twice; converting would lose them"
        )
    return tensors


def check_tensors(tensors: Mapping[str, Tensor], config: Eagle3Config, name: str) -> None:
    """Raises ModelLoadError where they are not what the configuration says."""
    said = {
        "norm_before_fc": ("input_norm.weight" in tensors, "input_norm.weight"),
        "fc_norm": ("fc_norm.0.weight" in tensors, "fc_norm.*.weight"),
    }
    for flag, (is_there, tensor) in said.items():
        if is_there != config.flags[flag]:
            raise ModelLoadError(
                f"{flag} of the draft {name} is {str(config.flags[flag]).lower()} and {tensor} is "
                f"{'' if is_there else 'not '}there; one of the two is wrong"
            )
    if config.draft_vocab_size == config.vocab_size:
        return
    for needed in ("d2t", "lm_head.weight"):
        if needed not in tensors:
            raise ModelLoadError(
                f"the draft {name} has a vocabulary of its own and no {needed}; neither SGLang nor "
                "vLLM takes the target's rows for it. Give it these rows: --head-from TARGET"
            )


def target_head(directory: Path, config: Eagle3Config) -> Tensor:
    """[vocab_size, H], the output projection of a target, which may be its embedding, and may be of
    the language part of a multimodal model. Raises ModelLoadError where it does not fit the
    draft."""
    wanted = ("lm_head.weight", "model.embed_tokens.weight")
    named = ((language_name(name), one) for name, one in iterate_safetensors(directory))
    found = {name: one for name, one in named if name in wanted}
    head = found.get(wanted[0], found.get(wanted[1]))
    size = [config.vocab_size, int(config.layer["hidden_size"])]
    if head is None or list(head.shape) != size:
        shape = "none" if head is None else list(head.shape)
        raise ModelLoadError(f"the head of {directory} is {shape} and the draft needs {size}")
    return head


def with_head(
    tensors: Mapping[str, Tensor], config: Eagle3Config, head: Tensor, name: str
) -> dict[str, Tensor]:
    """With the target's rows of the draft's tokens. head: [vocab_size, H]."""
    if "d2t" not in tensors:
        return {**tensors, "lm_head.weight": head}
    rows = head[_target_ids(tensors["d2t"], config.vocab_size, name)]
    return {**tensors, "lm_head.weight": rows}


def check_biases(tensors: Mapping[str, Tensor], config: Eagle3Config, name: str) -> None:
    """Those of speculators come all together, as its configuration says. Raises ModelLoadError."""
    for option, part, projections in (
        ("attention_bias", "self_attn", "qkvo"),
        ("mlp_bias", "mlp", ("gate", "up", "down")),
    ):
        wanted = bool(config.layer.get(option))
        names = [f"{_LAYER}{part}.{one}_proj.bias" for one in projections]
        if wrong := [one for one in names if (one in tensors) != wanted]:
            raise ModelLoadError(
                f"{option} of the draft {name} is {str(wanted).lower()}, and "
                f"{', '.join(wrong)} {'missing' if wanted else 'there'}; the other layout reads "
                "all or none of them"
            )


def refuse_biases(tensors: Mapping[str, Tensor], name: str) -> None:
    """SGLang's layer has none. Raises ModelLoadError."""
    if found := sorted(one for one in tensors if one.endswith(".bias")):
        raise ModelLoadError(
            f"the draft {name} has {', '.join(found)}, and SGLang's EAGLE-3 layer has no biases"
        )


def sglang_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_renamed(name, "midlayer."): tensor for name, tensor in tensors.items()}


def speculators_tensors(
    tensors: Mapping[str, Tensor], config: Eagle3Config, name: str
) -> dict[str, Tensor]:
    """With t2d, which speculators reads beside d2t. Raises ModelLoadError where the two differ."""
    found = dict(tensors)
    if "d2t" in found:
        mask = _t2d(found["d2t"], config.vocab_size, name)
        if not torch.equal(found.get("t2d", mask).to(torch.bool), mask):
            raise ModelLoadError(f"t2d and d2t of the draft {name} name different tokens")
        found["t2d"] = mask
    return found


def _t2d(d2t: Tensor, vocab_size: int, name: str) -> Tensor:
    ids = _target_ids(d2t, vocab_size, name)
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)


def _target_ids(d2t: Tensor, vocab_size: int, name: str) -> Tensor:
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    if len(d2t) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelLoadError(
            f"d2t of the draft {name} leads out of the vocabulary of {vocab_size}; it must hold "
            "what to add to a draft id"
        )
    return ids


def _renamed(name: str, layer: str) -> str:
    return layer + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name
