"""FlashInfer's wrappers, each with memory for one plan, and the pool that lends them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode

# Partial results of split keys; FlashInfer raises where a plan needs more.
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class HostLengths:
    """The lengths that FlashInfer plans by, int32 on the host. A page is one KV slot."""

    qo_indptr: Tensor  # [B + 1]
    kv_indptr: Tensor  # [B + 1]
    ones: Tensor  # [B], tokens in each request's last page

    @classmethod
    def of(cls, batch: ForwardBatch) -> HostLengths:
        """In a capture extend_lens_cpu are upper bounds, cut to the rows of the batch in order."""
        ends = [min(end, batch.num_tokens) for end in accumulate(batch.extend_lens_cpu, initial=0)]
        counts = [end - begin for begin, end in pairwise(ends)]
        keys = [p + n for p, n in zip(batch.prefix_lens_cpu, counts, strict=True)]
        return cls(
            torch.tensor(ends, dtype=torch.int32),
            torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
            torch.ones(len(counts), dtype=torch.int32),
        )

    @property
    def num_keys(self) -> int:
        return int(self.kv_indptr[-1])


def slots_of(batch: ForwardBatch, num_keys: int) -> Tensor:
    """int32 [num_keys], the slots of all requests' keys, request by request. num_keys, counted on
    the host, must equal the sum of the device's lengths."""
    starts_B = batch.seq_lens.cumsum(0) - batch.seq_lens
    request_K = torch.repeat_interleave(batch.seq_lens, output_size=num_keys)
    place_K = torch.arange(num_keys, device=starts_B.device) - starts_B[request_K]
    return batch.req_to_token_pool.req_to_token[batch.req_pool_indices[request_K], place_K]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class Wrapper:
    """`inner` copies a plan from its pinned memory to the device, on the current stream."""

    inner: Any  # BatchPrefillWithPagedKVCacheWrapper or BatchDecodeWithPagedKVCacheWrapper
    copied: torch.cuda.Event = field(default_factory=_new_event)

    def plan(self, *args: Any, **settings: Any) -> None:
        """Waits for the copy of the previous plan, on any stream."""
        self.copied.synchronize()
        self.inner.plan(*args, **settings)
        self.copied.record(torch.cuda.current_stream())


class WrapperPool:
    """A wrapper is free again when its plan is garbage, which is after the plan's forward was
    launched. The device may still run that forward: a plan on another stream must make that stream
    wait for it first. At least two wrappers alternate, so that a plan seldom waits for a copy."""

    def __init__(self, make: Callable[[], Wrapper]) -> None:
        self._make = make
        self._free: deque[Wrapper] = deque()

    def take(self) -> Wrapper:
        return self._free.popleft() if len(self._free) > 1 else self._make()

    def lend(self, wrapper: Wrapper, plan: object) -> None:
        weakref.finalize(plan, self._free.append, wrapper).atexit = False


class Wrappers:
    """Makes wrappers that share one workspace for split keys: their forwards run on one stream."""

    unguarded = ("_slots",)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._slots: dict[int, Tensor] = {}  # by KV pool, shared by its graphs
        self._prefill = WrapperPool(lambda: self._of_prefill({}))
        self._decode = WrapperPool(lambda: self._of_decode({}))

    def pool(self, mode: ForwardMode) -> WrapperPool:
        return self._decode if mode.is_decode() else self._prefill

    def for_graph(self, batch: ForwardBatch, mask_bytes: Tensor | None, starts: Tensor) -> Wrapper:
        """A wrapper with fixed buffers. mask_bytes, starts: the buffers of a tree's mask."""
        size = batch.batch_size
        slots = self._slots_of(batch)
        if batch.forward_mode.is_decode():
            return self._of_decode(
                {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": self._ints(size + 1),
                    "paged_kv_indices_buffer": slots,
                    "paged_kv_last_page_len_buffer": self._ints(size),
                }
            )
        return self._of_prefill(
            {
                "use_cuda_graph": True,
                "qo_indptr_buf": self._ints(size + 1),
                "paged_kv_indptr_buf": self._ints(size + 1),
                "paged_kv_indices_buf": slots,
                "paged_kv_last_page_len_buf": self._ints(size),
                "custom_mask_buf": mask_bytes,
                "mask_indptr_buf": None if mask_bytes is None else starts,
            }
        )

    def _slots_of(self, batch: ForwardBatch) -> Tensor:
        """One buffer for each KV pool: graphs of a pool never overlap, but a draft's graph runs
        between the plan and the run of a verification."""
        most = batch.batch_size * batch.req_to_token_pool.req_to_token.shape[1]
        key = id(batch.token_to_kv_pool)
        if key not in self._slots or len(self._slots[key]) < most:
            self._slots[key] = self._ints(most)  # graphs that hold a smaller buffer keep it
        return self._slots[key]

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _of_prefill(self, buffers: dict[str, Any]) -> Wrapper:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        # Masks and split keys need fa2.
        inner = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa2", **buffers)
        return Wrapper(inner)

    def _of_decode(self, buffers: dict[str, Any]) -> Wrapper:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        inner = BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", use_tensor_cores=True, backend="fa2", **buffers
        )
        return Wrapper(inner)
