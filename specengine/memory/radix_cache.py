"""The prefix cache: KV of finished and running requests, found again by their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specengine.memory.oldest_first import OldestFirst

IntArray = NDArray[Any]
Tokens = Sequence[int] | IntArray


@dataclass(slots=True, eq=False)
class RadixNode:
    """An edge of the tree and what hangs below it. Lengths are whole pages.

    lock_ref counts the locks on this node and on its descendants.
    """

    tokens: IntArray  # int64 [n]; with a lookahead [n, 1 + lookahead], those that follow it behind
    slots: IntArray  # int32 [n]
    parent: RadixNode | None
    children: dict[bytes, RadixNode] = field(default_factory=dict)  # by their first page of tokens
    lock_ref: int = 0
    last_access: int = 0
    # Of a target that keeps recurrent state: slots of the state pool, by how many of these tokens
    # the state has read (memory/state_snapshots.py).
    snapshots: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_evictable_leaf(self) -> bool:
        return not self.children and not self.lock_ref and self.parent is not None


class NodeFollower(Protocol):
    """What keeps things at places within nodes: memory.state_snapshots.StateSnapshots."""

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """A node was cut in two. lower: what had all of it until now."""
        ...

    def forget(self, node: RadixNode) -> None:
        """The node is no more."""
        ...


class RadixCache:
    """A radix tree over token ids (Zheng et al. 2024, SGLang, section 3) that owns the KV slots it
    holds. A lock keeps a path from the root; what no lock holds can be evicted, least recently
    used leaves first.

    Prefixes are matched in whole pages. With `disable` it remembers nothing.

    lookahead: how many of the tokens that follow its own a slot's content was computed from, as a
    draft model's may be. A slot is found where these agree too, so sequences are given with that
    many tokens more than they have slots. Set before the first sequence.
    """

    def __init__(self, page_size: int, disable: bool = False, lookahead: int = 0) -> None:
        self.page_size = page_size
        self.disable = disable
        self.lookahead = lookahead
        self.follower: NodeFollower | None = None  # set by the ledger
        self.reset()

    def reset(self) -> None:
        """Forget everything, locks included. The slots are the caller's to free."""
        nothing = np.empty(0, dtype=np.int64)
        self.root = RadixNode(nothing, nothing.astype(np.int32), None)
        self.evictable_size = 0  # tokens that no lock holds
        self.protected_size = 0  # tokens that a lock holds
        self._evictable_leaves = OldestFirst[RadixNode]()
        self._clock = 0

    def match_prefix(self, token_ids: Tokens) -> tuple[IntArray, RadixNode]:
        """The slots of the longest known prefix (int32 [n], whole pages) and the node it ends at,
        which the caller may lock. The last `lookahead` tokens get none. A match inside a node
        splits it."""
        return self._descend(self.root, self._aligned(token_ids))

    def append(
        self, node: RadixNode, token_ids: Tokens, slots: IntArray
    ) -> tuple[IntArray, RadixNode]:
        """Remember the KV of tokens that follow the sequence that ends at `node`, up to the last
        whole page of those before the last `lookahead`. Returns the slots that the cache has for
        those of them that were known (int32 [n]), and the node at which the whole ends, which the
        caller may lock. Of `slots`, those of known tokens stay the caller's; all later ones, up to
        that whole page's end, now belong to the cache."""
        tokens = self._aligned(token_ids)
        if self.disable or not len(tokens):
            return self.root.slots, node
        known, last = self._descend(node, tokens)
        present = len(known)
        if present == len(tokens):
            return known, last
        own = slots[present : len(tokens)].astype(np.int32)
        leaf = RadixNode(tokens[present:].copy(), own, last, last_access=self._clock)
        last.children[self._key(leaf.tokens)] = leaf
        self.evictable_size += len(own)
        self._evictable_leaves.discard(last)
        self._evictable_leaves.add(leaf)
        return known, leaf

    def inc_lock_ref(self, node: RadixNode, locked: RadixNode | None = None) -> None:
        """Keep the path from the root to `node`. locked: a node on it; a lock of its own path is
        moved on, instead of a new one taken."""
        for held in self._path(node):
            if held is locked:
                return
            if held.lock_ref == 0:
                self.evictable_size -= len(held)
                self.protected_size += len(held)
                self._evictable_leaves.discard(held)
            held.lock_ref += 1

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Undo one inc_lock_ref of the same path."""
        for held in self._path(node):
            held.lock_ref -= 1
            if held.lock_ref == 0:
                self.evictable_size += len(held)
                self.protected_size -= len(held)
                if held.is_evictable_leaf:
                    self._evictable_leaves.add(held)

    def evict(self, num_tokens: int) -> IntArray:
        """Forget leaves, whole ones, until at least `num_tokens` are gone or nothing is left that
        may go. Returns their slots (int32), which are now the caller's."""
        gone = [self.root.slots]
        count = 0
        while count < num_tokens and (leaf := self._evictable_leaves.pop()) is not None:
            parent = self._remove(leaf)
            gone.append(leaf.slots)
            count += len(leaf)
            if parent.is_evictable_leaf:
                self._evictable_leaves.add(parent)
        return np.concatenate(gone)

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _descend(self, node: RadixNode, tokens: IntArray) -> tuple[IntArray, RadixNode]:
        """match_prefix, of tokens in whole pages that follow the sequence that ends at `node`."""
        self._clock += 1
        for used in self._path(node):
            used.last_access = self._clock
        found: list[IntArray] = []
        while (child := self._child(node, tokens)) is not None:
            common = self._common_prefix(child.tokens, tokens)
            node = child if common == len(child) else self._split(child, common)
            node.last_access = self._clock
            found.append(node.slots)
            tokens = tokens[common:]
            if common < len(child):
                break
        return np.concatenate(found) if found else self.root.slots, node

    def _aligned(self, token_ids: Tokens) -> IntArray:
        tokens = np.asarray(token_ids, dtype=np.int64)
        count = max(0, len(tokens) - self.lookahead)
        if self.lookahead and count:
            tokens = np.lib.stride_tricks.sliding_window_view(tokens, 1 + self.lookahead)
        return tokens[: count // self.page_size * self.page_size]

    def _key(self, tokens: IntArray) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _child(self, node: RadixNode, tokens: IntArray) -> RadixNode | None:
        return node.children.get(self._key(tokens)) if len(tokens) else None

    def _common_prefix(self, left: IntArray, right: IntArray) -> int:
        """Tokens in common, in whole pages."""
        size = min(len(left), len(right))
        differ = left[:size] != right[:size]
        if self.lookahead:
            differ = differ.any(1)
        first = int(differ.argmax())
        common = first if size and differ[first] else size
        return common // self.page_size * self.page_size

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Cut `node` in two after `length` tokens; gives the upper half, which is new."""
        parent = node.parent
        assert parent is not None, "the root is empty and never split"
        upper = RadixNode(
            node.tokens[:length].copy(),
            node.slots[:length].copy(),
            parent,
            lock_ref=node.lock_ref,
            last_access=node.last_access,
        )
        parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.slots = node.tokens[length:].copy(), node.slots[length:].copy()
        node.parent = upper
        upper.children[self._key(node.tokens)] = node
        if self.follower is not None:
            self.follower.split(upper, node)
        return upper

    def _remove(self, leaf: RadixNode) -> RadixNode:
        parent = leaf.parent
        assert parent is not None, "the root is no leaf to remove"
        del parent.children[self._key(leaf.tokens)]
        self.evictable_size -= len(leaf)
        if self.follower is not None:
            self.follower.forget(leaf)
        return parent

    def _path(self, node: RadixNode) -> Iterator[RadixNode]:
        """From `node` up to the child of the root."""
        while node.parent is not None:
            yield node
            node = node.parent
