"""Long prompts in graphs, with FlashAttention, give what eager forwards with dense attention give,
of a dense model and of a mixture of experts; with all rows of the last layer, and without those
that nothing reads.

On a GPU whole sizes and real graphs; on a CPU a sixteenth of them, functions and the plain kernel.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.config import ModelConfig
from specengine.core.interfaces import LogitsOutput
from specengine.kernels.attention import flash_attention, flash_attention_ref
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention import mixed_backend
from specengine.runner.attention.flash_backend import FlashPlan
from specengine.runner.attention.mixed_backend import MixedAttentionBackend
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.forward_graphs import prefill
from specengine.runner.forward_graphs.keys import WIDE_PREFILLS, PrefillKey
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.runner.memory.kv_shape import kv_shape_of
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.target.registry import find_model_class
from tests.device import DEVICE
from tests.support.cpu_graphs import use_functions

ON_GPU = DEVICE.type == "cuda"
SCALE = 1 if ON_GPU else 16
CONTEXT = 6144 // SCALE
KEYS = tuple(PrefillKey(k.tokens // SCALE, k.requests, k.width // SCALE) for k in WIDE_PREFILLS)
# (prefix, new tokens) of each request, and the tokens of the graph that serves them.
BATCHES = {
    "a prompt with padding": ([(0, 704)], 768),
    "a prompt that fills its graph": ([(0, 1024)], 1024),
    "a prompt behind a long prefix": ([(2048, 912)], 1024),
    "several, of which one has a prefix": ([(0, 528), (320, 448)], 1024),
    "one token beside a long prompt": ([(96, SCALE), (0, 1200), (0, SCALE)], 1536),
    "two wide ones": ([(0, 1024), (0, 992)], 2048),
    "as many as a graph has": ([(64 * i, 128) for i in range(8)], 1024),
    "one that nearly fills the largest": ([(0, 4080)], 4096),
    "long ones together, one behind a prefix": ([(1024, 2048), (0, 640)], 3072),
}
FAMILIES = ("llama", "qwen3moe")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(
    family: str, small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> nn.Module:
    folder = tmp_path_factory.mktemp("long-prefills") / family
    shutil.copytree(small_models[family], folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    if "num_experts_per_tok" in config:  # of all: near ties would fall either way
        config["num_experts_per_tok"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    source = resolve_model(ModelConfig(model=str(folder)))
    return load_model(source, find_model_class, torch.float16, DEVICE)


@pytest.fixture(
    params=[(True, (0, 1)), (False, (0, 1)), (False, (0, 2))],
    ids=["states are read", "no states are read", "the last layer is read"],
)
def graphs(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> prefill.PrefillGraphs:
    """With features of two layers, as EAGLE-3 reads them."""
    if not ON_GPU:
        use_functions(monkeypatch)
        monkeypatch.setattr(mixed_backend, "_LEAST_CAPTURED", 48)
    monkeypatch.setattr(prefill, "MANY_ROWS", prefill.MANY_ROWS // SCALE)
    monkeypatch.setattr(prefill, "PREFILL_KEYS", KEYS)
    monkeypatch.setattr(prefill, "WIDE_PREFILLS", KEYS)
    has_library = ON_GPU and flash_attention.is_installed()
    flash = flash_attention.load() if has_library else flash_attention_ref.flash_attention
    if ON_GPU and not has_library:
        pytest.skip("neither sglang-kernel nor vllm is installed")
    rows = ReqToTokenPool(9, CONTEXT, DEVICE)
    shape = kv_shape_of([model], torch.float16)  # type: ignore[list-item]
    kv = MHATokenToKVPool(9 * CONTEXT, shape, DEVICE)
    slots = torch.randperm(8 * CONTEXT).numpy().astype("int32") + 1
    for i in range(8):
        row = rows.alloc()
        assert row is not None
        rows.write(row, 0, slots[i * CONTEXT : (i + 1) * CONTEXT])
    rows.flush()
    backend = MixedAttentionBackend(DEVICE, flash)
    pools = MemoryPools(rows, kv)  # type: ignore[arg-type]
    reads_hidden, layers = request.param
    runner = ModelRunner(model, DEVICE, pools, backend, feature_layers=layers)  # type: ignore[arg-type]
    runner.reads_hidden = reads_hidden
    made = prefill.PrefillGraphs(runner)
    made.capture()
    assert not made.cache.captured, "all keys are wide"
    for capture in made.captures():
        capture()
    assert [key.tokens for key in made.cache.captured] == [key.tokens for key in KEYS[::-1]]
    return made


def extend(lens: list[tuple[int, int]], seed: int) -> ModelWorkerBatch:
    prefixes, counts = [prefix for prefix, _ in lens], [count for _, count in lens]
    generator = torch.Generator().manual_seed(seed)
    return ModelWorkerBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.randint(1, 256, (sum(counts),), generator=generator),
        req_pool_indices=[*range(1, len(lens) + 1)],
        prefix_lens=prefixes,
        extend_lens=counts,
        logits_rows=(torch.tensor(counts).cumsum(0) - 1).tolist(),
        sampling=None,
    )


def test_graphs_give_what_eager_forwards_give(graphs: prefill.PrefillGraphs) -> None:
    """One graph after the other over the same buffers, so that each finds what others left."""
    runner = graphs.context
    assert isinstance(runner, ModelRunner)
    dense = TorchAttentionBackend()
    for seed, (name, (lens, tokens)) in enumerate(BATCHES.items()):
        lens = [(prefix // SCALE, count // SCALE) for prefix, count in lens]
        before = [(0, prefix) for prefix, _ in lens]
        if cached := [pair for pair in before if pair[1]]:
            rows = [row for row, (_, prefix) in enumerate(before, 1) if prefix]
            batch = extend(cached, 100 + seed)
            batch.req_pool_indices[:] = rows
            eager(runner, batch, dense)
        batch = extend(lens, seed)
        [(key, _)] = graphs.parts_of(batch)
        assert key.tokens == tokens // SCALE, name
        assert isinstance(plan_of(graphs, key), FlashPlan)
        expected = eager(runner, batch, dense)
        for layer in range(3):
            written = runner.pools.token_to_kv_pool.get_kv_buffer(layer)[0]
            written[slots_of(runner, batch)] = 0
        with torch.inference_mode():
            found = graphs.run(batch)
        assert found is not None
        for part in ("logits", "hidden", "features"):
            actual, wanted = getattr(found, part), getattr(expected, part)
            if part == "hidden" and not runner.reads_hidden and 2 not in runner.feature_layers:
                actual, wanted = actual[: len(lens)], wanted[batch.logits_rows]
            torch.testing.assert_close(
                actual,
                wanted,
                rtol=2e-2,
                atol=2e-2,
                msg=lambda said, at=(name, part): f"{at} {said}",
            )
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1)), name


def eager(
    runner: ModelRunner, batch: ModelWorkerBatch, dense: TorchAttentionBackend
) -> LogitsOutput:
    with torch.inference_mode():
        on_device = runner.new_forward_batch(batch, dense)
        dense.init_forward_metadata(on_device)
        return runner.forward(on_device, skip_attn_backend_init=True)


def plan_of(graphs: prefill.PrefillGraphs, key: PrefillKey) -> object:
    plan = graphs.cache.captured[key].buffers.batch.attn_plan
    assert plan is not None
    return plan.metadata


def slots_of(runner: ModelRunner, batch: ModelWorkerBatch) -> torch.Tensor:
    table = runner.page_table
    each = zip(batch.req_pool_indices, batch.prefix_lens, batch.extend_lens, strict=True)
    return torch.cat([table[row, start : start + count] for row, start, count in each]).long()
