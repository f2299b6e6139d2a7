"""Mistakes around the rules and in drafts, made in the real engine: what it proves must notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.core.tree import Tree
from specengine.engine.factories import make_registered, registered_verifiers
from specengine.engine.proof.check import AS_REPORTED
from specengine.engine.proof.draft_mutants import Spoil, draft_mutants
from specengine.engine.proof.mutants import MUTANTS, decides_by_judge
from specengine.engine.proof.shapes import CHAIN, TREE
from specengine.engine.proof.subjects import Subject
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.rows import row_map
from specengine.target.verify.walk import Walk, walk_all


class ForgetsDrafted(MatchVerifier):
    """Penalties do not count the tokens drafted above a node."""

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        if proposal.is_empty:
            return super().walks(output, sampling, proposal)
        rows = replace(row_map(proposal, sampling), path=None)
        return walk_all(proposal, self.sampler(output, sampling, rows).tolist())


class LeavesKV(MatchVerifier):
    """The KV of an accepted path stays where the tree had it."""

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult:
        return replace(super().accept(output, batch, proposal), kv_keep=None)


class _WrongTree(MatchVerifier):
    def prepare(self, batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch:
        right = super().prepare(batch, proposal)
        return right if right.tree is None else replace(right, tree=self.wrong(right.tree))

    def wrong(self, tree: Tree) -> Tree:
        raise NotImplementedError


class SeesEveryNode(_WrongTree):
    """A node attends to all nodes before it, ancestors or not."""

    def wrong(self, tree: Tree) -> Tree:
        exists_BN = tree.mask_BNN.diagonal(dim1=1, dim2=2)
        before_BNN = torch.ones_like(tree.mask_BNN).tril()
        return replace(tree, mask_BNN=before_BNN & exists_BN[:, :, None] & exists_BN[:, None])


class ShiftsPositions(_WrongTree):
    """Drafted nodes are one position too far."""

    def wrong(self, tree: Tree) -> Tree:
        return replace(tree, depths_T=tree.depths_T + (tree.depths_T > 0))


@dataclass(frozen=True)
class EngineMutant:
    """caught_by: "χ²", "greedy identity" or check.AS_REPORTED. spoil: what becomes of drafts.
    setting: of matrix.SETTINGS. Temperature is high: a target that is nearly certain of its tokens
    hides mistakes."""

    name: str
    verifier: TreeVerifier
    subject: Subject
    caught_by: str
    setting: str = "high temperature"
    spoil: Spoil | None = None


_ON_CHAINS = Subject("sampled chain", SpecConfig(), CHAIN)
_ON_TREES = Subject("sampled tree", SpecConfig(), TREE)

AROUND_RULES = (
    EngineMutant(
        "penalties forget drafts", ForgetsDrafted(), _ON_CHAINS, "χ²", setting="penalties"
    ),
    EngineMutant("KV is not moved", LeavesKV(), _ON_TREES, "greedy identity"),
    EngineMutant("siblings are attended to", SeesEveryNode(), _ON_TREES, "greedy identity"),
    EngineMutant("positions are off by one", ShiftsPositions(), _ON_TREES, "greedy identity"),
)


def of_rules() -> list[EngineMutant]:
    """Those that do not need uniforms of 0, which hardly ever come. Shared streams are shown on
    chains: in a tree a sibling is often accepted before a residual is drawn from."""
    found = []
    for name, rule in registered_verifiers().items():
        if not decides_by_judge(rule):
            continue
        for mutant in MUTANTS:
            if mutant.caught_by == "uniforms of 0":
                continue
            if mutant.weighs_draft and not rule.needs_draft_probs:
                continue
            on_trees = rule.takes_trees and mutant.caught_by == "enumeration"
            subject = _ON_TREES if on_trees else _ON_CHAINS
            found.append(EngineMutant(f"{name}: {mutant.name}", mutant(rule), subject, "χ²"))
    return found


def of_drafts() -> Iterator[EngineMutant]:
    """Spoilt drafts under every rule that weighs them, and once more for what they report."""
    for trees, subject in ((False, _ON_CHAINS), (True, _ON_TREES)):
        for mutant in draft_mutants(trees=trees):
            for name, rule in registered_verifiers().items():
                if rule.needs_draft_probs and not rule.is_lossy and (rule.takes_trees or not trees):
                    label = f"{name}: {mutant.name}"
                    yield EngineMutant(label, rule, subject, "χ²", spoil=mutant.spoil)
            yield EngineMutant(
                mutant.name, rule_of(trees), subject, AS_REPORTED, spoil=mutant.spoil
            )


def rule_of(trees: bool) -> TreeVerifier:
    return make_registered("sibling" if trees else "rejection", SpecConfig())
