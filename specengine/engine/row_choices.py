"""How requests want their tokens chosen, on the device, where rounds fly without the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.random_streams import Stream
from specengine.core.request import Req
from specengine.core.sampling_batch import choice_words
from specengine.kernels.sample_rows import SHIFT, ChoiceTable, Places, sample_rows


class RowChoices:
    """Temperature, top-k, top-p, min-p and seed by row of the page table, written when a request
    comes to a row. The position in the output follows from the length that the round goes by."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.table = ChoiceTable.of(num_rows, device)
        self.vocab_size = vocab_size
        self._owners: list[Req | None] = [None] * num_rows

    def write(self, reqs: list[Req]) -> None:
        """Before the launch of a round of these requests."""
        new = [(_row(req), req) for req in reqs if self._owners[_row(req)] is not req]
        if not new:
            return
        words = choice_words([req for _, req in new], self.vocab_size)
        # A round's length leaves out its root, which is the last token.
        words[:, SHIFT] = [1 - len(req.prompt_ids) for _, req in new]
        packed = torch.from_numpy(np.column_stack([[row for row, _ in new], words]))
        device = self.table.words.device
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        self.table.words[packed[:, 0]] = packed[:, 1:]
        for row, req in new:
            self._owners[row] = req

    def tokens(self, logits_RV: Tensor, rows: RowBatch, depths_R: Tensor | None = None) -> Tensor:
        """int64 [R], as plain decoding would sample them; the logits are written over.

        depths_R: int64, of the node of each row below its root; None where they are chains.
        """
        nodes = len(logits_RV) // len(rows.rows_B)
        places = Places(rows.rows_B, rows.lens_B, nodes, depths_R)
        return sample_rows(logits_RV, self.table, places, int(Stream.SAMPLE), in_place=True)


def _row(req: Req) -> int:
    assert req.req_pool_idx is not None, f"{req.rid} has no row in the request pool"
    return req.req_pool_idx
