"""The settings to replay a trace with, and whether the trace allows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from specengine.core.errors import ConfigError

# Algorithms whose drafts do not grow level by level: their nodes are in the order of preference.
_CHAIN_RULES = ("rejection", "block")


@dataclass(frozen=True, order=True)
class ReplaySetting:
    """num_steps: None for drafts out of text. vocabulary: tokens that the drafter could say, the
    most frequent ones; None is all that it had."""

    num_steps: int | None
    topk: int
    num_draft_tokens: int  # root included
    verify: str
    vocabulary: int | None = None


@dataclass(frozen=True)
class Recorded:
    """How the trace was made."""

    algorithm: str
    is_text: bool
    is_hybrid: bool
    is_sampled: bool
    is_static: bool
    every_position: bool
    setting: ReplaySetting
    draft_vocab_size: int | None

    @classmethod
    def of(cls, header: dict[str, Any]) -> Recorded:
        spec = header["spec"]
        is_text = spec["num_steps"] is None  # no model drafts
        setting = ReplaySetting(
            None if is_text else spec["num_steps"],
            1 if is_text else spec["eagle_topk"],
            spec["num_draft_tokens"],
            header["verifier"],
        )
        return cls(
            algorithm=header["algorithm"],
            is_text=is_text,
            is_hybrid=spec["hybrid_suffix"],
            is_sampled=header["is_sampled"],
            is_static=spec["static_tree"],
            every_position=header["mode"] == "positions",
            setting=setting,
            draft_vocab_size=header["draft_vocab_size"],
        )

    @property
    def rules(self) -> tuple[str, ...]:
        """Verifiers that the trace can be replayed with. Drafts that were sampled can be matched as
        well; those that were not carry no distribution for the other rules to weigh."""
        if not self.is_sampled:
            return ("match",)
        return ("match", "sibling") if self.setting.topk > 1 else ("match", *_CHAIN_RULES)

    def check(self, setting: ReplaySetting) -> None:
        """Raises ConfigError where the trace cannot answer, and says why."""
        most = self.setting
        if self.is_text or self.is_hybrid:
            same = (setting.num_steps, setting.topk) == (most.num_steps, most.topk)
            if not same or setting.vocabulary is not None:
                raise ConfigError(
                    f"drafts of {self.algorithm} that come out of text have no --num-steps, --topk "
                    "or --vocab-sizes; leave these out"
                )
        else:
            assert setting.num_steps is not None
            assert most.num_steps is not None
            _at_most("--num-steps", setting.num_steps, most.num_steps)
            _at_most("--topk", setting.topk, most.topk)
        _at_most("--num-draft-tokens", setting.num_draft_tokens, most.num_draft_tokens)
        self._check_rule(setting)
        self._check_vocabulary(setting.vocabulary)

    def _check_rule(self, setting: ReplaySetting) -> None:
        known = (*self.rules, *(_CHAIN_RULES if self.is_sampled and setting.topk == 1 else ()))
        if setting.verify not in known:
            raise ConfigError(
                f"--verify {setting.verify} cannot be known from this trace, whose drafts were "
                f"{'' if self.is_sampled else 'not '}sampled; known are {', '.join(known)}. "
                "target_only accepts what match does, and relaxed would have written another text"
            )

    def _check_vocabulary(self, size: int | None) -> None:
        if size is None:
            return
        if self.is_sampled:
            raise ConfigError(
                "--vocab-sizes: what sampled drafts of a smaller vocabulary would be cannot be "
                "known; record greedy drafts, without --speculative-draft-sampling"
            )
        if self.draft_vocab_size is not None:
            _at_most("--vocab-sizes", size, self.draft_vocab_size)


def _at_most(flag: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{flag} {value}: the trace was recorded with {most}, and knows up to it")


def grid(
    recorded: Recorded,
    num_steps: Sequence[int] = (),
    topk: Sequence[int] = (),
    num_draft_tokens: Sequence[int] = (),
    verify: Sequence[str] = (),
    vocabulary: Sequence[int | None] = (None,),
) -> list[ReplaySetting]:
    """Every setting of these that makes sense; nothing given is everything the trace knows. Trees
    of more nodes than they can have, and trees without a branch, are left out. Raises ConfigError
    for what the trace cannot answer."""
    most = recorded.setting
    for count in () if recorded.is_text else topk:
        _at_most("--topk", count, most.topk)
    axes = (
        list(num_steps) or _all_steps(recorded),
        list(topk) or ([most.topk] if recorded.is_hybrid else _halves(most.topk)),
        list(num_draft_tokens),
        list(verify),
        list(vocabulary),
    )
    settings: set[ReplaySetting] = set()
    for steps, branches, rule, size in product(axes[0], axes[1], axes[3] or [""], axes[4]):
        for nodes in _node_counts(recorded, steps, branches, axes[2]):
            for name in [rule] if rule else recorded.rules:
                settings.add(ReplaySetting(steps, branches, nodes, name, size))
    if not settings:
        raise ConfigError("no setting has this many steps, branches and nodes at once")
    for setting in settings:
        recorded.check(setting)
    return sorted(settings, key=_place)


def most_nodes(num_steps: int, topk: int) -> int:
    """The most nodes of a model's tree, root included: topk children of the root, and of topk nodes
    a level."""
    return 1 + topk + (num_steps - 1) * topk**2 if num_steps else 1


def _place(setting: ReplaySetting) -> tuple[str, int, int, int, int]:
    steps, size = setting.num_steps or 0, setting.vocabulary or 0
    return setting.verify, size, steps, setting.topk, setting.num_draft_tokens


def _all_steps(recorded: Recorded) -> list[int | None]:
    most = recorded.setting.num_steps
    return [most] if most is None or recorded.is_hybrid else list(range(1, most + 1))


def _node_counts(
    recorded: Recorded, steps: int | None, topk: int, asked: Sequence[int]
) -> list[int]:
    most = recorded.setting.num_draft_tokens
    if recorded.is_text or recorded.is_hybrid or steps is None:
        return list(asked) or _halves(most, least=2)
    if topk == 1:
        return [steps + 1] if not asked or steps + 1 in asked else []
    possible = most_nodes(steps, topk)
    if asked:
        return [nodes for nodes in asked if nodes <= possible]
    return _halves(min(most, possible), least=4)


def _halves(most: int, least: int = 1) -> list[int]:
    """most, half of it, and so on down to `least`."""
    counts = []
    while most >= least:
        counts.append(most)
        most //= 2
    return counts
