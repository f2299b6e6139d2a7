"""Fused attention for some requests (CUDA C++) on a CPU, against PyTorch."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.kernels.attention import rope_attention_cuda
from specengine.kernels.attention.rope_attention import rope_attention
from specengine.kernels.attention.rope_ref import rotate
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.cuda import program
from specengine.kernels.precompile import precompile
from tests.halves import slow_but, thinned
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.rope_attention_cases import SCALE, Round, check, draw, each_key_counts


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_attention_cuda, "compiled", emulated)
    monkeypatch.setattr(rope_attention_cuda, "multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    "lens",
    [
        *([(0, 1)], [(1, 1)], [(15, 2)], [(16, 1)], [(17, 2)], [(37, 2)]),
        *([(290, 2), (16, 1)], [(160, 2), (0, 1), (5, 2)], [(1100, 1), (700, 2)]),
        *([(37, 4)], [(0, 3), (290, 4)], [(1100, 4), (20, 1)]),
    ],
    ids=str,
)
def test_few_rows_are_as_in_pytorch(lens: list[tuple[int, int]]) -> None:
    check(draw(lens))


def test_units_behind_a_warps_first_two_are_as_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 96 warps has three or four."""
    monkeypatch.setattr(rope_attention_cuda, "_cluster", lambda *_: 8)
    check(draw([(5200, 2)], (4, 1)))


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [(6, 16), (7, 8), (12, 8), (13, 4), (24, 4), (25, 2), (66, 2), (67, 1)],
)
def test_keys_are_shared_by_blocks_that_run_at_once(groups: int, blocks: int) -> None:
    assert rope_attention_cuda._cluster(groups, torch.device("cpu")) == blocks


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_any_number_of_blocks_is_as_in_pytorch(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope_attention_cuda, "_cluster", lambda *_: blocks)
    for new in (2, 4):
        check(draw([(290, new), (3, 1)]))


@pytest.mark.parametrize(
    ("heads", "queries"),
    [((3, 3), 4), ((1, 1), 8), ((3, 1), 2), ((8, 1), 1), ((1, 1), 16), ((3, 1), 5), ((8, 1), 2)],
    ids=str,
)
def test_groups_of_heads_are_as_in_pytorch(heads: tuple[int, int], queries: int) -> None:
    check(draw([(37, queries), (20, 1)], heads))


def test_norms_of_heads_are_as_in_pytorch() -> None:
    check(draw([(37, 1), (3, 4)], normed=True))
    check(draw([(70, 8)], (2, 2), normed=True))


def test_request_without_queries_gives_and_writes_nothing() -> None:
    """Whatever the bounds of the batch."""
    check(draw([(37, 1), (20, 0), (16, 1)], max_queries=2))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((0, 2), (1, 1), (15, 1), (16, 2), (17, 1), (64, 1)),
        *((290, 2), (1100, 2), (1400, 2), (5200, 1)),
    ],
)
def test_each_key_counts_once(old: int, new: int) -> None:
    given, expected = each_key_counts(old, new)
    torch.testing.assert_close(given.run("cuda").out.float(), expected, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("key", [0, 17, 150, 289])
def test_key_far_above_the_others_is_all_that_is_seen(key: int) -> None:
    """Whichever unit has it: the others' weights are 0, and nothing overflows."""
    given = draw([(290, 1)], (1, 1))
    query = rotate(given.projected[0].float(), given.batch.positions, given.cos_sin)[0]
    slots = given.batch.req_to_token[1, :290].long()
    given.k_cache[slots] = (-9 * query).to(given.k_cache.dtype)
    given.k_cache[slots[key]] = (9 * query[0]).to(given.k_cache.dtype)
    assert torch.equal(given.run("cuda").out[0], given.v_cache[slots[key]])


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    given = draw([(40, 1), (150, 2), (0, 1)], (4, 1))
    whole = given.run("cuda")
    for request, rows in enumerate([slice(0, 1), slice(1, 3), slice(3, 4)]):
        alone = given.only(request)
        assert torch.equal(alone.run("cuda").out, whole.out[rows])
        bound = replace(alone.batch, max_queries=rows.stop - rows.start)
        assert torch.equal(replace(alone, batch=bound).run("cuda").out, whole.out[rows])


@pytest.mark.parametrize(("blocks", "seeds"), thinned(2, [1, 2, 8], [range(1, 4), range(4, 7)]))
def test_bits_are_the_same_whatever_is_late(
    blocks: int, seeds: range, emulated: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps, lanes and copies are late by drawn times. A warp has up to three units. The lanes of
    an emulated warp meet where they load matrices, so that a missing __syncwarp does not show."""
    monkeypatch.setattr(rope_attention_cuda, "_cluster", lambda *_: blocks)
    given = draw([(500, 4), (33, 2)], (4, 1))
    expected = given.run("cuda")
    for seed in seeds:
        late = lambda *asked, seed=seed: replace(emulated(*asked), seed=seed)  # noqa: E731
        monkeypatch.setattr(rope_attention_cuda, "compiled", late)
        found = given.run("cuda")
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.k_cache.view(torch.int16), expected.k_cache.view(torch.int16))
        assert torch.equal(found.v_cache.view(torch.int16), expected.v_cache.view(torch.int16))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries of each launch; the CPU stands for an H200."""
    launched: list[int] = []
    launch = rope_attention_cuda.rope_attention

    def counted(*given: Any) -> torch.Tensor:
        launched.append(len(given[0]))
        return launch(*given)

    monkeypatch.setattr(rope_attention_cuda, "rope_attention", counted)
    monkeypatch.setattr(rope_attention_cuda, "has_dependent_launch", lambda q: True)
    monkeypatch.setattr(rope_attention_cuda, "has_much_shared", lambda q: True)
    monkeypatch.setattr(rope_attention_cuda, "has_whole_device", lambda: True)
    monkeypatch.setattr(program, "available", lambda: True)
    return launched


ROUNDS = [  # requests, queries, heads, whether it is taken
    *((1, 1, (32, 8), True), (1, 4, (32, 8), True), (2, 2, (64, 8), True)),
    *((16, 1, (32, 8), True), (17, 1, (32, 8), False)),
    *((16, 4, (32, 8), True), (17, 4, (32, 8), False)),
]


@pytest.mark.parametrize(
    ("requests", "queries", "heads", "takes_it"),
    slow_but(
        [case for case in ROUNDS if case[:2] not in ((1, 1), (16, 1))],
        ROUNDS,
    ),
)
def test_rounds_with_a_multiprocessor_for_each_block_take_it(
    requests: int, queries: int, heads: tuple[int, int], takes_it: bool, launches: list[int]
) -> None:
    check(draw([(9, queries)] * requests, heads), "auto")
    assert launches == [requests * queries] * takes_it


@pytest.mark.parametrize(("queries", "heads"), [(5, (32, 8)), (17, (8, 8))])
def test_more_than_sixteen_rows_do_not_take_it(
    queries: int, heads: tuple[int, int], launches: list[int]
) -> None:
    check(draw([(9, queries)], heads), "auto")
    assert launches == []


@pytest.mark.parametrize(("max_keys", "takes_it"), [(8448, True), (8449, False)])
def test_longer_contexts_do_not_take_it(max_keys: int, takes_it: bool, launches: list[int]) -> None:
    given = draw([(9, 1)], (32, 8))
    check(replace(given, batch=replace(given.batch, max_keys=max_keys)), "auto")
    assert launches == [1] * takes_it


@pytest.mark.parametrize(
    "lacking", ["has_dependent_launch", "has_much_shared", "has_whole_device", "available"]
)
def test_machine_without_the_means_does_not_take_it(
    lacking: str, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = program if lacking == "available" else rope_attention_cuda
    monkeypatch.setattr(owner, lacking, lambda *_: False)
    check(draw([(9, 1)], (32, 8)), "auto")
    assert launches == []


def test_precompiling_asks_for_its_form_and_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def binary(source: Path, defines: tuple[tuple[str, int], ...], _: int) -> bytes:
        asked.append(f"{source.name} for {dict(defines)['QUERIES']}")
        return b""

    monkeypatch.setattr(rope_attention_cuda, "compiled", program.compiled)
    monkeypatch.setattr(program, "_binary", binary)
    given = draw([(20, 2)])
    with precompile():
        outs = [given.run("cuda").out for _ in range(2)]
    assert asked == ["rope_attention.cu for 2"]
    assert not any(out.any() for out in outs)


def run(given: Round, **changed: Any) -> None:
    tensors = *given.projected, given.cos_sin, given.k_cache, given.v_cache, given.loc
    rope_attention(*tensors, given.batch, SCALE, norms=given.norms, backend="cuda", **changed)


@pytest.mark.parametrize(
    "changed", [{"window": 5}, {"softcap": 1.0}, {"sinks": torch.zeros(8)}], ids=str
)
def test_options_of_other_models_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="refuses"):
        run(draw([(3, 1)]), **changed)


@pytest.mark.parametrize("name", [one.name for one in fields(PagedBatch)])
def test_batch_is_refused_for_each_field_that_is_not_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that is new is one of these."""
    given = draw([(3, 1)])
    read = {"req_to_token", "req_pool_indices", "seq_lens", "qo_indptr", "positions", "max_queries"}
    other: dict[str, Any] = {"tree_mask": torch.ones(1, 1, 1).bool(), "num_past": 1}
    if name in read | {"max_keys", "counters"}:
        run(given)
        return
    given = replace(given, batch=replace(given.batch, **{name: other.get(name, torch.zeros(2))}))
    with pytest.raises(ValueError, match="refuses"):
        run(given)


def _wide_cache(given: Round) -> Round:
    return replace(given, k_cache=given.k_cache.float(), v_cache=given.v_cache.float())


def _wide_gains(given: Round) -> Round:
    gain = torch.ones(128)
    return replace(given, norms=HeadNorms(gain, gain, 0.1))


def _odd_gains(given: Round) -> Round:
    gain = torch.ones(129, dtype=given.qkv.dtype)[1:]
    return replace(given, norms=HeadNorms(gain, gain, 0.1))


def _half_rotated(given: Round) -> Round:
    return replace(given, cos_sin=given.cos_sin[:, :64].contiguous())


def _narrow_angles(given: Round) -> Round:
    return replace(given, cos_sin=given.cos_sin.half())


def _odd_rows(given: Round) -> Round:
    wide = torch.zeros(*given.qkv.shape[:2], 129, dtype=given.qkv.dtype)
    return replace(given, qkv=wide[:, :, 1:])


def _odd_cache(given: Round) -> Round:
    wide = torch.zeros(2, *given.k_cache.shape[:2], 132, dtype=given.qkv.dtype)
    return replace(given, k_cache=wide[0, :, :, :128], v_cache=wide[1, :, :, :128])


def _caches_of_two_kinds(given: Round) -> Round:
    wide = torch.zeros(*given.k_cache.shape[:2], 256, dtype=given.qkv.dtype)
    return replace(given, v_cache=wide[:, :, :128])


def _odd_angles(given: Round) -> Round:
    wide = torch.zeros(len(given.cos_sin), 129)
    return replace(given, cos_sin=wide[:, :128])


def _scattered_bounds(given: Round) -> Round:
    wide = torch.stack([given.batch.qo_indptr] * 2, 1)
    return replace(given, batch=replace(given.batch, qo_indptr=wide[:, 0]))


def _narrow_lengths(given: Round) -> Round:
    return replace(given, batch=replace(given.batch, seq_lens=given.batch.seq_lens.int()))


def _wide_table(given: Round) -> Round:
    return replace(given, batch=replace(given.batch, req_to_token=given.batch.req_to_token.long()))


def _scattered_table(given: Round) -> Round:
    wide = torch.stack([given.batch.req_to_token] * 2, -1)
    return replace(given, batch=replace(given.batch, req_to_token=wide[:, :, 0]))


def _wide_heads(given: Round) -> Round:
    qkv, caches = given.qkv.repeat(1, 1, 2), [given.k_cache, given.v_cache]
    k_cache, v_cache = (cache.repeat(1, 1, 2) for cache in caches)
    return replace(given, qkv=qkv, k_cache=k_cache, v_cache=v_cache)


@pytest.mark.parametrize(
    "change",
    [
        *(_wide_cache, _wide_gains, _half_rotated, _narrow_angles, _odd_rows, _odd_cache),
        *(_caches_of_two_kinds, _odd_angles, _scattered_bounds, _narrow_lengths),
        *(_wide_table, _wide_heads, _odd_gains, _scattered_table),
    ],
)
def test_tensors_of_another_kind_are_refused(change: Any) -> None:
    with pytest.raises(ValueError, match="refuses"):
        run(change(draw([(3, 1)])))


def test_round_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="refuses"):
        run(draw([(3, 0)], max_queries=1))


@pytest.mark.parametrize(("queries", "heads"), [(17, (1, 1)), (6, (3, 1)), (1, (17, 1))], ids=str)
def test_more_than_sixteen_rows_are_refused(queries: int, heads: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="refuses"):
        run(draw([(3, queries)], heads))
