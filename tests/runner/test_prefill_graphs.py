"""Which captured prefill serves a batch, and what it takes from the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.runner.fallbacks import (
    MEMORY_SPENT,
    MUCH_PADDING,
    NOT_CAPTURED,
    TOO_MANY_TOKENS,
    GraphStats,
)
from specengine.runner.forward_graphs.inputs import (
    PrefillInputs,
    num_prefill_inputs,
    pack_prefill,
)
from specengine.runner.forward_graphs.keys import (
    LARGE_PREFILLS,
    PREFILL_KEYS,
    SMALL_PREFILLS,
    WIDE_PREFILLS,
    PrefillKey,
)
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from specengine.runner.graph_cache import GraphCache
from specengine.runner.memory.graph_memory import GraphMemory


def prefill(extend_lens: list[int]) -> ModelWorkerBatch:
    ends = torch.tensor(extend_lens).cumsum(0)
    return ModelWorkerBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.arange(sum(extend_lens)) + 5,
        req_pool_indices=list(range(len(extend_lens), 0, -1)),
        prefix_lens=[10, *[0] * (len(extend_lens) - 1)],
        extend_lens=extend_lens,
        logits_rows=(ends - 1).tolist(),
        sampling=None,
    )


def without_a_gpu(splits: bool) -> PrefillGraphs:
    graphs = PrefillGraphs.__new__(PrefillGraphs)
    graphs.keys, graphs.cache = list(PREFILL_KEYS), GraphCache("prefill", GraphMemory())
    graphs.counters = graphs.cache.counters
    graphs.splits, graphs.lacks_memory = splits, False
    graphs.wanted = Counter()
    graphs.cache.captured |= dict.fromkeys(PREFILL_KEYS)  # type: ignore[arg-type]
    return graphs


def test_padding_tokens_belong_to_one_more_request() -> None:
    key = PrefillKey(8, 5, 8)
    values = torch.from_numpy(pack_prefill(prefill([2, 3]), key))
    inputs = PrefillInputs.of(values, key)
    assert inputs.tokens_T.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert inputs.requests_T.tolist() == [0, 0, 1, 1, 1, 5, 5, 5]
    assert inputs.positions_T.tolist() == [10, 11, 0, 1, 2, 0, 1, 2]
    assert inputs.rows.tolist() == [2, 1, 0, 0, 0, 0]
    assert inputs.seq_lens.tolist() == [12, 3, 0, 0, 0, 3]
    assert inputs.qo_indptr.tolist() == [0, 2, 5, 5, 5, 5, 8]
    assert inputs.logits_rows.tolist() == [1, 4, 0, 0, 0]
    assert len(values) == num_prefill_inputs(key)
    assert not any(one.storage_offset() % 2 for one in vars(inputs).values())


@pytest.mark.parametrize(
    ("extend_lens", "expected"),
    [
        ([300], PrefillKey(512, 8, 512)),
        ([30] * 8, PrefillKey(256, 8, 256)),
        ([30] * 9, PrefillKey(512, 64, 256)),
        ([30] * 64, PrefillKey(2048, 64, 256)),
        ([200] * 4, PrefillKey(1024, 64, 256)),
        ([513], PrefillKey(768, 8, 768)),
        ([1024], PrefillKey(1024, 8, 1024)),
        ([1025], PrefillKey(1536, 8, 1536)),
        ([10, 1600], PrefillKey(2048, 8, 2048)),
        ([2049], PrefillKey(3072, 8, 3072)),
        ([4096], PrefillKey(4096, 8, 4096)),
        ([4097], None),
        ([512] * 2, PrefillKey(1024, 8, 1024)),
        ([1024] * 2, PrefillKey(2048, 8, 2048)),
        ([300] * 9, None),
        ([30] * 65, None),
        ([257] * 3, PrefillKey(1024, 8, 1024)),
        ([257] * 4, PrefillKey(1536, 8, 1536)),
        ([257] * 8, PrefillKey(3072, 8, 3072)),
        ([513] * 8, None),
        ([1] * 64, PrefillKey(256, 64, 256)),
    ],
)
def test_first_key_that_fits_a_batch_is_chosen(
    extend_lens: list[int], expected: PrefillKey | None
) -> None:
    batch = prefill(extend_lens)
    found = next((key for key in PREFILL_KEYS if key.fits(batch)), None)
    assert found == expected


@pytest.mark.parametrize(
    ("extend_lens", "reason"),
    [
        ([30] * 64, None),
        ([2049], None),
        ([4096], None),
        ([4097], "more tokens than any captured"),
        ([250] * 9, "more tokens than any captured"),  # 64 requests have 2,048 together
        ([1] * 65, "more requests than captured"),
        ([257] + [1] * 8, "a longer prompt than any captured"),
    ],
)
def test_eager_prefill_counts_its_reason(extend_lens: list[int], reason: str | None) -> None:
    graphs = without_a_gpu(splits=False)
    batch = prefill(extend_lens)
    assert bool(graphs.parts_of(batch)) == (reason is None)
    every_row = replace(batch, logits_rows=None)
    assert graphs.parts_of(every_row) == []
    assert graphs.parts_of(replace(batch, forward_mode=ForwardMode.TARGET_VERIFY)) == []
    counted = GraphStats.of(graphs.counters).fallbacks
    assert set(counted) == {one for one in (reason, "logits of every token") if one is not None}


def keys_of(graphs: PrefillGraphs, count: int) -> list[int]:
    return [key.tokens for key, _ in graphs.parts_of(prefill([count]))]


def test_second_prefill_of_a_size_without_a_graph_captures_it() -> None:
    graphs = without_a_gpu(splits=False)
    for key in WIDE_PREFILLS:
        del graphs.cache.captured[key]
    assert keys_of(graphs, 1000) == []
    assert keys_of(graphs, 1100) == [], "another size"
    assert keys_of(graphs, 512) == [512]
    assert keys_of(graphs, 1024) == [1024]
    assert GraphStats.of(graphs.counters).fallbacks == {NOT_CAPTURED: 2}
    graphs.cache.memory.budget = 0
    assert keys_of(graphs, 1100) == []
    assert GraphStats.of(graphs.counters).fallbacks[MEMORY_SPENT] == 1


def test_prefill_runs_in_a_larger_graph_while_its_own_is_missing() -> None:
    graphs = without_a_gpu(splits=False)
    for key in WIDE_PREFILLS[:-2]:
        del graphs.cache.captured[key]
    assert keys_of(graphs, 1000) == [3072]
    assert keys_of(graphs, 1000) == [1024], "the second time it is captured"
    assert not GraphStats.of(graphs.counters).fallbacks


def test_prefill_with_more_padding_than_its_graph_gains_runs_eagerly() -> None:
    graphs = without_a_gpu(splits=False)
    narrow = WIDE_PREFILLS[3]._replace(padding=64)
    graphs.keys = [*SMALL_PREFILLS, narrow]
    graphs.cache.captured[narrow] = graphs.cache.captured[WIDE_PREFILLS[3]]
    assert keys_of(graphs, 2048) == keys_of(graphs, 1984) == [2048]
    assert keys_of(graphs, 1983) == keys_of(graphs, 2049) == []
    counted = GraphStats.of(graphs.counters).fallbacks
    assert counted == {MUCH_PADDING: 1, TOO_MANY_TOKENS: 1}


def test_graph_with_little_padding_is_captured_while_idle_alone_and_last() -> None:
    graphs = without_a_gpu(splits=False)
    narrow = WIDE_PREFILLS[3]._replace(padding=64)
    graphs.keys = [*SMALL_PREFILLS, *WIDE_PREFILLS[:2], narrow]
    for key in WIDE_PREFILLS:
        del graphs.cache.captured[key]
    assert [keys_of(graphs, 2048) for _ in range(3)] == [[]] * 3
    assert GraphStats.of(graphs.counters).fallbacks == {NOT_CAPTURED: 3}
    captured = [one.args[0].tokens for one in graphs.captures()]  # type: ignore[attr-defined]
    assert captured == [1024, 768, 2048]


def test_prefill_whose_key_lacked_memory_counts_that() -> None:
    graphs = without_a_gpu(splits=False)
    graphs.keys, graphs.lacks_memory = [LARGE_PREFILLS[-1]], True
    assert not graphs.parts_of(prefill([10]))
    assert GraphStats.of(graphs.counters).fallbacks == {MEMORY_SPENT: 1}


@pytest.mark.parametrize(
    ("extend_lens", "sizes"),
    [
        ([30] * 64, [(2048, 64)]),
        ([30] * 65, [(2048, 64), (32, 1)]),
        ([1] * 256, [(256, 64)] * 4),
        ([250] * 9 + [40], [(2048, 8), (512, 2)]),
        ([250] * 17, [(2048, 8), (2048, 8), (256, 1)]),  # no wide graph has so many
        ([30] * 64 + [257], []),
    ],
)
def test_large_prefill_is_split_by_tokens_and_requests(
    extend_lens: list[int], sizes: list[tuple[int, int]]
) -> None:
    graphs = without_a_gpu(splits=True)
    batch = prefill(extend_lens)
    found = graphs.parts_of(batch)
    assert [(key.tokens, part.batch_size) for key, part in found] == sizes
    assert bool(GraphStats.of(graphs.counters).fallbacks) == (not sizes)
    if found:
        parts = [part for _, part in found]
        assert torch.equal(torch.cat([part.input_ids for part in parts]), batch.input_ids)
        for name in ("req_pool_indices", "prefix_lens", "extend_lens"):
            assert [one for part in parts for one in getattr(part, name)] == getattr(batch, name)
        for part in parts:
            assert part.logits_rows == (torch.tensor(part.extend_lens).cumsum(0) - 1).tolist()


def test_prefill_is_split_by_small_keys_where_the_context_has_no_large_ones() -> None:
    graphs = without_a_gpu(splits=True)
    graphs.keys = [*SMALL_PREFILLS[:3]]  # of a context of 96 tokens
    found = graphs.parts_of(prefill([15] * 10))
    assert [(key.tokens, part.batch_size) for key, part in found] == [(64, 4), (64, 4), (32, 2)]


def test_split_prefill_with_more_logits_than_requests_runs_eagerly() -> None:
    """The prompt's own, of a single request, and none of the rest."""
    graphs = without_a_gpu(splits=True)
    batch = prefill([1] * 100 + [100])
    assert len(graphs.parts_of(batch)) == 2
    assert graphs.parts_of(replace(batch, logits_rows=[*range(100, 200)])) == []


def test_prefill_of_large_layers_is_not_split() -> None:
    """Their weights would be read once for each part."""
    graphs = without_a_gpu(splits=False)
    assert graphs.parts_of(prefill([30] * 65)) == []


@pytest.mark.parametrize("with_features", [False, True])
def test_outputs_of_parts_in_the_same_buffers_are_joined(
    with_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, batch = without_a_gpu(splits=True), prefill([30] * 190)
    logits, hidden, features = (torch.zeros(size, 1) for size in (64, 2048, 2048))

    def replay(key: PrefillKey, part: ModelWorkerBatch) -> LogitsOutput:
        assert part.logits_rows is not None
        assert part.sampling is None
        count, rows = part.num_tokens, len(part.logits_rows)
        hidden[:count, 0] = part.input_ids.float()
        logits[:rows, 0] = hidden[part.logits_rows, 0]
        features[:count] = -hidden[:count]
        seen = features[:count] if with_features else None
        return LogitsOutput(logits[:rows], hidden=hidden[:count], features=seen)

    monkeypatch.setattr(graphs, "replay", replay)
    whole = graphs.run(batch)
    assert whole is not None
    assert whole.hidden is not None
    assert whole.hidden[:, 0].tolist() == batch.input_ids.tolist()
    assert whole.logits[:, 0].tolist() == batch.input_ids[batch.logits_rows].tolist()
    assert (whole.features is not None) == with_features
    if whole.features is not None:
        assert torch.equal(whole.features, -whole.hidden)
    assert graphs.run(prefill([257] + [1] * 8)) is None


def test_padding_request_is_no_longer_than_the_width() -> None:
    for many in (False, True):
        for tokens in range(1, (LARGE_PREFILLS if many else SMALL_PREFILLS)[-1].tokens + 1):
            lens = [tokens // 64] * 64
            lens[0] += tokens - sum(lens)
            batch = prefill([one for one in lens if one] if many else [tokens])
            found = next((key for key in PREFILL_KEYS if key.fits(batch)), None)
            if found is not None:
                assert found.tokens - tokens <= found.width
