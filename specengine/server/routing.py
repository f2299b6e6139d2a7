"""Which of several replicas answers a prompt: one that has its beginning in its cache, unless that
one is much busier than another.

A replica's prefix cache finds prefixes in whole pages. So a prompt is a chain of pages here too:
each page's key is the hash of its tokens and of the key before it, and the longest known chain
tells where the prompt's KV lies. Used in one event loop; each process keeps its own record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b

import numpy as np

MOST_PAGES = 2**18  # keys kept: some 40 MB
# A cache hit is worth waiting behind so many more requests than at the replica with the fewest,
# and behind half as many again as that one has.
MORE_REQUESTS = 4
MORE_SHARE = 1.5


def page_keys(token_ids: Sequence[int], page_size: int) -> Iterator[bytes]:
    """The key of each whole page; the last token is always computed anew, so it counts as none. A
    prompt with a number beyond 64 bits has no keys: the replica that gets it refuses it by name."""
    try:
        ids = np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        return
    key = b""
    for start in range(0, len(ids) - page_size, page_size):
        key = blake2b(key + ids[start : start + page_size].tobytes(), digest_size=16).digest()
        yield key


class PrefixRouter:
    """page_size: of the replicas' caches. min_page: pages smaller than that are put together here,
    since each costs a hash."""

    def __init__(self, num_replicas: int, page_size: int, min_page: int = 16) -> None:
        self._page = page_size * -(-min_page // page_size)
        self._open = [0] * num_replicas
        self._places: OrderedDict[bytes, int] = OrderedDict()  # the replica that last had the page

    @property
    def num_open(self) -> list[int]:
        """Requests that each replica has been given and has not finished."""
        return list(self._open)

    def choose(self, token_ids: Sequence[int], able: Collection[int]) -> int:
        """The replica for this prompt, which counts as open there until `finish`. able: those that
        serve; at least one."""
        keys = list(page_keys(token_ids, self._page))
        known = self._known(keys, able)
        least = min(able, key=lambda one: (self._open[one], one))
        chosen = least if known is None or self._is_busy(known, least) else known
        for key in keys:
            self._places[key] = chosen
            self._places.move_to_end(key)
        while len(self._places) > MOST_PAGES:
            self._places.popitem(last=False)
        self._open[chosen] += 1
        return chosen

    def finish(self, replica: int) -> None:
        self._open[replica] -= 1

    def forget(self, replica: int) -> None:
        """Its cache is empty."""
        for key in [key for key, place in self._places.items() if place == replica]:
            del self._places[key]

    def _known(self, keys: list[bytes], able: Collection[int]) -> int | None:
        """Where the longest known beginning lies."""
        for key in reversed(keys):
            place = self._places.get(key)
            if place is not None and place in able:
                return place
        return None

    def _is_busy(self, known: int, least: int) -> bool:
        fewest = self._open[least]
        return self._open[known] > max(fewest + MORE_REQUESTS, fewest * MORE_SHARE)
