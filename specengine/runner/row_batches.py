"""Batches of a forward that are made on the device alone."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ForwardMode
from specengine.core.rows import RowBatch
from specengine.core.tree import Tree
from specengine.kernels.delta.types import StatePaths
from specengine.kernels.kv.row_places import row_places
from specengine.runner.context import ForwardContext


class RowBatches:
    """What a runner makes of rows of the page table, in captures and beside them."""

    def __init__(self, runner: ForwardContext) -> None:
        self._runner = runner
        self._even: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def make(
        self, rows: RowBatch, tokens_BW: Tensor, offset: int = 0, tree: Tree | None = None
    ) -> ForwardBatch:
        """A planned forward over tokens_BW, int64 [B, W], made on the device alone: W new tokens of
        each request, `offset` positions after its committed ones. For a tree, the nodes in between
        are its past nodes: offset must equal tree.num_past."""
        B, W = tokens_BW.shape
        table = self._runner.page_table
        assert tree is None or tree.num_past == offset, "tree.num_past is the offset"
        depths_T = None if tree is None else tree.depths_T
        places = row_places(table, rows.rows_B, rows.lens_B, W, offset, depths_T)
        is_decode = W == 1 and tree is None
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.TARGET_VERIFY,
            batch_size=B,
            num_tokens=B * W,
            input_ids=tokens_BW.reshape(-1),
            positions=places.positions_T,
            out_cache_loc=places.slots_T,
            req_pool_indices=rows.rows_B,
            prefix_lens=rows.lens_B,
            extend_lens=self._even_lens(B, W)[0],
            seq_lens=places.seq_lens_B,
            qo_indptr=self._even_lens(B, W)[1],
            prefix_lens_cpu=[table.shape[1] - W] * B,  # upper bounds
            extend_lens_cpu=[W] * B,
            logits_rows=None,
            tree=tree,
            first_keys=self._runner.first_keys,
            compiles=self._runner.compile_max_bs >= B,
            **self._runner.batch_fields,
        )
        self._runner.attn_backend.init_forward_metadata_capture(batch)
        return batch

    def _even_lens(self, requests: int, width: int) -> tuple[Tensor, Tensor]:
        """extend_lens and qo_indptr of requests of one width. Cached: a function runs once before
        its capture, so the graph has no node for them."""
        key = (requests, width)
        if key not in self._even:
            lens = torch.full((requests,), width, dtype=torch.int64, device=self._runner.device)
            starts = torch.arange(0, requests * width + 1, width, device=self._runner.device)
            self._even[key] = lens, starts
        return self._even[key]


def keep_states(batch: ForwardBatch, accepted_B: Tensor, nodes_BW: Tensor | None = None) -> None:
    """Behind a forward of nodes: move recurrent state on to the last accepted one of each
    request. nodes_BW: int64, the accepted paths of trees. After a decode there is nothing to
    do: what it wrote is kept."""
    if batch.states is None or batch.forward_mode.is_decode():
        return
    width = batch.max_extend_len if nodes_BW is None else nodes_BW.shape[1]
    starts_B = batch.qo_indptr[:-1]
    paths = StatePaths(batch.req_pool_indices, starts_B, accepted_B, nodes_BW, width)
    batch.states.keep_paths(paths)
