"""FlashAttention's libraries are called by their own signatures: stand-ins with these, which
compute in PyTorch, give what the reference gives."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import kernels
from specengine.kernels.attention import flash_attention, flash_attention_ref
from specengine.kernels.attention.flash_merge import merge
from specengine.kernels.attention.types import FlashAttention, FlashKeys, FlashOutput

# As _vllm_fa3_C declares it in vLLM 0.24.0.
VLLM_SCHEMA = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v,
Tensor? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table,
Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin,
Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k)
-> Tensor[]"""

SINKS_TAKEN: list[Tensor | None] = []  # by the library, a call each


def compute(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """What either library makes of its arguments, under sglang-kernel's names."""
    assert k.shape[1] == v.shape[1] == 1
    left, right = given["window_size"]
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    for name in ("cache_seqlens", "page_table", "cu_seqlens_q"):
        assert given[name].dtype == torch.int32
    keys = FlashKeys(
        table=given["page_table"],
        rows=given["cache_batch_idx"],
        seq_lens=given["cache_seqlens"],
        qo_indptr=given["cu_seqlens_q"],
        max_queries=given["max_seqlen_q"],
        max_keys=given["page_table"].shape[1],
        causal=given["causal"],
    )
    SINKS_TAKEN.append(given["sinks"])
    window = None if left < 0 else left + 1
    scale = given["softmax_scale"]
    options = scale, window, given["softcap"] or None, given["sinks"]
    found = flash_attention_ref.flash_attention(q, k[:, 0], v[:, 0], keys, *options)
    return [found.out, found.lse]


@pytest.fixture
def vllm_library() -> Iterator[FlashAttention]:
    is_loaded = hasattr(torch.ops._vllm_fa3_C, "fwd")  # by another test, on a GPU
    kind = "IMPL" if is_loaded else "DEF"
    library = torch.library.Library("_vllm_fa3_C", kind)  # type: ignore[no-untyped-call]
    if not is_loaded:
        library.define(VLLM_SCHEMA.replace("\n", " "))  # type: ignore[no-untyped-call]

    def fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        names = [part.split()[-1].rstrip(")") for part in VLLM_SCHEMA.split(") ->")[0].split(",")]
        given = dict(zip([name.split("=")[0] for name in names[3:]], rest, strict=True))
        assert given["max_seqlen_k"] >= int(given["seqused_k"].max())
        renamed = {
            "window_size": (given["window_size_left"], given["window_size_right"]),
            "cache_seqlens": given["seqused_k"],
            "cache_batch_idx": given["kv_batch_idx"],
            "causal": given["is_causal"],
            "sinks": given["s_aux"],
        }
        return compute(q, k, v, given | renamed)

    library.impl("fwd", fwd, "CPU")  # type: ignore[no-untyped-call]
    from specengine.kernels.attention import flash_attention_vllm

    yield flash_attention_vllm.flash_attention
    library._destroy()  # type: ignore[no-untyped-call]


@pytest.fixture
def sgl_library(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    """With the arguments of sglang-kernel 0.4.4 that are used."""

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        return_softmax_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> list[Tensor]:
        given = dict(locals())
        assert return_softmax_lse
        return [*compute(q, k_cache, v_cache, given), torch.empty(0)]

    module = ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    # Where the real one is installed it may have been loaded, and stands again afterwards.
    name = "specengine.kernels.attention.flash_attention_sgl"
    monkeypatch.setattr(kernels, "flash_attention_sgl", None, raising=False)
    monkeypatch.delitem(sys.modules, name, raising=False)
    flash: FlashAttention = importlib.import_module(name).flash_attention
    del sys.modules[name]
    return flash


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("library", ["vllm_library", "sgl_library"])
def test_arguments_are_named_as_the_library_names_them(
    library: str,
    sinks: torch.dtype | None,
    window: int | None,
    softcap: float | None,
    request: pytest.FixtureRequest,
) -> None:
    flash: FlashAttention = request.getfixturevalue(library)
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 6, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    table = torch.randperm(39)[:30].view(3, 10).int() + 1
    for rows, causal in ((ints(2, 0), True), (None, window is not None)):
        used = table if rows is not None else table[:2]
        keys = FlashKeys(used, rows, ints(9, 4), ints(0, 3, 5), 3, 10, causal)
        added = None if sinks is None else torch.linspace(-1.0, 2.0, 6, dtype=sinks)
        options = 0.3, window, softcap, added
        found = flash(q, k, v, keys, *options)
        expected = flash_attention_ref.flash_attention(q, k, v, keys, *options)
        torch.testing.assert_close(found.out, expected.out)
        if sinks is None:
            torch.testing.assert_close(found.lse, expected.lse)
        assert SINKS_TAKEN.pop() is (added if sinks is torch.bfloat16 else None)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and flash_attention.is_installed()),
    reason="no CUDA device, or neither sglang-kernel nor vllm is installed",
)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 5000), (4, 5000), (700, 900)])
def test_sinks_of_long_prompts_on_a_gpu(
    num_queries: int, num_keys: int, window: int | None
) -> None:
    """Of few queries the keys are shared out among blocks; a sink counts once."""
    torch.manual_seed(0)
    to: Any = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(num_queries, 64, 64, **to)
    k, v = torch.randn(num_keys + 1, 8, 64, **to), torch.randn(num_keys + 1, 8, 64, **to)
    table = torch.randperm(num_keys)[None].int() + 1
    starts, counts = ints(0, num_queries), ints(num_keys)
    rest = (one.cuda() for one in (ints(0), counts, starts))
    keys = FlashKeys(table.cuda(), *rest, num_queries, num_keys, True)
    options = 0.125, window, None, torch.linspace(0.0, 9.0, 64, **to)
    found = flash_attention.load()(q, k, v, keys, *options)
    expected = flash_attention_ref.flash_attention(q, k, v, keys, *options)
    torch.testing.assert_close(found.out, expected.out, rtol=2e-2, atol=4e-3)


def test_two_parts_are_merged_to_the_whole() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(4, 6, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    table = torch.arange(24).view(2, 12).int()

    def part(first: int, counts: tuple[int, int]) -> FlashOutput:
        keys = FlashKeys(table[:, first:], None, ints(*counts), ints(0, 2, 4), 2, 12, False)
        return flash_attention_ref.flash_attention(q, k, v, keys, 0.3, None)

    merged = merge(part(0, (5, 5)), part(5, (7, 3)))
    whole = part(0, (12, 8))
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)


def test_vllms_build_is_found_without_importing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    library = folder / "_vllm_fa3_C.abi3.so"
    library.write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)  # not found, though it be installed
    flash_attention.vllm_library.cache_clear()
    flash_attention.load.cache_clear()
    try:
        assert flash_attention.vllm_library() == library
        with pytest.raises(ImportError, match="vllm: "):
            flash_attention.load()
    finally:
        flash_attention.vllm_library.cache_clear()
        flash_attention.load.cache_clear()
