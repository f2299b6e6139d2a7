"""What reads tokens from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specengine.kernels.head import head_best, head_stream, head_topk, row_argmax
from specengine.kernels.head.types import BlockPartials, Meeting
from specengine.layers import vocabulary
from specengine.layers.compute_paths import HEAD_BEST, HEAD_LOGITS, HEAD_TOP
from specengine.layers.layer_spec import HeadSpec
from specengine.layers.linear import LMHead
from specengine.layers.norm import RMSNorm

_MAX_MEETING_ROWS = 4096  # rows whose best token one kernel finds


class Head:
    """A core.interfaces.Head: a norm, where one is given, and the product with every token's row.

    ids: int64 [D], the target's number of each of a draft's D tokens; None where the draft, or the
    target itself, has all of them. A product that has more than D rows gives logits of which those
    at `ids` are taken.
    """

    def __init__(
        self,
        product: LMHead,
        spec: HeadSpec | None = None,
        norm: RMSNorm | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Raises ModelLoadError for a head that is described with what nothing computes."""
        self.product = product
        self.spec = spec or HeadSpec()
        self.norm = norm
        self.ids = ids
        self.tokens = product.tokens
        self._columns = None if ids is None or self.tokens.cut.whole == len(ids) else ids
        self._takes_best = HEAD_BEST.takes(self.spec)
        self._takes_top = HEAD_TOP.takes(self.spec)
        self.has_copies = False  # the product has copies of another's rows
        self._rows_of: LMHead | None = None  # that other
        self._meeting: Meeting | None = None
        self._slots: Tensor | None = None
        HEAD_LOGITS.require(self.spec)

    def for_draft(self, norm: RMSNorm | None = None, ids: Tensor | None = None) -> Head:
        """This head behind a draft's own norm, over the tokens `ids` alone (int64 [D], None is
        all). Their rows are copied, unless they are the first ones, or the weight is packed for
        a CPU, has a bias, or is shared by ranks."""
        if norm is None and ids is None:
            return self
        weight, product, is_prefix = self.product.weight, self.product, False
        can_copy = weight is not None and product.bias is None and self.tokens.is_whole
        if ids is not None and can_copy:
            assert weight is not None
            product = LMHead(weight.shape[1], len(ids))
            is_prefix = int(ids[-1]) == len(ids) - 1 and bool((ids[1:] > ids[:-1]).all())
            rows = weight[: len(ids)] if is_prefix else weight[ids]
            product.weight = nn.Parameter(rows, requires_grad=False)
        head = Head(product, self.spec, norm, ids)
        head.has_copies = product is not self.product and not is_prefix
        head._rows_of = self.product if head.has_copies else None
        return head

    def refresh(self) -> None:
        """Copy the rows anew, where this head has copies of another's: its weights have changed."""
        if self._rows_of is not None and self.ids is not None:
            self.product.plain.copy_(self._rows_of.plain[self.ids])

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V], or [R, D], of a draft's tokens."""
        logits = vocabulary.joined(self.product.forward(self._normed(hidden)), self.tokens).float()
        if self._columns is not None:
            logits = logits.index_select(1, self._columns)
        factor, cap = self.spec.logits_multiplier, self.spec.logits_softcap
        logits = logits if factor == 1.0 else logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def best(self, hidden: Tensor) -> Tensor:
        """[R, H] -> int64 [R], the token of the largest logit, the first among equals, as the
        target numbers it. A cap keeps the order, but float32 makes equals of logits above some 9
        caps, where this still finds the largest."""
        if self._columns is not None:
            return self._columns[self.logits(hidden).argmax(-1)]
        takes = self._takes_best and self._is_plain and self.tokens.is_whole
        if takes and head_stream.fits(hidden, self.product.plain):
            if self._slots is None:
                self._slots = head_best.slots_for(hidden.device)
            gain, eps = self._gain
            return head_best.head_best(
                hidden, self.product.plain, self._slots, gain, eps, self.ids, backend="cuda"
            )
        logits = self.product.forward(self._normed(hidden))
        if not self.tokens.is_whole:
            return vocabulary.best(logits, self.tokens, self.ids)
        if self._meeting is None:
            self._meeting = Meeting.of(_MAX_MEETING_ROWS, hidden.device)
        return row_argmax.row_argmax(logits, self._meeting, self.ids)

    def top(self, hidden: Tensor, topk: int) -> BlockPartials | None:
        """[R, H] -> the topk best of each row of `logits` and its log-sum-exp, by block of columns.
        None where `logits` is as fast."""
        if not self._takes_top or self._columns is not None:
            return None
        if not self.tokens.is_whole:
            return vocabulary.top(self.product(self._normed(hidden)), self.tokens, topk)
        if not self._is_plain or not head_topk.fits(hidden, self.product.plain, topk):
            return None
        gain, eps = self._gain
        return head_topk.head_topk(hidden, self.product.plain, topk, gain, eps, backend="cuda")

    @property
    def _is_plain(self) -> bool:
        return self.product.is_plain and self.product.bias is None

    @property
    def _gain(self) -> tuple[Tensor | None, float]:
        return (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None else self.norm(hidden)
