"""Snapshots of recurrent state, which let prefixes of the cache be gone on from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from specengine.core.errors import InvariantError
from specengine.memory.radix_cache import RadixNode

Copies = list[tuple[int, int]]  # from slot to slot


class StateSnapshots:
    """Slots of the state pool that hold the state behind a prefix of the radix cache.

    A snapshot lies at a page boundary within a node, and goes with it, or earlier: where a new
    one needs a slot, the least recently used goes. No lock keeps it, because a request copies it
    into a slot of its own when it starts.
    """

    def __init__(
        self, first: int, count: int, copy: Callable[[Sequence[tuple[int, int]]], None]
    ) -> None:
        """first, count: of the slots. copy: from slot to slot, in order, behind all that the device
        was given so far."""
        self.count = count
        self.num_evicted = 0  # snapshots since start that went for the sake of newer ones
        self._free = list(range(first + count - 1, first - 1, -1))
        self._nodes: OrderedDict[int, RadixNode] = OrderedDict()  # by slot, the oldest use first
        self._copy = copy
        self._unsent: Copies = []

    @property
    def num_kept(self) -> int:
        return len(self._nodes)

    def longest(self, node: RadixNode, length: int) -> tuple[int, int | None]:
        """The longest prefix with a snapshot of the `length` tokens that end at `node`, and its
        slot; 0 and None where there is none."""
        while node.parent is not None:
            start = length - len(node)
            if node.snapshots:
                offset = max(node.snapshots)
                return start + offset, node.snapshots[offset]
            node, length = node.parent, start
        return 0, None

    def restore(self, slot: int, row: int) -> None:
        """Let a request go on from a snapshot; the device sees it after `flush`."""
        self._nodes.move_to_end(slot)
        self._unsent.append((slot, row))

    def flush(self) -> None:
        if self._unsent:
            self._copy(self._unsent)
            self._unsent = []

    def take(self) -> int | None:
        """A slot for a new snapshot, which belongs to the caller until `attach` or `give_back`.
        None where others have them all."""
        if not self._free and self._nodes:
            slot, node = self._nodes.popitem(last=False)
            node.snapshots = {at: one for at, one in node.snapshots.items() if one != slot}
            self._free.append(slot)
            self.num_evicted += 1
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def attach(self, node: RadixNode, length: int, place: int, slot: int) -> None:
        """The slot holds the state behind the first `place` of the `length` tokens that end at
        `node`. Where these have a snapshot, that one stays."""
        start = length - len(node)
        while start >= place:
            assert node.parent is not None, "a prefix ends within its path"
            node = node.parent
            start -= len(node)
        if place - start in node.snapshots:
            self.give_back(slot)
            return
        node.snapshots[place - start] = slot
        self._nodes[slot] = node

    def forget(self, node: RadixNode) -> None:
        """The node is no more."""
        for slot in node.snapshots.values():
            del self._nodes[slot]
            self._free.append(slot)
        node.snapshots = {}

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """A node was cut in two. lower: what had all of it until now."""
        size, found = len(upper), lower.snapshots
        upper.snapshots = {at: slot for at, slot in found.items() if at <= size}
        lower.snapshots = {at - size: slot for at, slot in found.items() if at > size}
        self._nodes |= dict.fromkeys(upper.snapshots.values(), upper)

    def check(self, num_pending: int) -> None:
        """num_pending: slots that requests have taken and not attached. Raises InvariantError
        unless every slot is accounted for."""
        kept, free = len(self._nodes), len(self._free)
        if kept + free + num_pending != self.count:
            raise InvariantError(
                f"{kept} kept + {free} free + {num_pending} pending != {self.count} snapshots"
            )
