"""Partials by block, which trees take in place of logits: their values, and when they are taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specengine.core.draft_picks import DraftEdits
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.layer import EagleForm
from specengine.draft.eagle.model import Eagle3Model, EagleModel
from specengine.draft.tree_rows import TreeRows
from specengine.kernels.head.head_topk_ref import partials_of
from specengine.kernels.head.types import BlockPartials
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.head import Head
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import LMHead
from tests.draft import eagle_checkpoints as checkpoints
from tests.draft.mtp_reading import add_mtp
from tests.draft.test_mtp_model import load_models
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.emulated_head import emulate_head, let_heads_take_it

VOCAB, SIZE, TOPK = 320, 64, 4
IDS = torch.tensor([3, 4, 100, 101, 200, 319])


@pytest.fixture
def _on_a_gpu(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU has the kernel itself")
    emulate_head(emulated, 3, monkeypatch)
    let_heads_take_it(monkeypatch)
    torch.manual_seed(0)


def head_of(rows: int, bias: bool = False) -> LMHead:
    head = LMHead(SIZE, rows, bias).to(torch.bfloat16)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return head


def eagle(
    kind: type[EagleModel],
    folder: Path,
    target: Path,
    head: LMHead,
    ids: Tensor | None,
    **has: bool,
) -> EagleModel:
    """That reads its rows of a target's head."""
    config: Any = EagleCheckpoint.read(str(checkpoints.eagle3(folder, target))).layer_config(64)
    draft_vocab = VOCAB if ids is None else len(ids)
    spec = LayerSpec.from_config(config)
    size = 3 * SIZE if kind is Eagle3Model else SIZE
    model = kind(EagleForm(config, spec, VOCAB, draft_vocab, feature_size=size, **has))
    if ids is not None:
        model.set_target_ids(ids - torch.arange(draft_vocab))
    model.to(torch.bfloat16)
    if kind is Eagle3Model:
        nn.init.normal_(model.get_parameter("norm.weight"), mean=2.0)
    model.share(VocabEmbedding(VOCAB, SIZE), Head(head))
    return model


def assert_same_logits(told: BlockPartials | None, logits: Tensor) -> None:
    assert told is not None
    near = {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(told.best()[1], logits.topk(TOPK).values, **near)  # type: ignore[arg-type]
    torch.testing.assert_close(told.log_sums(), logits.logsumexp(-1), **near)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize(
    ("kind", "has"),
    [(EagleModel, {}), (Eagle3Model, {}), (Eagle3Model, {"norm_output": True})],
    ids=["EAGLE", "EAGLE3", "EAGLE3, normed"],
)
def test_eagles(
    kind: type[EagleModel],
    has: dict[str, bool],
    ids: Tensor | None,
    small_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    model = eagle(kind, tmp_path, small_models["llama"], head_of(VOCAB), ids, **has)
    states = torch.randn(5, SIZE).bfloat16()
    assert_same_logits(model.head.top(states, TOPK), model.head.logits(states))
    best = model.head.logits(states).argmax(-1)
    assert torch.equal(model.head.best(states), best if ids is None else ids[best])


@pytest.mark.usefixtures("_on_a_gpu")
def test_a_head_that_cannot_be_cut(small_models: dict[str, Path], tmp_path: Path) -> None:
    head = head_of(VOCAB, bias=True)
    model = eagle(Eagle3Model, tmp_path, small_models["llama"], head, IDS)
    states = torch.randn(5, SIZE).bfloat16()
    assert model.head.top(states, TOPK) is None
    assert torch.equal(model.head.best(states), IDS[model.head.logits(states).argmax(-1)])


@pytest.mark.usefixtures("_on_a_gpu")
def test_mtp(small_models: dict[str, Path], tmp_path: Path) -> None:
    [model] = load_models(add_mtp(small_models["llama"], tmp_path, "deepseek"))
    model.head = Head(head_of(VOCAB))
    states = torch.randn(5, SIZE).bfloat16()
    assert_same_logits(model.head.top(states, TOPK), model.head.logits(states))


class Telling:
    """A head that may have partials by block, or nothing but logits."""

    def __init__(self, tells: bool) -> None:
        self.tells, self.asked = tells, list[str]()
        self.row_1V = torch.tensor([[0.0, 3.0, 1.0, 2.0]])

    def top(self, hidden: Tensor, topk: int) -> BlockPartials | None:
        self.asked.append("top")
        return partials_of(self.row_1V, topk, 2) if self.tells else None

    def logits(self, hidden: Tensor) -> Tensor:
        self.asked.append("logits")
        return self.row_1V.clone()


class Bias(DraftEdits):
    def apply(self, logits_TV: Tensor, target_ids: Tensor | None) -> Tensor:
        logits_TV[:, 0] += 10
        return logits_TV


@pytest.mark.parametrize(
    ("tells", "edits", "asked", "tokens"),
    [
        (True, None, ["top"], [1, 3]),
        (False, None, ["top", "logits"], [1, 3]),
        (True, Bias(), ["logits"], [0, 1]),
    ],
    ids=["partials", "logits", "edited"],
)
def test_what_trees_ask_for(
    tells: bool, edits: Bias | None, asked: list[str], tokens: list[int]
) -> None:
    model = Telling(tells)
    worker: Any = SimpleNamespace(
        runner=SimpleNamespace(model=SimpleNamespace(head=model), device=torch.device("cpu")),
        root_states=lambda rows: torch.zeros(1, 8),
        first_place=0,
        topk=2,
        max_nodes=3,
        is_static=False,
        target_ids=None,
    )
    rows: Any = SimpleNamespace(rows_B=torch.tensor([0]), roots_B=torch.tensor([7]))
    tree = TreeRows(worker, 1).draft(rows, 1, edits)
    assert tree.tokens_BN.tolist() == [[7, *tokens]]
    assert model.asked == asked
