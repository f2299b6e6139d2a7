"""A trace request by request: the text that was written, and the draft at each position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specengine.draft.trace.format import Array
from specengine.draft.trace.reader import Trace


@dataclass(frozen=True)
class RecordedDraft:
    """What was drafted at one position. Node 0 is the root; lists have an entry a node, the root's
    of no meaning. path_probs: the drafter's estimate that a path is accepted; NaN where it gave
    none. The weights of sampled drafts are None where drafts were not sampled."""

    tokens: list[int]
    parents: list[int]
    path_probs: list[float]
    limit: int  # most nodes that the request could use, root included
    accepted: int  # as it was decided when recorded
    target_probs: list[float]
    draft_probs: list[float] | None
    chances: list[float] | None
    missing: list[float] | None

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of each node, in order of preference."""
        below: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            below[self.parents[node]].append(node)
        return below

    @property
    def is_chain(self) -> bool:
        return all(parent == node for node, parent in enumerate(self.parents[1:]))

    def path(self, text: list[int]) -> list[int]:
        """The nodes below the root that carry the text, as far as there are any."""
        node, found = 0, []
        for token in text:
            matches = [one for one in self.children[node] if self.tokens[one] == token]
            if not matches:
                break
            node = matches[0]
            found.append(node)
        return found


@dataclass(frozen=True)
class RecordedRequest:
    """text: output tokens from position `first` on, the first that a round emitted. drafts: by
    position in the output."""

    first: int
    text: list[int]
    drafts: dict[int, RecordedDraft]
    is_greedy: bool
    is_over: bool  # its end was recorded

    @property
    def end(self) -> int:
        return self.first + len(self.text)


def read_requests(trace: Trace) -> list[RecordedRequest]:
    """Those that any round was recorded of."""
    records, lengths = trace.rounds.records, dict(trace.ends.tolist())
    first_node = np.cumsum(records["num_nodes"].astype(np.int64) - 1)
    first_node -= records["num_nodes"].astype(np.int64) - 1
    first_token = np.cumsum(records["num_tokens"].astype(np.int64)) - records["num_tokens"]
    requests = []
    for number, about in enumerate(trace.requests):
        [rows] = np.nonzero(records["request"] == number)
        if len(rows):
            drafts = {
                int(records["position"][row]): _draft(trace, int(row), int(first_node[row]))
                for row in rows
            }
            text = _text(trace, rows, first_token)
            first = int(records["position"][rows].min())
            length = lengths.get(number)
            kept = text if length is None else text[: length - first]
            requests.append(
                RecordedRequest(first, kept, drafts, about["is_greedy"], length is not None)
            )
    return requests


def _draft(trace: Trace, row: int, first: int) -> RecordedDraft:
    record = trace.rounds.records[row]
    nodes = trace.rounds.nodes[first : first + int(record["num_nodes"]) - 1]
    names = nodes.dtype.names or ()

    def column(name: str) -> list[float]:
        return [float("nan"), *nodes[name].tolist()]

    def optional(name: str) -> list[float] | None:
        return column(name) if name in names else None

    return RecordedDraft(
        tokens=[-1, *nodes["token"].tolist()],
        parents=[-1, *nodes["parent"].tolist()],
        path_probs=column("path_prob"),
        limit=int(record["limit"]),
        accepted=int(record["accepted"]),
        target_probs=column("target_prob"),
        draft_probs=optional("draft_prob"),
        chances=optional("chance"),
        missing=optional("missing"),
    )


def _text(trace: Trace, rows: Array, first_token: Array) -> list[int]:
    """The text of one request. A position that no round was recorded of, as where a prefill batch
    carried the request along, has the token -1, which no draft carries."""
    records, tokens = trace.rounds.records, trace.rounds.tokens
    first = int(records["position"][rows].min())
    ends = records["position"][rows].astype(np.int64) + records["num_tokens"][rows]
    text = np.full(int(ends.max()) - first, -1, np.int64)
    for row in rows:
        begin, count = first_token[row], int(records["num_tokens"][row])
        place = int(records["position"][row]) - first
        text[place : place + count] = tokens[begin : begin + count]
    written: list[int] = text.tolist()
    return written
