"""Rounds of a request that has reached the end of its context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import SpecConfig
from specengine.core.batch import ForwardBatch
from specengine.core.rows import RowBatch
from specengine.runner.model_runner import ModelRunner
from tests.support.device_rounds import make_on_device
from tests.support.rounds import CONTEXT, MANY, ON_CPU, SAMPLED


@ON_CPU
def test_round_past_the_end_reads_slots_behind_the_last_row(
    folders: dict[str, tuple[Path, SpecConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched before the host knows that the request has ended, and its deepest draft looks
    for keys one place past the context's end."""
    folder, given = folders["STANDALONE"]
    flags = {"context_length": CONTEXT, "max_running_requests": 1, "disable_radix_cache": True}
    spec = replace(given, verify="sibling", draft_sampling=True)
    llm, _ = make_on_device("cpu", folder, spec, sizes=[1], **flags)
    table = llm.engine.parts.worker.runner.pools.req_to_token_pool.req_to_token
    (last_row, context), found = (len(table) - 1, table.shape[1]), []

    def new_row_batch(self: ModelRunner, rows: RowBatch, *given: Any, **more: Any) -> ForwardBatch:
        batch = planned(self, rows, *given, **more)
        if rows.rows_B.tolist() == [last_row]:
            found.append(int(batch.seq_lens[0]) - batch.num_tokens)
        return batch

    planned = ModelRunner.new_row_batch
    monkeypatch.setattr(ModelRunner, "new_row_batch", new_row_batch)
    llm.generate(MANY[1], replace(SAMPLED[2], max_tokens=None))
    past = max(found) - context
    assert past == 1, "no round went so far"
    behind = torch.empty(0, dtype=table.dtype)
    behind.set_(table.untyped_storage(), table.numel(), (past,))
    assert not behind.any()
