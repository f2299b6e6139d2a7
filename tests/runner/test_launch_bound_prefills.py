"""Which models have graphs of which prefills: as far as launching takes the host longer than the
layers take the device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from specengine.core.config import ModelConfig
from specengine.core.parallel import Communicator, NoLink, split_over
from specengine.kernels.experts.formats.fp8 import FORMAT
from specengine.kernels.experts.packed import PackedExperts
from specengine.kernels.linear.quantised import Fp8Weight
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.experts import Experts
from specengine.layers.layer_spec import ExpertsSpec
from specengine.layers.linear import Linear, LMHead
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.sparse_mlp import SparseMLP
from specengine.runner.forward_graphs.keys import LARGE_PREFILLS, SMALL_PREFILLS
from specengine.runner.forward_graphs.prefill import prefill_keys
from specengine.runner.forward_graphs.splits import weights_per_layer, work_per_row
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.pretended_ranks import PretendedRanks


class Layered(nn.Module):
    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.embed = VocabEmbedding(100, size)
        self.head = LMHead(size, 40)
        self.rotary = RotaryEmbedding.from_config(LlamaConfig(hidden_size=8, num_attention_heads=1))
        self.layers = nn.ModuleList(Linear(size, 2 * size) for _ in range(num_layers))


def test_weights_per_layer_leave_out_the_vocabulary() -> None:
    assert weights_per_layer(Layered(8, 3)) == 8 * 16  # type: ignore[arg-type]


def test_weights_per_layer_count_quantised_ones_as_others() -> None:
    """They are no parameters: a large model would pass for a small one."""
    model = Layered(8, 1)
    packed = Linear(64, 96)
    packed.use_kernel(lambda x: x)
    spec = ExpertsSpec(num_experts=3, num_chosen=1, intermediate_size=32)
    experts = Experts(64, spec)
    before = 3 * 3 * 64 * 32
    model.layers = nn.ModuleList([packed, experts])
    assert weights_per_layer(model) == 64 * 96 + before  # type: ignore[arg-type]
    pack(experts)
    assert weights_per_layer(model) == 64 * 96 + before  # type: ignore[arg-type]


def shape_of(name: str, ranks: Communicator | None = None) -> nn.Module:
    """A built-in shape without memory, or one rank's part of it."""
    source = resolve_model(ModelConfig(model=name, load_format="dummy"))
    model_class = find_model_class(source.architectures)
    with torch.device("meta"), split_over(ranks or NoLink.communicator):
        model: nn.Module = model_class(source.hf_config)
    return model


def widest(model: nn.Module, ranks: Communicator = NoLink.communicator) -> int:
    keys = prefill_keys(model, ranks)  # type: ignore[arg-type]
    assert {*SMALL_PREFILLS, *LARGE_PREFILLS} <= {*keys}
    return max(key.width for key in keys if key.padding is None)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("smollm2-shape", 4096),
        ("llama-3.2-1b-shape", 2048),  # 4,096 would be under the bound of shorter ones
        ("llama-3.1-8b-shape", 1024),
        ("llama-3.1-70b-shape", 512),
        ("qwen3-30b-a3b-shape", 2048),  # 8 of 128 experts
        ("gpt-oss-20b-shape", 1024),  # 4 of 32, with biases
        ("deepseek-v2-lite-shape", 2048),  # 6 of 64 and two shared ones, a dense first layer
    ],
)
def test_prompts_have_graphs_as_far_as_their_launches_bound_them(name: str, tokens: int) -> None:
    assert widest(shape_of(name)) == tokens


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("llama-3.2-1b-shape", {}),
        ("gpt-oss-20b-shape", {1536: 48, 2048: 64}),
        ("llama-3.1-8b-shape", {1536: 48, 2048: 64}),
        ("llama-3.1-70b-shape", {}),
    ],
)
def test_chunks_have_graphs_with_little_padding_as_far_as_they_gain(
    name: str, padding: dict[int, int]
) -> None:
    keys = prefill_keys(shape_of(name))  # type: ignore[arg-type]
    assert {key.tokens: key.padding for key in keys if key.padding is not None} == padding


@pytest.mark.parametrize(
    ("weights", "tokens"),
    [
        (32 << 20, 4096),
        ((32 << 20) + 1, 3072),
        (42 << 20, 3072),
        (43 << 20, 2048),
        (128 << 20, 2048),
        ((128 << 20) + 1, 1536),
    ],
)
def test_prompts_above_2048_tokens_may_have_half_of_the_work(weights: int, tokens: int) -> None:
    model = Layered(1, 1)
    with torch.device("meta"):
        model.layers = nn.ModuleList([Linear(1, weights)])
    assert widest(model) == tokens


def test_rank_with_a_part_of_the_weights_captures_as_the_one_with_most() -> None:
    part = shape_of("llama-3.1-8b-shape", PretendedRanks(4))
    assert widest(part) == 2048
    work = round(work_per_row(part))  # type: ignore[arg-type]

    class Others(PretendedRanks):
        def greatest(self, numbers: Sequence[int]) -> list[int]:
            assert [*numbers] == [work]
            return [4 * one for one in numbers]

    assert widest(part, Others(4)) == 1024


def mixture(num_experts: int, num_chosen: int, shared: int = 0) -> SparseMLP:
    spec = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=32,
        shared_size=shared,
    )
    return SparseMLP(64, spec)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_chosen", [1, 3])
@pytest.mark.parametrize("shared", [0, 48])
def test_row_is_multiplied_with_chosen_experts_and_the_shared_one(
    is_packed: bool, num_chosen: int, shared: int
) -> None:
    one = 3 * 64 * 32
    model, sparse = Layered(8, 1), mixture(6, num_chosen, shared)
    if is_packed:
        pack(sparse.experts)
    model.layers = nn.ModuleList([Linear(64, 96), sparse])
    beside = 64 * 96 + 6 * 64 + 3 * 64 * shared
    assert weights_per_layer(model) == beside + 6 * one  # type: ignore[arg-type]
    assert work_per_row(model) == beside + 2 * num_chosen * one  # type: ignore[arg-type]


def pack(experts: Experts) -> None:
    gate_up, down = (
        PackedExperts.of(FORMAT, experts.count, (Fp8Weight.of(one) for one in each))
        for each in (torch.ones(experts.count, 64, 64), torch.ones(experts.count, 64, 32))
    )
    assert gate_up is not None
    assert down is not None
    experts.use_packed(gate_up, down)
