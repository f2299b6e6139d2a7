"""Who owns which KV slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specengine.core.errors import InvariantError
from specengine.core.request import Req
from specengine.memory.allocator import TokenToKVPoolAllocator
from specengine.memory.radix_cache import RadixCache
from specengine.memory.req_to_token import ReqToTokenPool


class KVLedger:
    """The one owner of KV bookkeeping: it reserves what a forward may write, commits what stands,
    and releases a request, whatever the reason it leaves.

    A slot is free, or in the radix cache, or private to one request. The row of a request holds
    `cached_len` slots of the cache (which its lock on `last_node` keeps there), then private ones
    up to `reserved_len`. Private slots come in whole pages; the last one may be cut off by the end
    of the row.
    """

    def __init__(
        self, rows: ReqToTokenPool, allocator: TokenToKVPoolAllocator, cache: RadixCache
    ) -> None:
        self.rows = rows
        self.allocator = allocator
        self.cache = cache

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
        pages_for = self.allocator.pages_for
        missing = pages_for(length) - pages_for(req.reserved_len)
        return max(0, missing) * self.allocator.page_size

    def open(self, req: Req, match_limit: int) -> bool:
        """Give the request a row that begins with the cached KV of its first tokens, `match_limit`
        at most. False where no row is free."""
        row = self.rows.alloc()
        if row is None:
            return False
        slots, node = self.cache.match_prefix(req.token_ids[:match_limit])
        self.cache.inc_lock_ref(node)
        self.rows.write(row, 0, slots)
        req.req_pool_idx, req.last_node = row, node
        req.kv_len = req.cached_len = req.reserved_len = len(slots)
        return True

    def reserve(self, req: Req, length: int) -> bool:
        """Have slots for the first `length` tokens, evicting from the cache as far as needed.
        False, and nothing changed, where the memory does not allow it."""
        allocator = self.allocator
        shortage = self.shortage(req, length)
        if not shortage:
            return True
        if shortage > self.obtainable:
            return False
        if shortage > allocator.available:
            gone = self.cache.evict(shortage - allocator.available)
            allocator.free_pages(allocator.pages_of(gone))
        pages = allocator.alloc_pages(shortage // allocator.page_size)
        assert pages is not None, "evicting gave less than the cache said"
        room = self.rows.max_context_len - req.reserved_len
        slots = allocator.slots_of(pages)[:room]
        self.rows.write(_row(req), req.reserved_len, slots)
        req.reserved_len += len(slots)
        return True

    def commit(self, req: Req, count: int) -> None:
        """The KV of `count` more tokens is written and stands."""
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
        page_size = self.allocator.page_size
        length = req.kv_len // page_size * page_size
        if self.cache.disable or length <= req.cached_len:
            return
        tokens = np.array(req.token_ids[:length], dtype=np.int64)
        present = self.cache.insert(tokens, self.rows.slots(_row(req), 0, length))
        slots, node = self.cache.match_prefix(tokens)
        if present > req.cached_len:
            self._free(req, req.cached_len, present)
            self.rows.write(_row(req), req.cached_len, slots[req.cached_len : present])
        self.cache.inc_lock_ref(node)
        self.cache.dec_lock_ref(req.last_node)
        req.last_node, req.cached_len = node, length

    def release(self, req: Req) -> None:
        """Let go of everything the request has: finished, aborted and retracted requests alike.
        What is committed stays in the cache for as long as the memory lasts."""
        if req.req_pool_idx is None:
            return
        self.share(req)
        self._free(req, req.cached_len, req.reserved_len)
        self.cache.dec_lock_ref(req.last_node)
        self.rows.free(req.req_pool_idx)
        req.req_pool_idx = req.last_node = None
        req.kv_len = req.cached_len = req.reserved_len = 0

    def flush(self) -> None:
        """Send the changed rows to the device."""
        self.rows.flush()

    def evict_all(self) -> None:
        """Free every slot of the cache that no request holds."""
        gone = self.cache.evict(self.cache.evictable_size)
        self.allocator.free_pages(self.allocator.pages_of(gone))

    def check(self, live: Sequence[Req]) -> None:
        """Raise InvariantError unless free + cached + private slots are all there are, and likewise
        the rows."""
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
        for req in live:
            if not req.cached_len <= req.kv_len <= req.reserved_len:
                raise InvariantError(
                    f"request {req.rid}: cached {req.cached_len} <= committed {req.kv_len} <= "
                    f"reserved {req.reserved_len} does not hold"
                )

    def _free(self, req: Req, start: int, end: int) -> None:
        """Free the private pages of tokens start .. end - 1; `start` is on a page boundary."""
        slots = self.rows.slots(_row(req), start, end)
        self.allocator.free_pages(self.allocator.pages_of(slots))


def _row(req: Req) -> int:
    assert req.req_pool_idx is not None, f"{req.rid} has no row in the request pool"
    return req.req_pool_idx
