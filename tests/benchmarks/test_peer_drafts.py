"""What the peers' engines are asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_layering import ROOT

DRAFT = Path("/draft")


@pytest.fixture(params=["vllm", "sglang"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks/peers")
    return importlib.import_module(f"{request.param}_throughput")


def asked(script: ModuleType, algorithm: str) -> dict[str, Any]:
    draft = DRAFT if algorithm == "EAGLE3" else None
    found: dict[str, Any] = script._speculative(script.Spec(algorithm, 3, 2.5, draft))
    return found


def test_a_layer_of_the_model_drafts_where_mtp_is_asked_for(script: ModuleType) -> None:
    found = asked(script, "MTP")
    expected = {
        "vllm": {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.5,
        },
        "sglang": {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
    }
    assert found == expected[script.__name__.removesuffix("_throughput")]


def test_eagle3_has_a_draft_of_its_own_and_lookup_forces_nothing(script: ModuleType) -> None:
    eagle3, lookup = asked(script, "EAGLE3"), asked(script, "NGRAM")
    if script.__name__ == "vllm_throughput":
        assert (eagle3["method"], eagle3["model"]) == ("eagle3", str(DRAFT))
        assert eagle3["synthetic_acceptance_length"] == 2.5
        assert lookup["method"] == "ngram"
        assert not {"model", "synthetic_acceptance_length"} & lookup.keys()
    else:
        assert eagle3["speculative_algorithm"] == "EAGLE3"
        assert eagle3["speculative_draft_load_format"] == "auto"
        assert lookup == {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
