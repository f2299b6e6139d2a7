"""FlashInfer's paged wrappers in plain PyTorch, with the signatures of 0.6.12 and its ways: bits
of a mask are counted where the kernels count bytes, and a captured wrapper reads its buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: None = None,
        jit_kwargs: None = None,
    ) -> None:
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self.fixed = use_cuda_graph
        self.bounds = {"qo": qo_indptr_buf, "kv": paged_kv_indptr_buf}
        self.indices = paged_kv_indices_buf
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float = 1.0,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
        assert page_size == 1
        assert (paged_kv_last_page_len == 1).all()
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk
        self.dtypes = q_data_type, kv_data_type
        self.causal, self.scale, self.window_left = causal, sm_scale, window_left
        self.softcap = logits_soft_cap
        new = {"qo": qo_indptr, "kv": paged_kv_indptr}
        if self.fixed:
            assert self.indices is not None
            for name, tensor in new.items():
                buffer = self.bounds[name]
                assert buffer is not None
                buffer.copy_(tensor)  # of the same size
            self.indices[: len(paged_kv_indices)] = paged_kv_indices
            return
        self.bounds |= {name: tensor.clone() for name, tensor in new.items()}
        self.indices = paged_kv_indices
        self._custom_mask_buf, self._mask_indptr_buf = packed_custom_mask, None
        if packed_custom_mask is not None:
            bits = (qo_indptr.diff() * paged_kv_indptr.diff()).cumsum(0)
            self._mask_indptr_buf = torch.cat([torch.zeros(1, dtype=torch.int64), bits]).int()

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert self.bounds["qo"] is not None
        assert self.bounds["kv"] is not None
        assert self.indices is not None
        rows, keys = self.bounds["qo"].tolist(), self.bounds["kv"].tolist()
        assert q.shape == (rows[-1], self.shape[0], self.shape[2])
        assert q.dtype == self.dtypes[0]
        group = self.shape[0] // self.shape[1]
        for b in range(len(rows) - 1):
            slots = self.indices[keys[b] : keys[b + 1]].long()
            k, v = (one[slots, 0].repeat_interleave(group, 1).float() for one in paged_kv_cache)
            mine = slice(rows[b], rows[b + 1])
            scores = torch.einsum("qhd,khd->hqk", q[mine].float(), k) * self.scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            seen = self._seen(b, rows[b + 1] - rows[b], len(slots))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[mine] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out

    def _seen(self, b: int, count: int, keys: int) -> Tensor:
        behind = torch.arange(count)[:, None] + (keys - count) - torch.arange(keys)
        near = (behind <= self.window_left) | torch.tensor(self.window_left < 0)
        if self._custom_mask_buf is None:
            return near & ((behind >= 0) | torch.tensor(not self.causal))
        assert self._mask_indptr_buf is not None
        start = int(self._mask_indptr_buf[b])
        packed = self._custom_mask_buf[start : start + (count * keys + 7) // 8]
        bits = (packed[:, None] >> torch.arange(8)) & 1
        return bits.view(-1)[: count * keys].view(count, keys).bool()


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: None = None,
    ) -> None:
        assert use_tensor_cores
        starts = None
        if paged_kv_indptr_buffer is not None:
            starts = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            starts,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
            backend=backend,
        )

    def plan(  # type: ignore[override]
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **settings: Any,
    ) -> None:
        starts = torch.arange(len(indptr), dtype=torch.int32)
        shape = num_qo_heads, num_kv_heads, head_dim
        super().plan(starts, indptr, indices, last_page_len, *shape, page_size, **settings)
