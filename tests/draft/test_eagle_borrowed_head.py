"""A draft without a head of its own reads its rows of the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.layer import EagleForm
from specengine.draft.eagle.model import Eagle3Model
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.head import Head
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.linear import LMHead
from specengine.layers.linear_cpu import pack_linears
from tests.draft import eagle_checkpoints as checkpoints

VOCAB, SIZE, DRAFT_VOCAB = 320, 64, 5
IDS = torch.tensor([3, 4, 100, 101, 319])


def make_model(target: Path, folder: Path) -> Eagle3Model:
    checkpoint = EagleCheckpoint.read(str(checkpoints.eagle3(folder, target)))
    config: Any = checkpoint.layer_config(64)
    spec = LayerSpec.from_config(config)
    form = EagleForm(config, spec, VOCAB, DRAFT_VOCAB, feature_size=3 * SIZE)
    model = Eagle3Model(form)
    nn.init.ones_(model.norm.weight)
    model.set_target_ids(IDS - torch.arange(DRAFT_VOCAB))
    return model


@pytest.mark.parametrize("is_packed", [False, True])
def test_its_logits_are_the_targets_rows(
    is_packed: bool, small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Rows are cut out of a plain head; of one that is packed for a CPU, logits are chosen."""
    torch.manual_seed(0)
    model = make_model(small_models["llama"], tmp_path)
    head = LMHead(SIZE, VOCAB)
    weight = torch.randn(VOCAB, SIZE)
    head.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if is_packed:
        pack_linears(nn.ModuleList([head]), None)
    model.share(VocabEmbedding(VOCAB, SIZE), Head(head))
    states = torch.randn(7, SIZE)
    expected = model.norm(states) @ weight[IDS].T
    assert torch.allclose(model.head.logits(states), expected, atol=1e-5)
    cut = model.head.product.weight
    assert (cut is not None and len(cut) == DRAFT_VOCAB) != is_packed
