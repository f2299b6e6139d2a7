"""SUFFIX: draft the likely continuations of what was said before (Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.drafter import Drafter
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult
from specengine.draft.proposals import Draft, assemble
from specengine.draft.reading import read_all
from specengine.draft.rotating_corpus import RotatingCorpus
from specengine.draft.suffix.chains import ChainText, draft_chains
from specengine.draft.suffix.expand import MAX_SUFFIXES, Expander, draft_sizes
from specengine.draft.suffix.text import RequestText
from specengine.draft.suffix.tree import SuffixTree
from specengine.kernels.native import suffix
from specengine.kernels.native.suffix import ChainRules


class SuffixDrafter(Drafter):
    """Keeps a suffix tree of each request's text and, where configured, one of the outputs of
    others; finds the longest suffix of the text that it has seen, and drafts what followed, each
    token with the share of the occurrences that went on with it. Runs on the host.

    node_limit(req): the most nodes, root included, that a request can use in this round; a round
    emits at most one token a node. min_match: shortest suffix that anything is drafted of.
    """

    drafts_on = "lookup"
    proof_options = ({}, {"suffix_branches": 3})
    can_be_hybrid = False

    def __init__(
        self, spec: SpecConfig, node_limit: Callable[[Req], int], min_match: int = 0
    ) -> None:
        self.min_match = min_match
        self.max_nodes = spec.max_nodes
        self.branches = spec.suffix_branches
        self.proposes_tree = spec.suffix_branches > 1
        self._node_limit = node_limit
        self._max_depth = spec.suffix_max_depth
        self._expander = Expander(spec)
        self._corpus: RotatingCorpus[SuffixTree] | None = None
        if spec.suffix_shared_corpus:
            self._corpus = RotatingCorpus(
                spec.suffix_corpus_tokens, lambda: SuffixTree(self._max_depth)
            )
        is_alone = not self.proposes_tree and self._corpus is None
        self._rules: ChainRules | None = None  # of chains that C drafts, where it does
        if is_alone and suffix.is_compiled():
            given = draft_sizes(spec), spec.suffix_min_prob, MAX_SUFFIXES
            self._rules = ChainRules(*given, min_match)
        self._texts: dict[Req, RequestText | ChainText] = {}

    @classmethod
    def from_context(cls, context: DraftContext) -> SuffixDrafter:
        return cls(context.spec, context.node_limit)

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self.add(batch.reqs)

    def add(self, reqs: Sequence[Req]) -> None:
        """Prompts are read by index_ahead, or at the first draft."""
        for req in reqs:
            self._text_of(req)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        """confidence: the estimated probability that the path down to a node stands."""
        if self._rules is None:
            return assemble([self.draft_one(req) for req in batch.reqs], is_ranked=True)
        limits = [min(self.max_nodes, self._node_limit(req)) for req in batch.reqs]
        texts = [self._text_of(req) for req in batch.reqs]
        return draft_chains(cast(list[ChainText], texts), limits, self._rules)

    def num_tree_nodes(self, num_steps: int) -> int:
        """Every node may branch."""
        nodes = level = 1
        for _ in range(num_steps):
            level = min(level * self.branches, self.max_nodes)
            nodes += level
        return min(self.max_nodes, nodes)

    @property
    def drafts_ahead(self) -> bool:  # type: ignore[override]
        """Tokens of other requests come to the corpus when they are committed."""
        return self._corpus is None

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
        text, max_tokens = self._text_of(req), min(self.max_nodes, self._node_limit(req)) - 1
        text.update()
        return text.draft(max_tokens)

    def _text_of(self, req: Req) -> RequestText | ChainText:
        """What was read of it so far."""
        text = self._texts.get(req)
        if text is None:
            text = self._texts[req] = self._new_text(req)
        return text

    def _new_text(self, req: Req) -> RequestText | ChainText:
        if self._rules is not None:
            return ChainText(req, self._max_depth, self._rules)
        given = req, self._max_depth, self._expander, self._corpus
        return RequestText(*given, self.min_match)
