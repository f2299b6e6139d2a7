"""A request's text, and where the end of it was seen before."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.core.request import Req
from specengine.draft.proposals import Draft
from specengine.draft.reading import unread
from specengine.draft.rotating_corpus import RotatingCorpus
from specengine.draft.suffix.expand import Expander
from specengine.draft.suffix.match import Follower, Match
from specengine.draft.suffix.tree import SuffixTree


class RequestText:
    """Prompt and output of one request, matched with themselves and with the shared corpus."""

    def __init__(
        self,
        req: Req,
        max_depth: int,
        expander: Expander,
        corpus: RotatingCorpus[SuffixTree] | None,
        min_match: int = 0,
    ) -> None:
        """min_match: of less than so many tokens seen before nothing is drafted."""
        self._req = req
        self._min_match = min_match
        self._expander = expander
        self._corpus = corpus
        self._followers: dict[SuffixTree, Follower] = {}
        self._tree = SuffixTree(max_depth)

    @property
    def num_tokens(self) -> int:
        return len(self._tree.tokens)

    def update(self, most: int | None = None, said: Sequence[int] = ()) -> None:
        """Take in the tokens that came since, the prompt's at first, at most so many; and what the
        corpus has gained. said: more of them, which are not committed yet."""
        new = [*unread(self._req, self.num_tokens, most), *said]
        self._tree.extend(new)
        if self._corpus is not None:
            self._follow(self._corpus, len(new))

    @property
    def match_length(self) -> int:
        """The length of the longest suffix seen before, in tokens."""
        others = [follower.match.length for follower in self._followers.values()]
        return max([self._tree.length, *others])

    def draft(self, max_tokens: int) -> Draft:
        """The best draft, the request's own among equals."""
        if self.match_length < self._min_match:
            max_tokens = 0
        root, expander = self._tree.tokens[-1], self._expander
        own = expander.best(root, Match.own(self._tree), max_tokens)
        if not self._followers:
            return own
        others = [expander.best(root, one.match, max_tokens) for one in self._followers.values()]
        return max([own, *others], key=lambda draft: draft.num_expected)

    def _follow(self, corpus: RotatingCorpus[SuffixTree], num_new: int) -> None:
        text = self._tree.tokens
        followers: dict[SuffixTree, Follower] = {}
        for tree in corpus.texts:
            follower = self._followers.get(tree)
            if follower is None:
                follower = Follower(tree)
                follower.follow(text, len(text))
            else:
                follower.follow(text, num_new)
            followers[tree] = follower
        self._followers = followers
