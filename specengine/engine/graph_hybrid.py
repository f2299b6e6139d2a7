"""The round of a model's drafts and of text as one graph."""

from __future__ import annotations

from specengine.core.request import Req
from specengine.core.spec import RowDrafter
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.hybrid_drafts import MixedDrafts
from specengine.engine.hybrid_trees import HybridTrees
from specengine.engine.round_form import Flight, Form, Wish
from specengine.engine.row_choices import Choosing


class GraphHybridRound(GraphRound):
    """A GraphRound of MixedDrafts. Beside the graphs of the model alone there are those of rounds
    in which some have text, at each depth, so that the model drafts as deep there as was chosen;
    and of those in which all have text: there the model is not run to draft. These are at least as
    deep as the model could draft. What is deeper than the model is text's."""

    drafter: MixedDrafts

    def forms(self, batch_size: int, choosing: Choosing) -> list[Form]:
        """Deeper than the model they are of text anyway."""
        most = self.drafter.model_steps
        own = [steps for steps in self.steps if 0 < steps <= most]
        of_some = [Form(batch_size, steps, choosing, model_steps=steps) for steps in own]
        of_all = [Form(batch_size, n, choosing, model_steps=0) for n in self.steps if n >= most]
        return [*super().forms(batch_size, choosing), *of_some, *of_all]

    def has_text(self, form: Form) -> bool:
        """Whether somebody has in such rounds."""
        return form.model_steps is not None or form.num_steps > self.drafter.model_steps

    def drafter_of(self, form: Form) -> RowDrafter:
        if not self.has_text(form):
            return self.drafter
        most = form.model_steps
        return self.drafter.beside_text(self.drafter.model_steps if most is None else most)

    def _form(self, reqs: list[Req], wish: Wish) -> Form:
        form, most = super()._form(reqs, wish), self.drafter.model_steps
        if wish.model_steps is None:
            return form
        if wish.model_steps == 0:
            return form._replace(num_steps=max(form.num_steps, most), model_steps=0)
        return form if form.num_steps > most else form._replace(model_steps=form.num_steps)


class GraphHybridTreeRound(GraphHybridRound, GraphTreeRound):
    """Likewise, of HybridTrees."""

    drafter: HybridTrees

    def num_drafts(self, flight: Flight, levels: list[int]) -> list[int]:
        """The nodes that text gave, and those of the model's trees."""
        counts = [self.drafter.own_nodes(level) - 1 for level in levels]
        if flight.of_text is not None and flight.drafted_nodes is not None:
            triples = zip(flight.of_text, flight.drafted_nodes, counts, strict=True)
            counts = [text if is_text else own for is_text, text, own in triples]
        return flight.left(counts, levels)
