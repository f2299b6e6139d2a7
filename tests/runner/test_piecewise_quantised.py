"""A quantised model in pieces: of weights of 4 bits gate, up and their activation are one operation
of the trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.core.forward_mode import ForwardMode
from specengine.layers.quantization import linears
from specengine.runner.piecewise import forwards
from specengine.runner.piecewise.trace import Trace, trace
from tests.runner.test_piecewise_families import PROMPTS, forbid_choosing_kernels
from tests.support.families import save_small_model
from tests.support.piecewise import in_pieces, pieces_of
from tests.support.quantised import FORMATS, quantise_model
from tests.support.quantised_models import load
from tests.target.conftest import MiniRunner


@pytest.mark.parametrize(("form", "is_one"), [("awq", True), ("compressed fp8 rows", False)])
def test_quantised_weights_in_pieces_equal_their_eager_forward(
    form: str,
    is_one: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights stay quantised, as on a GPU."""
    source = save_small_model("llama", tmp_path / "source", 5, intermediate_size=128)
    pair = quantise_model(source, tmp_path, FORMATS[form])
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    model = load(pair.quantised)
    eager, cut = MiniRunner(model), MiniRunner(model)
    batch = eager.batch(ForwardMode.EXTEND, PROMPTS)
    with torch.inference_mode():
        expected = model(batch.input_ids, batch.positions, batch)
    names = Counter[str]()

    def counted(*given: Any) -> Trace:
        made = trace(*given)
        names.update(str(node.target) for node in made.graph.graph.nodes)
        return made

    with monkeypatch.context() as patch:
        forbid_choosing_kernels(patch)
        patch.setattr(forwards, "trace", counted)
        pieces = pieces_of(model, (15,))
    layers = model.num_layers
    assert names["specengine.module.default"] == 4 * layers  # qkv, o, gate and up, down
    assert names["specengine.act_and_mul.default"] == (0 if is_one else layers)
    found = in_pieces(pieces, cut.batch(ForwardMode.EXTEND, PROMPTS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
