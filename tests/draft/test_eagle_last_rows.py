"""A prompt's pass through an EAGLE draft that computes what later rounds read, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine.draft.eagle.worker import EagleWorker
from specengine.layers.self_attention import SelfAttention
from specengine.runner.model_runner import ModelRunner
from tests.conftest import save_tokenizer
from tests.draft.test_eagle_drafts import FORMS, make, run
from tests.support.families import save_small_model
from tests.support.last_rows import count_last

LONG = ["0123456789" * 9, "The quick brown fox jumps over the lazy dog. " * 2, "x"]


def states_and_kv(form: str, target: Path, draft: Path, chunk: int) -> list[Tensor]:
    """What the drafter has of the prompts: states of their last rows, K and V of each layer."""
    llm = make(target, FORMS[form][0], draft, 1, chunked_prefill_size=chunk)
    run(llm, LONG, new_tokens=1)
    drafter = llm.engine.drafter
    assert isinstance(drafter, EagleWorker)
    pool = drafter.runner.pools.token_to_kv_pool
    layers = range(drafter.runner.model.num_layers)
    # Slot 0 is of padding; row 0 of the states is, too.
    kept = [one[1:] for layer in layers for one in pool.get_kv_buffer(layer)]
    return [drafter.states[1:], *kept]


@pytest.mark.parametrize("chunk", [-1, 100])
@pytest.mark.parametrize(
    "form", ["eagle", "eagle3", "eagle3.1", "speculators, three layers, one with a window"]
)
def test_pass_that_keeps_last_rows_leaves_the_states_and_kv_of_a_whole_one(
    form: str,
    chunk: int,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, calls = small_models["llama"], [0]
    draft = FORMS[form][1](tmp_path / "draft", target)
    attend_last = SelfAttention.attend_last

    def counted(self: SelfAttention, *given: Tensor) -> Tensor:
        calls[0] += 1
        return attend_last(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(SelfAttention, "attend_last", counted)
    narrow = states_and_kv(form, target, draft, chunk)
    assert calls[0] > 0
    calls[0] = 0
    monkeypatch.setattr(EagleWorker, "narrows", False)
    whole = states_and_kv(form, target, draft, chunk)
    assert calls[0] == 0
    for one, other in zip(narrow, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "layers", "leaves_out"),
    [("eagle", 3, False), ("eagle3", 3, False), ("eagle3", 4, True)],
    ids=["state", "last of 3 layers", "three of 4 layers"],
)
def test_target_computes_all_rows_for_a_draft_that_reads_its_last_layer(
    form: str, layers: int, leaves_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_small_model("llama", tmp_path / "target", 5, num_hidden_layers=layers)
    save_tokenizer(target)
    draft = FORMS[form][1](tmp_path / "draft", target)
    rows = count_last(monkeypatch)
    states, *kv = states_and_kv(form, target, draft, -1)
    assert rows == ([3] if leaves_out else [])
    monkeypatch.setattr(ModelRunner, "_leaves_rows_out", lambda *_: False)
    for one, other in zip([states, *kv], states_and_kv(form, target, draft, -1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(rows) == leaves_out
