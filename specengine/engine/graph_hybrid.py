"""The round of a model's chains and of text as one graph."""

from __future__ import annotations

from torch import Tensor

from specengine.core.request import Req
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_ruled import RoundParts
from specengine.engine.hybrid_drafts import HybridDrafts
from specengine.engine.round_form import Form, Wish
from specengine.engine.row_choices import Choosing


class GraphHybridRound(GraphRound):
    """A GraphRound of HybridDrafts. Beside the graphs of the model alone there are those of rounds
    in which some have text, at each depth, so that the model drafts as deep there as was chosen;
    and of those in which all have text: there the model is not run to draft. These are at least as
    deep as the model could draft. What is deeper than the model is text's."""

    drafter: HybridDrafts

    def forms(self, batch_size: int, choosing: Choosing) -> list[Form]:
        """Deeper than the model they are of text anyway."""
        most = self.drafter.model_steps
        own = [steps for steps in self.steps if 0 < steps <= most]
        of_some = [Form(batch_size, steps, choosing, model_steps=steps) for steps in own]
        of_all = [Form(batch_size, n, choosing, model_steps=0) for n in self.steps if n >= most]
        return [*super().forms(batch_size, choosing), *of_some, *of_all]

    def parts_of(self, rows_B: Tensor, form: Form) -> RoundParts:
        most = form.model_steps
        if most is None and form.num_steps > self.drafter.model_steps:
            most = self.drafter.model_steps
        drafter = self.drafter if most is None else self.drafter.beside_text(most)
        return RoundParts(self, rows_B, form, drafter)

    def _form(self, reqs: list[Req], wish: Wish) -> Form:
        form, most = super()._form(reqs, wish), self.drafter.model_steps
        if wish.model_steps is None:
            return form
        if wish.model_steps == 0:
            return form._replace(num_steps=max(form.num_steps, most), model_steps=0)
        return form if form.num_steps > most else form._replace(model_steps=form.num_steps)
