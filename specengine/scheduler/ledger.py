"""Who owns which KV slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from specengine.core.errors import InvariantError
from specengine.core.request import Req
from specengine.memory.allocator import IntArray, TokenToKVPoolAllocator
from specengine.memory.radix_cache import RadixCache, RadixNode
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.memory.state_snapshots import StateSnapshots


class KVLedger:
    """The one owner of KV bookkeeping: it reserves what a forward may write, commits what is kept,
    and releases a request, whatever the reason it leaves.

    A slot is free, or in the radix cache, or private to one request. The row of a request holds
    `cached_len` slots of the cache (which its lock on `last_node` keeps there), then private ones
    up to `reserved_len`. Private slots come in whole pages; the last one may be cut off by the end
    of the row.
    """

    def __init__(
        self,
        rows: ReqToTokenPool,
        allocator: TokenToKVPoolAllocator,
        cache: RadixCache,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """snapshots: where a token's KV does not hold all of the text before it. A prefix is then
        continued only from a snapshot."""
        self.rows = rows
        self.allocator = allocator
        self.cache = cache
        self.snapshots = cache.follower = snapshots

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.allocator.capacity

    @property
    def obtainable(self) -> int:
        """Slots that are free, or would be after evicting the cache."""
        return self.allocator.available + self.cache.evictable_size

    def fits_alone(self, length: int) -> bool:
        """Whether a request of `length` slots fits when it has the memory to itself."""
        pages = self.allocator.pages_for(length)
        return pages <= self.allocator.num_pages and length <= self.rows.max_context_len

    def shortage(self, req: Req, length: int) -> int:
        """Slots that `req` lacks for `length` tokens, in whole pages."""
        size = self.allocator.page_size
        missing = -(-length // size) - -(-req.reserved_len // size)
        return missing * size if missing > 0 else 0

    def open(self, req: Req, match_limit: int) -> bool:
        """Give the request a row that begins with the cached KV of its first tokens, `match_limit`
        at most. False where no row is free."""
        row = self.rows.alloc()
        if row is None:
            return False
        tokens = req.tokens(0, match_limit + self.cache.lookahead)
        slots, node = self.cache.match_prefix(tokens)
        if self.snapshots is not None:
            slots, node = self._restore(self.snapshots, req, row, slots, node)
        self.cache.inc_lock_ref(node)
        if len(slots):
            self.rows.write(row, 0, slots)
        req.req_pool_idx, req.last_node = row, node
        req.kv_len = req.cached_len = req.reserved_len = len(slots)
        return True

    def _restore(
        self, snapshots: StateSnapshots, req: Req, row: int, slots: IntArray, node: RadixNode
    ) -> tuple[IntArray, RadixNode]:
        """Of the prefix that the cache has, what a snapshot reaches: row `row` goes on from its
        recurrent state."""
        known = len(slots)
        length, snapshot = snapshots.longest(node, known)
        req.state_branch = known
        if length < known:
            tokens = req.tokens(0, length + self.cache.lookahead)
            slots, node = self.cache.match_prefix(tokens)
        if snapshot is not None:
            snapshots.restore(snapshot, row)
        return slots, node

    def take_saves(self, req: Req, end: int) -> list[tuple[int, int]]:
        """For the forward over the tokens up to `end`: where snapshots are taken, and into which
        slots. Where the text parts from one that is known, for those that share as much; and at the
        last page boundary that the same prompt could go on from."""
        if self.snapshots is None:
            return []
        size, last = self.allocator.page_size, min(end, req.prefill_len - 1)
        wanted = sorted({req.state_branch, last // size * size})
        found = []
        for length in wanted:
            slot = self.snapshots.take() if req.kv_len < length <= end else None
            if slot is not None:
                found.append((length, slot))
        req.state_saves += found
        return found

    def reserve(self, req: Req, length: int) -> bool:
        """Have slots for the first `length` tokens, evicting from the cache as far as needed.
        False, and nothing changed, where the memory does not allow it."""
        shortage = self.shortage(req, length)
        if shortage > self.obtainable:
            return False
        if shortage:
            self._extend(req, self._take(shortage))
        return True

    def reserve_all(self, reqs: Sequence[Req], lengths: Sequence[int]) -> bool:
        """`reserve` of several requests at once, which takes far less time a request. False, and
        nothing changed, where the memory does not allow all of it."""
        shortages = list(map(self.shortage, reqs, lengths))
        if (needed := sum(shortages)) > self.obtainable:
            return False
        slots, start = self._take(needed), 0
        for req, shortage in zip(reqs, shortages, strict=True):
            if shortage:
                self._extend(req, slots[start : start + shortage])
                start += shortage
        return True

    def commit(self, req: Req, count: int) -> None:
        """The KV of `count` more tokens is written and kept."""
        req.kv_len += count

    def trim(self, req: Req, length: int) -> None:
        """Give back the private pages that lie wholly past the first `length` tokens."""
        keep = self.allocator.pages_for(length) * self.allocator.page_size
        if keep < req.reserved_len:
            self._free(req, keep, req.reserved_len)
            req.reserved_len = keep

    def share(self, req: Req) -> None:
        """Hand the committed KV, in whole pages, to the cache. Where the cache has the same tokens
        already, the request's duplicates are freed and its row points to the cache's slots."""
        node = self._hand_over(req)
        self.cache.inc_lock_ref(node, locked=req.last_node)
        req.last_node = node

    def release(self, req: Req) -> None:
        """Let go of everything the request has: finished, aborted and retracted requests alike.
        What is committed stays in the cache for as long as the memory lasts."""
        if req.req_pool_idx is None:
            return
        self._hand_over(req)
        if req.state_saves:
            self._drop_saves(req)
        self._free(req, req.cached_len, req.reserved_len)
        self.cache.dec_lock_ref(req.last_node)
        self.rows.free(req.req_pool_idx)
        req.req_pool_idx = req.last_node = None
        req.kv_len = req.cached_len = req.reserved_len = 0

    def flush(self) -> None:
        """Send the changed rows to the device, and let requests have the states that they go on
        from."""
        self.rows.flush()
        if self.snapshots is not None:
            self.snapshots.flush()

    def evict_all(self) -> None:
        """Free every slot of the cache that no request holds."""
        gone = self.cache.evict(self.cache.evictable_size)
        self.allocator.free_pages(self.allocator.pages_of(gone))

    def check(self, live: Sequence[Req]) -> None:
        """Raise InvariantError unless free + cached + private slots are all there are, and free +
        used rows all rows."""
        pages_for = self.allocator.pages_for
        private = sum(pages_for(r.reserved_len) - pages_for(r.cached_len) for r in live)
        free = self.allocator.available // self.allocator.page_size
        evictable, protected = self.cache.evictable_size, self.cache.protected_size
        cached = (evictable + protected) // self.allocator.page_size
        if free + cached + private != self.allocator.num_pages:
            raise InvariantError(
                f"{free} free + {cached} cached ({evictable} evictable and {protected} protected "
                f"tokens) + {private} private != {self.allocator.num_pages} pages"
            )
        if self.rows.num_free + len(live) != self.rows.size:
            raise InvariantError(
                f"{self.rows.num_free} free + {len(live)} used != {self.rows.size} request rows"
            )
        if self.snapshots is not None:
            self.snapshots.check(sum(len(req.state_saves) for req in live))
        for req in live:
            if not req.cached_len <= req.kv_len <= req.reserved_len:
                raise InvariantError(
                    f"request {req.rid}: cached {req.cached_len} <= committed {req.kv_len} <= "
                    f"reserved {req.reserved_len} does not hold"
                )

    def _take(self, count: int) -> IntArray:
        """Whole pages of slots out of `obtainable`: int32 [count]."""
        allocator = self.allocator
        if count > allocator.available:
            gone = self.cache.evict(count - allocator.available)
            allocator.free_pages(allocator.pages_of(gone))
        pages = allocator.alloc_pages(count // allocator.page_size)
        assert pages is not None, "evicting gave less than the cache said"
        return allocator.slots_of(pages)

    def _extend(self, req: Req, slots: IntArray) -> None:
        own = slots[: self.rows.max_context_len - req.reserved_len]
        self.rows.write(req.row, req.reserved_len, own)
        req.reserved_len += len(own)

    def _hand_over(self, req: Req) -> RadixNode:
        """`share`, but for the lock, which stays where it was. Gives the node at which the shared
        tokens end."""
        node = self._append(req)
        if self.snapshots is not None and req.state_saves:
            ready = [one for one in req.state_saves if one[0] <= min(req.cached_len, req.kv_len)]
            for length, slot in ready:
                self.snapshots.attach(node, req.cached_len, length, slot)
            req.state_saves = [one for one in req.state_saves if one not in ready]
        return node

    def _drop_saves(self, req: Req) -> None:
        """Those that no shared prefix has come to have."""
        for _, slot in req.state_saves:
            assert self.snapshots is not None
            self.snapshots.give_back(slot)
        req.state_saves = []

    def _append(self, req: Req) -> RadixNode:
        page_size, start, node = self.allocator.page_size, req.cached_len, req.last_node
        lookahead = self.cache.lookahead
        # Of the committed slots, the leading ones that nothing writes again, and whose lookahead is
        # known. The last token that any of them has seen is the one behind them all.
        final = min(req.kv_len - max(0, lookahead - 1), req.seq_len - lookahead)
        end = final // page_size * page_size
        if self.cache.disable or end <= start:
            return cast(RadixNode, node)
        tokens = req.tokens(start, end + lookahead)
        slots = self.rows.slots(req.row, start, end)
        known, node = self.cache.append(node, tokens, slots)
        if len(known):
            self._free(req, start, start + len(known))
            self.rows.write(req.row, start, known)
        req.cached_len = end
        return node

    def _free(self, req: Req, start: int, end: int) -> None:
        """Free the private pages of tokens start .. end - 1; `start` is on a page boundary."""
        slots = self.rows.slots(req.row, start, end)
        self.allocator.free_pages(self.allocator.pages_of(slots))
