"""AdamW (Loshchilov and Hutter 2019); or Muon (Jordan et al. 2024) for matrices, beside it.

With the schedule of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from specengine.draft.train.config import OptimiserConfig, ScheduleConfig

# Tables of a vector a token: Muon would make all of their rows equally important.
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_Named = list[tuple[str, Tensor]]


def make_optimisers(module: nn.Module, config: OptimiserConfig) -> list[Optimizer]:
    """One, or two, over the parameters that require a gradient. Vectors do not decay."""
    named = trainable(module)
    muon = [(name, one) for name, one in named if config.name == "muon" and _is_map(name, one)]
    taken = {name for name, _ in muon}
    return [
        *_make_muon(muon, config),
        *_make_adamw([(name, one) for name, one in named if name not in taken], config),
    ]


def trainable(module: nn.Module) -> _Named:
    return [(name, one) for name, one in module.named_parameters() if one.requires_grad]


def _is_map(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not name.endswith(_TABLES)


def _make_muon(named: _Named, config: OptimiserConfig) -> Iterable[Optimizer]:
    if named:
        yield Muon(
            [one for _, one in named],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",  # so that one learning rate suits both
        )


def _make_adamw(named: _Named, config: OptimiserConfig) -> Iterable[Optimizer]:
    matrices = [one for _, one in named if one.dim() > 1]
    vectors = [one for _, one in named if one.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if named:
        yield AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=all(one.is_cuda for _, one in named),
        )


def lr_factor(config: ScheduleConfig, step: int, share_done: float) -> float:
    """What the peak learning rate is multiplied by: a linear rise over the first steps, times a
    half cosine down to `final_lr`.

    share_done: of the run, 0 to 1, by steps or by wall time, whichever is further.
    """
    rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    fall = 0.5 * (1.0 + math.cos(math.pi * min(share_done, 1.0)))
    return rise * (config.final_lr + (1.0 - config.final_lr) * fall)


def set_lr(optimisers: list[Optimizer], lr: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = lr
