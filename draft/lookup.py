"""What drafters share that look up each request's own text, and perhaps outputs of others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import PrefillResult, VerifyResult


class Text(Protocol):
    """What was read of a request so far."""

    def update(self, most: int | None = None) -> object:
        """Read what was committed since; `most`: tokens at most."""
        ...


class Corpus(Protocol):
    """Outputs of requests that have finished."""

    def add(self, tokens: Sequence[int]) -> object: ...


T = TypeVar("T", bound=Text)
C = TypeVar("C", bound=Corpus)


class LookupDrafter(Drafter, Generic[T, C]):
    """Keeps the text of each request, which is made when it is first asked for, and read by
    index_ahead or at the next draft.

    node_limit(req): the most nodes, root included, that a request can use in this round; a round
    emits at most one token a node. corpus: None where requests see their own text alone.
    """

    drafts_on = "lookup"

    def __init__(
        self, max_nodes: int, node_limit: Callable[[Req], int], corpus: C | None = None
    ) -> None:
        self.max_nodes = max_nodes
        self._node_limit = node_limit
        self._corpus = corpus
        self._texts: dict[Req, T] = {}

    @abstractmethod
    def _new_text(self, req: Req) -> T: ...

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self.add(batch.reqs)

    def add(self, reqs: Sequence[Req]) -> None:
        for req in reqs:
            self._text_of(req)

    @property
    def drafts_ahead(self) -> bool:  # type: ignore[override]
        """Tokens of other requests come to the corpus when they are committed."""
        return self._corpus is None

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        """Committed tokens are read from the requests: by index_ahead, or at the next draft."""

    def index_ahead(self, req: Req, most: int) -> None:
        """One that has left stays forgotten."""
        if (text := self._texts.get(req)) is not None:
            text.update(most)

    def release(self, req: Req) -> None:
        """Forget a request; one that finished leaves its output to the shared corpus."""
        self._texts.pop(req, None)
        if self._corpus is not None and req.is_finished:
            self._corpus.add(req.output_ids)

    def _most_nodes(self, req: Req) -> int:
        return min(self.max_nodes, self._node_limit(req))

    def _text_of(self, req: Req) -> T:
        text = self._texts.get(req)
        if text is None:
            text = self._texts[req] = self._new_text(req)
        return text
