"""SUFFIX: draft the likely continuations of what was said before (Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.lookup import LookupDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.draft.reading import read_all
from specengine.draft.rotating_corpus import RotatingCorpus
from specengine.draft.suffix.chains import ChainText, draft_chains
from specengine.draft.suffix.expand import MAX_SUFFIXES, Expander, draft_sizes
from specengine.draft.suffix.text import RequestText
from specengine.draft.suffix.tree import SuffixTree
from specengine.kernels.native import suffix
from specengine.kernels.native.suffix import ChainRules


class SuffixDrafter(LookupDrafter[RequestText | ChainText, RotatingCorpus[SuffixTree]]):
    """Keeps a suffix tree of each request's text and, where configured, one of the outputs of
    others; finds the longest suffix of the text that it has seen, and drafts what followed, each
    token with the share of the occurrences that went on with it. Runs on the host.

    min_match: shortest suffix that anything is drafted of.
    """

    proof_options = ({}, {"suffix_branches": 3})
    can_be_hybrid = False

    def __init__(
        self, spec: SpecConfig, node_limit: Callable[[Req], int], min_match: int = 0
    ) -> None:
        self._max_depth = spec.suffix_max_depth
        corpus = None
        if spec.suffix_shared_corpus:
            corpus = RotatingCorpus(spec.suffix_corpus_tokens, lambda: SuffixTree(self._max_depth))
        super().__init__(spec.max_nodes, node_limit, corpus)
        self.min_match = min_match
        self.branches = spec.suffix_branches
        self.proposes_tree = spec.suffix_branches > 1
        self._expander = Expander(spec)
        is_alone = not self.proposes_tree and self._corpus is None
        self._rules: ChainRules | None = None  # of chains that C drafts, where it does
        if is_alone and suffix.is_compiled():
            given = draft_sizes(spec), spec.suffix_min_prob, MAX_SUFFIXES
            self._rules = ChainRules(*given, min_match)

    @classmethod
    def from_context(cls, context: DraftContext) -> SuffixDrafter:
        return cls(context.spec, context.node_limit)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        """confidence: the estimated probability that the path down to a node is accepted."""
        if self._rules is None:
            return assemble([self.draft_one(req) for req in batch.reqs], is_ranked=True)
        limits = [self._most_nodes(req) for req in batch.reqs]
        texts = [self._text_of(req) for req in batch.reqs]
        return draft_chains(cast(list[ChainText], texts), limits, self._rules)

    def num_tree_nodes(self, num_steps: int) -> int:
        """Every node may branch."""
        nodes = level = 1
        for _ in range(num_steps):
            level = min(level * self.branches, self.max_nodes)
            nodes += level
        return min(self.max_nodes, nodes)

    def draft_ahead(
        self, reqs: Sequence[Req], emitted: Sequence[list[int]], max_nodes: Sequence[int]
    ) -> DraftProposal:
        texts = [self._text_of(req) for req in reqs]
        if self._rules is not None:
            return draft_chains(cast(list[ChainText], texts), max_nodes, self._rules, emitted)
        drafts = []
        for text, new, most in zip(cast(list[RequestText], texts), emitted, max_nodes, strict=True):
            text.update(said=new)
            drafts.append(text.draft(most - 1))
        return assemble(drafts, is_ranked=True)

    def may_match(self, reqs: Sequence[Req], num_new: int) -> bool:
        """A token makes a match longer by one at most; a corpus may gain all of it at once."""
        if self._corpus is not None or num_new >= self.min_match:
            return True
        texts = [self._text_of(req) for req in reqs]
        if self._rules is not None:
            chains = cast(list[ChainText], texts)
            read_all(chains)
            longest = suffix.longest_match([one.text for one in chains])
        else:
            longest = max(map(self.match_length, reqs))
        return longest + num_new >= self.min_match

    def match_length(self, req: Req) -> int:
        """Tokens at the end of the request's text that were seen before, below suffix_max_depth."""
        text = self._text_of(req)
        text.update()
        return text.match_length

    def draft_one(self, req: Req) -> Draft:
        text, max_tokens = self._text_of(req), self._most_nodes(req) - 1
        text.update()
        return text.draft(max_tokens)

    def _new_text(self, req: Req) -> RequestText | ChainText:
        if self._rules is not None:
            return ChainText(req, self._max_depth, self._rules)
        given = req, self._max_depth, self._expander, self._corpus
        return RequestText(*given, self.min_match)
