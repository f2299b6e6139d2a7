"""Layers that ranks share give what whole ones give; each rank has its part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.parallel import Cut, communicator, even_cut, head_cuts, split_over
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.experts import Experts
from specengine.layers.head import Head
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.linear import LMHead, RowParallelLinear
from specengine.layers.mlp import GatedMLP, PlainMLP
from specengine.layers.norm import PartNorm
from specengine.layers.rotary import RotaryEmbedding
from specengine.layers.self_attention import SelfAttention
from specengine.layers.sparse_mlp import SparseMLP
from specengine.layers.weights import (
    CutPlace,
    fill_places,
    module_places,
    unpacked,
    weight_places,
)
from specengine.runner.loader.dummy import fill_with_random
from specengine.target.models.llama import LlamaForCausalLM
from tests.support.pretended_ranks import PretendedRanks, on_threads

SIZES = (1, 2, 3, 4)


def cuts_of(size: int, make: Callable[[], Cut]) -> list[Cut]:
    found = []
    for rank in range(size):
        with split_over(PretendedRanks(size, rank)):
            found.append(make())
    return found


def covers(cuts: list[Cut], whole: int) -> bool:
    """One after the other, nothing twice and nothing left out."""
    ends = [0, *(cut.stop for cut in cuts)]
    starts = [cut.start for cut in cuts]
    return starts == ends[:-1] and ends[-1] == whole and all(a < b for a, b in pairwise(ends))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("whole", [64, 112, 1536, 11008, 13])
def test_parts_cover_the_whole(size: int, whole: int) -> None:
    cuts = cuts_of(size, lambda: even_cut(whole, "features"))
    assert covers(cuts, whole)
    sizes = {cut.size for cut in cuts}
    assert max(sizes) - min(sizes) <= (0 if whole % size == 0 else 64 if whole % 64 == 0 else 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(9, 3, 2), (9, 3, 3), (32, 8, 2), (32, 8, 4), (4, 2, 4), (14, 2, 4), (5, 1, 3), (8, 8, 3)],
)
def test_ranks_have_heads_beside_the_keys_that_they_read(
    heads: int, kv_heads: int, size: int
) -> None:
    each = heads // kv_heads
    found = [head_cuts_of(size, rank, heads, kv_heads) for rank in range(size)]
    assert covers([q for q, _ in found], heads)
    for q, kv in found:
        assert {head // each for head in range(q.start, q.stop)} == {*range(kv.start, kv.stop)}
        assert q.size % kv.size == 0


def head_cuts_of(size: int, rank: int, heads: int, kv_heads: int) -> tuple[Cut, Cut]:
    with split_over(PretendedRanks(size, rank)):
        cuts = head_cuts(heads, kv_heads)
    return cuts.q, cuts.kv


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 3), (4, 2, 8), (9, 3, 5), (1, 1, 2)]
)
def test_heads_that_cannot_be_shared_are_refused(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"--tp-size {size}: {heads} heads"):
        head_cuts_of(size, 0, heads, kv_heads)


def test_vocabulary_smaller_than_its_ranks_is_refused() -> None:
    with split_over(PretendedRanks(4)):
        with pytest.raises(ConfigError, match="a vocabulary of 5 tokens"):
            VocabEmbedding(5, 8)
        with pytest.raises(ConfigError, match="3 features are fewer than ranks"):
            even_cut(3, "features")


def fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    for kind, parameter in module.named_parameters(recurse=False):
        (place,) = module_places(module, kind, parameter)
        fill_places({kind: place}, [(kind, weights[kind])], "test")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_layer_adds_up_and_has_its_bias_once(size: int, bias: bool) -> None:
    torch.manual_seed(0)
    weights = {"weight": torch.randn(12, 26), "bias": torch.randn(12)}
    x = torch.randn(5, 26)

    def run() -> Tensor:
        part = even_cut(26, "features")
        layer = RowParallelLinear(26, 12, bias, part)
        fill(layer, weights)
        out: Tensor = layer.parts(x[:, part.start : part.stop])
        return out

    expected = x @ weights["weight"].T + (weights["bias"] if bias else 0)
    for found in on_threads(size, run):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", SIZES)
def test_shared_feed_forward_is_the_whole_one(size: int) -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(28, 16), torch.randn(28, 16), torch.randn(16, 28)
    x = torch.randn(3, 16)

    def run() -> Tensor:
        mlp = GatedMLP(16, 28)
        halves = module_places(mlp.gate_up_proj, "weight", mlp.gate_up_proj.plain)
        names = dict(zip(("gate", "up"), halves, strict=True))
        fill_places(names, [("gate", gate), ("up", up)], "test")
        fill(mlp.down_proj, {"weight": down})
        out: Tensor = mlp(x)
        return out

    expected = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    for found in on_threads(size, run):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", SIZES)
def test_shared_plain_feed_forward_is_the_whole_one(size: int) -> None:
    torch.manual_seed(0)
    up = {"weight": torch.randn(28, 16), "bias": torch.randn(28)}
    down = {"weight": torch.randn(16, 28), "bias": torch.randn(16)}
    x = torch.randn(3, 16)

    def run() -> Tensor:
        mlp = PlainMLP(16, 28, True, "silu")
        fill(mlp.up_proj, up)
        fill(mlp.down_proj, down)
        out: Tensor = mlp(x)
        return out

    inner = nn.functional.silu(x @ up["weight"].T + up["bias"])
    for found in on_threads(size, run):
        torch.testing.assert_close(found, inner @ down["weight"].T + down["bias"])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (4, 2, 4), (9, 3, 2)])
def test_norm_over_all_heads_is_that_of_whole_rows(heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(0)
    weights = torch.rand(heads * 8), torch.rand(kv_heads * 8)
    rows = torch.randn(3, heads * 8), torch.randn(3, kv_heads * 8)
    config = LlamaConfig(
        hidden_size=heads * 8, num_attention_heads=heads, num_key_value_heads=kv_heads
    )

    def run() -> list[tuple[Tensor, Cut]]:
        spec = LayerSpec.from_config(
            config, qk_norm_whole=True, qkv_bias=False, o_bias=False, mlp_bias=False
        )
        layer = SelfAttention(spec, 0, RotaryEmbedding.from_config(config))
        norms = layer.q_norm, layer.k_norm
        cuts = [one.times(8) for one in (layer.heads.q, layer.heads.kv)]
        assert isinstance(norms[0], PartNorm)
        assert isinstance(norms[1], PartNorm)
        for norm, weight in zip(norms, weights, strict=True):
            fill(norm, {"weight": weight})
        parts = [row[:, cut.start : cut.stop] for row, cut in zip(rows, cuts, strict=True)]
        found = layer._normed_over_ranks(parts[0], norms[0], parts[1], norms[1])
        return list(zip(found, cuts, strict=True))

    for pairs in on_threads(size, run):
        for (found, cut), row, weight in zip(pairs, rows, weights, strict=True):
            expected = nn.functional.rms_norm(row, weight.shape, weight, config.rms_norm_eps)
            torch.testing.assert_close(found, expected[:, cut.start : cut.stop])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (4, 2, 4), (9, 3, 2)])
def test_heads_with_gains_of_their_own_are_normed_alike(
    heads: int, kv_heads: int, size: int
) -> None:
    torch.manual_seed(0)
    counts = heads, kv_heads
    gains = [torch.rand(count, 8) for count in counts]
    rows = [torch.randn(3, count * 8) for count in counts]
    config = LlamaConfig(
        hidden_size=heads * 8, num_attention_heads=heads, num_key_value_heads=kv_heads
    )

    def run() -> list[tuple[Tensor, Cut]]:
        spec = LayerSpec.from_config(config, norm="layer", qk_norm_by_head=True)
        layer = SelfAttention(spec, 0, RotaryEmbedding.from_config(config))
        found = []
        for norm, cut, gain, row in zip(
            (layer.q_norm, layer.k_norm), (layer.heads.q, layer.heads.kv), gains, rows, strict=True
        ):
            assert norm is not None
            fill(norm, {"weight": gain})
            wide = cut.times(8)
            found.append((norm.of_heads(row[:, wide.start : wide.stop]), wide))
        return found

    for pairs in on_threads(size, run):
        for (found, cut), row, gain in zip(pairs, rows, gains, strict=True):
            expected = nn.functional.layer_norm(row.view(3, -1, 8), (8,), eps=config.rms_norm_eps)
            whole = (expected * gain).view(row.shape)
            torch.testing.assert_close(found, whole[:, cut.start : cut.stop])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [False, True])
def test_shared_experts_are_the_whole_ones(size: int, shared: bool) -> None:
    """Dummy weights are the same on any number of ranks."""
    torch.manual_seed(0)
    x = torch.randn(7, 16)
    more = {"shared_size": 12, "shared_gate": True} if shared else {"expert_bias": True}
    spec = ExpertsSpec(num_experts=6, num_chosen=2, intermediate_size=20, **more)

    def run() -> Tensor:
        model = nn.ModuleDict({"mlp": SparseMLP(16, spec)})
        fill_with_random(model, seed=3, std=0.4)
        out: Tensor = model["mlp"](x)
        return out

    (expected,) = on_threads(1, run)
    assert expected.abs().max() > 0.1
    for found in on_threads(size, run):
        torch.testing.assert_close(found, expected)


def test_expert_tensors_of_checkpoints_are_cut() -> None:
    torch.manual_seed(0)
    spec = ExpertsSpec(num_experts=2, num_chosen=1, intermediate_size=10, expert_bias=True)
    shapes = {"gate_proj": (10, 6), "up_proj": (10, 6), "down_proj": (6, 10)}
    weights = {
        f"mlp.experts.{expert}.{name}.{kind}": torch.randn(shape if kind == "weight" else shape[:1])
        for expert in range(2)
        for name, shape in shapes.items()
        for kind in ("weight", "bias")
    }

    def run() -> Experts:
        model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts(6, spec)})})
        fill_places(weight_places(model, {}), weights.items(), "test")
        found: Experts = model["mlp"]["experts"]
        return found

    for rank, found in enumerate(on_threads(2, run)):
        own = slice(5 * rank, 5 * rank + 5)
        for expert in range(2):
            named = {k.removeprefix(f"mlp.experts.{expert}."): v for k, v in weights.items()}
            gate, up = (named[f"{one}_proj.weight"][own] for one in ("gate", "up"))
            assert torch.equal(found.weights.gate_up[expert], torch.cat([gate, up]))
            assert torch.equal(found.weights.down[expert], named["down_proj.weight"][:, own])
            bias = named["down_proj.bias"] * (rank == 0)
            assert torch.equal(found.weights.down_bias[expert], bias)


def test_merged_tensors_of_checkpoints_are_cut_too() -> None:
    torch.manual_seed(0)
    whole = torch.randn(80, 36)

    def run() -> tuple[Tensor, Cut]:
        mlp = nn.ModuleDict({"mlp": GatedMLP(36, 40)})
        packed = {"gate_up_proj": ("gate_proj", "up_proj")}
        places = weight_places(mlp, packed)
        weights = [("mlp.gate_up_proj.weight", whole), ("mlp.down_proj.weight", torch.ones(36, 40))]
        fill_places(places, unpacked(mlp, weights, packed), "test")
        return mlp["mlp"].gate_up_proj.plain, even_cut(40, "features")

    for found, cut in on_threads(2, run):
        parts = [half[cut.start : cut.stop] for half in whole.split(40)]
        assert torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [12, 13, 40])
def test_shared_vocabulary_is_the_whole_one(size: int, vocab: int) -> None:
    """Bit for bit: weights of few values, so that many logits are equal, and the first must win."""
    torch.manual_seed(vocab)
    rows = torch.randint(-2, 3, (vocab, 8)).float()
    hidden, ids = torch.randint(-2, 3, (30, 8)).float(), torch.arange(vocab)

    def run() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        embedding, product = VocabEmbedding(vocab, 8), LMHead(8, vocab)
        fill(embedding, {"weight": rows})
        product.tie(embedding.weight)
        head = Head(product)
        top = head.top(hidden, 3)
        if communicator().size == 1:
            assert top is None
            logits = head.logits(hidden)
            best = logits.topk(3).values, logits.logsumexp(-1)
        else:
            assert top is not None
            columns, values = top.best()
            assert torch.equal(head.logits(hidden).gather(1, columns), values)
            best = values, top.log_sums()
        return embedding(ids), head.logits(hidden), head.best(hidden), *best

    logits = hidden @ rows.T
    for embedded, found, best, values, sums in on_threads(size, run):
        assert torch.equal(embedded, rows)
        assert torch.equal(found, logits)
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(values, logits.topk(3).values)
        torch.testing.assert_close(sums, logits.logsumexp(-1))


@pytest.mark.parametrize("size", [2, 4])
def test_draft_reads_its_own_tokens_from_a_shared_head(size: int) -> None:
    torch.manual_seed(0)
    rows, hidden, ids = torch.randn(20, 8), torch.randn(6, 8), torch.tensor([3, 19, 4, 11])

    def run() -> tuple[Tensor, Tensor]:
        product = LMHead(8, 20)
        fill(product, {"weight": rows})
        head = Head(product).for_draft(ids=ids)
        return head.logits(hidden), head.best(hidden)

    logits = (hidden @ rows.T)[:, ids]
    for found, best in on_threads(size, run):
        torch.testing.assert_close(found, logits)
        assert torch.equal(best, ids[logits.argmax(-1)])


CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=36,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=64,
    attention_bias=True,
)


def test_dummy_weights_are_the_same_whatever_shares_them() -> None:
    def run() -> dict[str, tuple[Tensor, Cut | None]]:
        model = LlamaForCausalLM(CONFIG)
        fill_with_random(model, seed=3)
        found = {}
        for path, module in model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                for index, place in enumerate(module_places(module, kind, parameter)):
                    cut = place.cut if isinstance(place, CutPlace) else None
                    tensor = place.tensor if isinstance(place, CutPlace) else place
                    found[f"{path}.{kind}.{index}"] = tensor, cut
        return found

    (whole,) = on_threads(1, run)
    assert float(whole["model.layers.0.self_attn.qkv_proj.weight.0"][0].std()) > 0.01
    for size in (2, 3):
        for parts in on_threads(size, run):
            assert parts.keys() == whole.keys()
            for name, (tensor, cut) in parts.items():
                expected = whole[name][0]
                if cut is not None and cut.size:
                    expected = expected.narrow(cut.dim, cut.start, cut.size)
                assert torch.equal(tensor, expected), name


def test_tensor_of_the_wrong_shape_is_refused_by_its_whole_shape() -> None:
    with split_over(PretendedRanks(2)):
        layer = RowParallelLinear(26, 12, part=even_cut(26, "features"))
    with pytest.raises(ModelLoadError, match=r"shape \[12, 13\], the model needs \[12, 26\]"):
        fill(layer, {"weight": torch.zeros(12, 13)})
