"""NGRAM: draft what followed the same words before (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.errors import ConfigError
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.lookup import LookupDrafter
from specengine.draft.ngram.chains import ChainText, draft_chains
from specengine.draft.ngram.corpus import SharedCorpus
from specengine.draft.ngram.text import RequestText
from specengine.draft.ngram.tree import distinct, merge
from specengine.draft.proposals import Draft, assemble
from specengine.kernels.native import lookup


class NgramDrafter(LookupDrafter[RequestText | ChainText, SharedCorpus]):
    """Matches the end of each request's text with its own earlier text and, where configured, with
    outputs of other requests; proposes what followed there. Runs on the host, in time that does
    not depend on the model, and hardly on the length of the text.
    """

    proof_options = ({"ngram_min_match": 1}, {"ngram_min_match": 1, "ngram_branches": 3})

    def __init__(self, spec: SpecConfig, node_limit: Callable[[Req], int]) -> None:
        _check(spec)
        self._matches = (spec.ngram_min_match, spec.ngram_max_match)
        corpus = None
        if spec.ngram_shared_corpus:
            corpus = SharedCorpus(spec.ngram_corpus_tokens, *self._matches)
        super().__init__(spec.max_nodes, node_limit, corpus)
        self.branches = spec.ngram_branches
        self.proposes_tree = spec.ngram_branches > 1
        is_alone = not self.proposes_tree and self._corpus is None
        self._in_c = is_alone and lookup.is_compiled()

    @classmethod
    def from_context(cls, context: DraftContext) -> NgramDrafter:
        return cls(context.spec, context.node_limit)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        limits = [self._most_nodes(req) for req in batch.reqs]
        texts = [self._text_of(req) for req in batch.reqs]
        if self._in_c:
            return draft_chains(cast(list[ChainText], texts), limits)
        return self._draft_all(cast(list[RequestText], texts), [()] * len(texts), limits)

    def num_tree_nodes(self, num_steps: int) -> int:
        """Each branch has a node a level."""
        return min(self.max_nodes, 1 + self.branches * num_steps)

    def draft_ahead(
        self, reqs: Sequence[Req], emitted: Sequence[list[int]], max_nodes: Sequence[int]
    ) -> DraftProposal:
        texts = [self._text_of(req) for req in reqs]
        if self._in_c:
            return draft_chains(cast(list[ChainText], texts), max_nodes, emitted)
        return self._draft_all(cast(list[RequestText], texts), emitted, max_nodes)

    def _draft_all(
        self,
        texts: Sequence[RequestText],
        said: Sequence[Sequence[int]],
        max_nodes: Sequence[int],
    ) -> DraftProposal:
        for text, new in zip(texts, said, strict=True):
            text.update(said=new)
        return assemble(list(map(self._draft, texts, max_nodes)))

    def _draft(self, text: RequestText, max_nodes: int) -> Draft:
        root = text.last_token
        if max_nodes <= 1:
            return Draft([root])
        length = max_nodes - 1
        continuations = text.continuations(length)
        if self.branches == 1 and self._corpus is None:
            return Draft([root, *next(continuations, ())])
        if self._corpus is not None:
            shared = self._corpus.continuations(text.tail, length)
            continuations = chain(continuations, shared)
        return merge(root, distinct(continuations, self.branches), max_nodes)

    def _new_text(self, req: Req) -> RequestText | ChainText:
        return (ChainText if self._in_c else RequestText)(req, *self._matches)


def _check(spec: SpecConfig) -> None:
    least = {
        "ngram_branches": 1,
        "ngram_min_match": 1,
        "ngram_max_match": spec.ngram_min_match,
        "ngram_corpus_tokens": 4,
    }
    for name, low in least.items():
        value = getattr(spec, name)
        if value < low:
            flag = "--speculative-" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least {low} for NGRAM, got {value}")
