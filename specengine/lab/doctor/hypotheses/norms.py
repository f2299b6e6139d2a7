"""Norms that were there in training and are not in serving, or the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial

_INPUT = "layers.0.input_layernorm.weight"
_FLAGS = ("norm_before_residual", "norm_output")


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    if drafter.algorithm == "EAGLE3":
        for flag in _FLAGS:
            yield _flag(flag, value=not _is_set(trial.files, flag))
        yield from _feature_norms(trial.files)
    if drafter.algorithm == "EAGLE":
        yield from _input_norm(trial.files)
    yield from _shifted_weights()


def _flag(name: str, *, value: bool) -> Hypothesis:
    word = str(value).lower()
    return Hypothesis(
        "norm flags",
        f"trained with {name} {word}",
        f"config.json: set {name} to {word}",
        lambda f: _set_flag(f, name, value),
    )


def _is_set(files: DraftFiles, name: str) -> bool:
    return bool(files.raw.get(name) or (files.raw.get("eagle_config") or {}).get(name))


def _set_flag(files: DraftFiles, name: str, value: bool) -> DraftFiles:
    eagle = {k: v for k, v in (files.raw.get("eagle_config") or {}).items() if k != name}
    section = {"eagle_config": eagle} if eagle else {}
    return files.with_config(**section, **{name: value})


def _feature_norms(files: DraftFiles) -> Iterator[Hypothesis]:
    """On features before fc: one a layer (fc_norm), or one over all (norm_before_fc)."""
    weight = files.get("fc.weight")
    if weight is None:
        return
    size, width = weight.shape
    parts = [f"fc_norm.{index}.weight" for index in range(width // size)]
    for flag, names in (("fc_norm", parts), ("norm_before_fc", ["input_norm.weight"])):
        ones = {name: torch.ones(width // len(names), dtype=weight.dtype) for name in names}
        if files.has(*names):
            yield Hypothesis(
                "norm flags",
                f"trained without {flag}",
                f"config.json: set {flag} to false, and take {', '.join(names)} out of the weights",
                partial(_without_norm, flag=flag, names=names),
            )
        else:
            yield Hypothesis(
                "norm flags",
                f"trained with {flag}, of weights 1",
                f"config.json: set {flag} to true, and add {', '.join(names)} (--write-fixed does)",
                partial(_with_norm, flag=flag, ones=ones),
            )


def _without_norm(files: DraftFiles, flag: str, names: list[str]) -> DraftFiles:
    return _set_flag(files.without(*names), flag, value=False)


def _with_norm(files: DraftFiles, flag: str, ones: dict[str, Tensor]) -> DraftFiles:
    return _set_flag(files.with_tensors(ones), flag, value=True)


def _input_norm(files: DraftFiles) -> Iterator[Hypothesis]:
    weight = files.get("fc.weight")
    if files.has(_INPUT):
        yield Hypothesis(
            "norm flags",
            "trained without a norm before attention, as the original EAGLE",
            f"take {_INPUT} out of the weights (--write-fixed does it)",
            lambda f: f.without(_INPUT),
        )
    elif weight is not None:
        ones = torch.ones(len(weight), dtype=weight.dtype)
        yield Hypothesis(
            "norm flags",
            "trained with a norm before attention",
            f"add {_INPUT} to the weights (--write-fixed adds one of ones)",
            lambda f: f.with_tensors({_INPUT: ones}),
        )


def _shifted_weights() -> Iterator[Hypothesis]:
    for step, claim in ((1.0, "are stored less 1"), (-1.0, "have a 1 too much")):
        yield Hypothesis(
            "norm flags",
            f"the weights of norms {claim}, as Gemma's are",
            "norm weights: store what the norm multiplies with (--write-fixed does it)",
            partial(_shift_norms, step=step),
        )


def _shift_norms(files: DraftFiles, step: float) -> DraftFiles:
    weights = {
        files.parameter(name): weight + step
        for name, weight in files.tensors.items()
        if weight.dim() == 1 and "norm" in name
    }
    return files.with_tensors(weights)
