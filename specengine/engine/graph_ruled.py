"""Rounds in which grammars rule some requests: in three graphs, with the host's masks between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, RowBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.request import Req
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.masks import Flags
from specengine.engine.round_form import Form, LeftDepths
from specengine.engine.row_masks import is_ruled
from specengine.runner.capture import capture_parts

if TYPE_CHECKING:
    from specengine.engine.graph_round import GraphRound


@dataclass(frozen=True)
class Drafted:
    rows: RowBatch
    drafts_BK: Tensor
    picks: DraftPicks | None = None  # by which they were drafted


@dataclass(frozen=True)
class Seen:
    """The target's states at every node."""

    batch: ForwardBatch
    hidden_TH: Tensor

    def features(self) -> Tensor | None:
        """Of the captured layers, for drafters that want them."""
        return torch.cat(self.batch.captured, dim=-1) if self.batch.captured else None


class RoundParts:
    """A round of chains, taken apart: `draft` and `look` do without masks, and so may be launched
    before the tokens are known that the masks follow from; `decide` needs them. Each leaves behind
    what the next one takes. Where the drafter sleeps, it does not look at the round."""

    def __init__(self, graph_round: GraphRound, rows_B: Tensor, form: Form) -> None:
        """rows_B: of the page table."""
        self.drafter = graph_round.drafter_of(form)
        self.graph_round = graph_round
        self.rows_B = rows_B
        self.form = form
        self.drafted: Drafted
        self.seen: Seen

    def run(self) -> None:
        self.draft()
        self.look()
        self.decide()

    @torch.inference_mode()
    def draft(self) -> None:
        flying, form = self.graph_round, self.form
        rows = flying.begin(self.rows_B)
        picks = flying.picks(rows, form)
        drafts_BK = self.drafter.draft_rows(rows, form.num_steps, picks)
        self.drafted = Drafted(rows, drafts_BK, picks)

    @torch.inference_mode()
    def look(self) -> None:
        rows, runner = self.drafted.rows, self.graph_round.runner
        tokens_BN = rows.roots_B[:, None]
        if self.form.num_steps:
            tokens_BN = torch.cat([tokens_BN, self.drafted.drafts_BK], dim=1)
        batch = runner.new_row_batch(rows, tokens_BN)
        if self.form.asleep:
            batch.capture_layers = ()
        self.seen = Seen(batch, runner.forward_extend(batch))

    @torch.inference_mode()
    def decide(self) -> None:
        flying, choosing, rows = self.graph_round, self.form.choosing, self.drafted.rows
        output = flying.choose(self.seen, rows, choosing)
        chosen_BN = output.best.view(len(self.rows_B), -1)
        accepted_B = flying.accept(rows, chosen_BN, self.drafted.drafts_BK)
        flying.choices.count(rows, chosen_BN, accepted_B, choosing)
        if not self.form.asleep:
            self.drafter.observe_rows(rows, output, chosen_BN, accepted_B)

    @property
    def shown(self) -> Tensor:
        """What the host must know of the drafts, int64; the drafting leaves it on the device."""
        return self.drafted.drafts_BK

    def trees(self, shown: Tensor, reqs: list[Req]) -> list[HostTree]:
        """What was drafted. shown: on the host."""
        above = list(range(-1, self.form.num_steps))
        drafts = shown[: len(reqs)].tolist()
        return [HostTree([r.last_token, *run], above) for r, run in zip(reqs, drafts, strict=True)]

    def tell(self, reqs: list[Req], trees: list[HostTree]) -> LeftDepths:
        """The device what the decision needs of the host. trees: what was drafted."""
        legal_BN = self.graph_round.masks.send(reqs, trees)
        return depths_left(reqs, trees, legal_BN)


class RuledGraphs:
    """A graph a part, and the masks of the grammars before the last of them. What the parts leave
    for each other lies in the pool: between `replay` and `finish` no other graph may run."""

    def __init__(self, parts: RoundParts, pool: Any) -> None:
        self.parts = parts
        graphs = capture_parts([parts.draft, parts.look, parts.decide], pool)
        self._draft, self._look, self._decide = graphs
        self._shown = torch.zeros(parts.shown.shape, dtype=torch.int64)
        if parts.form.num_steps:
            self._shown = self._shown.pin_memory()
        self._drafted = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        """Launch what needs no masks."""
        self._draft.replay()
        if self.parts.form.num_steps:
            self._shown.copy_(self.parts.shown, non_blocking=True)
            self._drafted.record()
        self._look.replay()

    def finish(self, reqs: list[Req]) -> LeftDepths:
        """Make the masks while the device looks, and launch the rest. The requests' grammars stand
        after the tokens that the round starts from."""
        if self.parts.form.num_steps:
            self._drafted.synchronize()
        depths = self.parts.tell(reqs, self.parts.trees(self._shown, reqs))
        self._decide.replay()
        return depths


def depths_left(reqs: list[Req], trees: list[HostTree], kept_BN: Flags) -> LeftDepths:
    rows = zip(reqs, trees, kept_BN.tolist(), strict=True)
    return {i: tree.depths_of(kept) for i, (req, tree, kept) in enumerate(rows) if is_ruled(req)}
