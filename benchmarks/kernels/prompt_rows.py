"""What a prompt's forward is made of, each operation by itself: products by rows and library,
FlashAttention 3 over pages of one slot and over keys that stand side by side, and the small kernels
by how they are launched. 8B shape.

    python benchmarks/kernels/prompt_rows.py --seconds 60
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch
import torch.nn.functional as F

H, INNER, HEADS, KV_HEADS, DIM, LAYERS = 4096, 14336, 32, 8, 128, 8
SHAPES = {
    "qkv": (H, (HEADS + 2 * KV_HEADS) * DIM),
    "out": (H, H),
    "gate_up": (H, 2 * INNER),
    "down": (INNER, H),
    "fc": (3 * H, H),
    "draft qkv": (2 * H, (HEADS + 2 * KV_HEADS) * DIM),
}
OF_LAYER = ("qkv", "out", "gate_up", "down")
ROWS = (512, 1024, 2048, 4096, 4224, 6144, 7900, 7936, 8192, 8448, 16384, 16896)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def microseconds(call: Callable[[], Any], least: float = 0.03) -> float:
    """The median of five, each of as many calls as take so many seconds in all."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def once(count: int) -> float:
        events[0].record()
        for _ in range(count):
            call()
        events[1].record()
        events[1].synchronize()
        return 1000 * events[0].elapsed_time(events[1]) / count

    count = max(1, min(200, int(least * 1e6 / 5 / once(3))))
    return sorted(once(count) for _ in range(5))[2]


def products(end: float) -> None:
    weights = {
        name: [random(out, inner, scale=0.02) for _ in range(LAYERS)]
        for name, (inner, out) in SHAPES.items()
    }
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for reduced in (True, False) if library == "cublas" else (True,):
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
            print(f"\n{library}, reduced-precision reduction {reduced}: TFLOP/s")
            print("rows  " + "".join(f"{name:>12}" for name in SHAPES) + "       layers")
            for rows in ROWS if reduced else (1024, 8192):
                if monotonic() > end:
                    return
                line = product_row(rows, weights)
                print(f"{rows:6}" + "".join(f"{one:12.0f}" for one in line), flush=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def product_row(rows: int, weights: dict[str, list[torch.Tensor]]) -> list[float]:
    inputs = {inner: random(rows, inner) for inner in {one[0] for one in SHAPES.values()}}
    found = []
    for name, (inner, out) in SHAPES.items():
        took = microseconds(lambda: F.linear(inputs[inner], weights[name][0]), 0.03)  # noqa: B023
        found.append(2e-6 * rows * inner * out / took)

    def layers() -> None:
        for layer in range(LAYERS):
            for name in OF_LAYER:
                F.linear(inputs[SHAPES[name][0]], weights[name][layer])

    work = sum(SHAPES[name][0] * SHAPES[name][1] for name in OF_LAYER) * LAYERS
    return [*found, 2e-6 * rows * work / microseconds(layers, 0.15)]


def in_pages(q: Any, k: Any, v: Any, table: Any, keys: Any) -> Any:
    """Of vLLM's build."""
    from specengine.kernels.attention.flash_attention_vllm import _UNUSED

    return torch.ops._vllm_fa3_C.fwd(
        q, k, v, cu_seqlens_q=keys.qo_indptr, seqused_k=keys.seq_lens,
        max_seqlen_q=keys.max_queries, max_seqlen_k=keys.max_keys, page_table=table,
        kv_batch_idx=None, softmax_scale=DIM**-0.5, is_causal=True, window_size_left=-1,
        window_size_right=-1, softcap=0.0, is_rotary_interleaved=False, num_splits=0,
        sm_margin=0, cp_world_size=1, cp_rank=0, **_UNUSED,
    )  # fmt: skip


def flash_calls() -> tuple[Any, Any]:
    """(the engine's function, a function of contiguous keys)."""
    from specengine.kernels.attention import flash_attention

    paged = flash_attention.load()
    if "sgl" in paged.__module__:
        varlen = importlib.import_module("sgl_kernel.flash_attn").flash_attn_varlen_func

        def contiguous(q: Any, k: Any, v: Any, starts: Any, most: int, **more: Any) -> Any:
            return varlen(q, k, v, starts, starts, most, most, causal=True, **more)
    else:
        from specengine.kernels.attention.flash_attention_vllm import _UNUSED

        unused = {k: v for k, v in _UNUSED.items() if k != "cu_seqlens_k"}

        def contiguous(q: Any, k: Any, v: Any, starts: Any, most: int, **more: Any) -> Any:
            return torch.ops._vllm_fa3_C.fwd(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, seqused_k=None,
                max_seqlen_q=most, max_seqlen_k=most, page_table=None, kv_batch_idx=None,
                softmax_scale=DIM**-0.5, is_causal=True, window_size_left=-1,
                window_size_right=-1, softcap=0.0, is_rotary_interleaved=False,
                num_splits=more.get("num_splits", 1), sm_margin=0, cp_world_size=1, cp_rank=0,
                **unused,
            )  # fmt: skip

    return paged, contiguous


def attention() -> None:
    from specengine.kernels.attention.types import FlashKeys

    paged, contiguous = flash_calls()
    print(f"\nattention, {paged.__module__}: us and TFLOP/s of a layer")
    cache = [random(20000, KV_HEADS, DIM) for _ in range(2)]
    table = torch.arange(1, 16385, device="cuda", dtype=torch.int32).repeat(4, 1)
    for lens in ((1024,), (7900,), (8192,), (4096, 4096), (1024,) * 8):
        rows = sum(lens)
        q = random(rows, HEADS, DIM)
        starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device="cuda").int()
        many = table[:1].repeat(len(lens), 1)
        keys = FlashKeys(
            table=many, rows=torch.arange(len(lens), device="cuda").int(),
            seq_lens=torch.tensor(lens, device="cuda").int(), qo_indptr=starts,
            max_queries=max(lens), max_keys=max(lens), causal=True,
        )  # fmt: skip
        work = sum(2 * n * n * HEADS * DIM for n in lens) * 1e-6
        first = paged(q, *cache, keys, DIM**-0.5, None, None).out
        took = microseconds(lambda: paged(q, *cache, keys, DIM**-0.5, None, None))  # noqa: B023
        print(f"{lens!s:>20} pages of one slot {took:8.1f} {work / took:6.0f}", flush=True)
        if len(lens) > 1:
            continue
        k, v = (one[1 : 1 + rows] for one in cache)
        pages = [one[: len(one) // 128 * 128].view(-1, 128, KV_HEADS, DIM) for one in cache]
        took = microseconds(lambda: in_pages(q, *pages, table[:1, : 1 + rows // 128] - 1, keys))  # noqa: B023
        print(f"{lens!s:>20} pages of 128      {took:8.1f} {work / took:6.0f}", flush=True)
        for more in ({}, {"num_splits": 1}):
            try:
                second = contiguous(q, k, v, starts, max(lens), **more)
                second = second[0] if isinstance(second, (tuple, list)) else second
                took = microseconds(lambda: contiguous(q, k, v, starts, max(lens), **more))  # noqa: B023
            except Exception as error:
                print(f"contiguous {more}: {error}"[:300])
                continue
            same = torch.equal(first, second)
            print(f"{lens!s:>20} side by side {more} {took:8.1f} {work / took:6.0f}, same {same}")


def small_kernels() -> None:
    import triton

    from specengine.kernels.attention import rope_triton
    from specengine.kernels.linear import activation_triton, norm_triton

    for rows in (1024, 7900, 8192):
        print(f"\nsmall kernels, {rows} rows: us and TB/s")
        x = [random(rows, H) for _ in range(4)]
        weight = random(H)
        for warps in (4, 8, 16):
            norm_triton._block = lambda hidden, warps=warps: (triton.next_power_of_2(hidden), warps)
            took = microseconds(lambda: norm_triton.fused_add_rms_norm(x[0], x[1], weight, 1e-5))  # noqa: B023
            print(f"add + norm, {warps} warps: {took:7.1f} {8e-6 * rows * H / took:5.2f}")
        gate_up = random(rows, 2 * INNER)
        out = torch.empty(rows, INNER, device="cuda", dtype=torch.bfloat16)
        kernel = activation_triton._act_and_mul_kernel
        for block in (512, 1024, 2048, 4096):
            for warps in (2, 4, 8):

                def run(block: int = block, warps: int = warps) -> None:
                    kernel[(rows, triton.cdiv(INNER, block))](  # noqa: B023
                        gate_up, out, None, None, gate_up.stride(0), INNER, ACT="silu",  # noqa: B023
                        ROUNDS=False, DEPENDENT=True, BLOCK=block, num_warps=warps,
                        launch_pdl=True,
                    )  # fmt: skip

                took = microseconds(run)
                name = f"silu * up, {block} columns, {warps} warps"
                print(f"{name}: {took:7.1f} {6e-6 * rows * INNER / took:5.2f}", flush=True)
        qkv = random(rows, (HEADS + 2 * KV_HEADS) * DIM)
        q, k, v = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        q, k, v = (one.view(rows, -1, DIM) for one in (q, k, v))
        places = torch.arange(rows, device="cuda")
        angles = torch.randn(8192, DIM, device="cuda")
        caches = [random(9000, KV_HEADS, DIM) for _ in range(2)]
        for heads in (4, 8, 16, 64):
            rope_triton._HEADS = heads
            took = microseconds(
                lambda: rope_triton.rope_store_kv(q, k, v, places, angles, *caches, places)  # noqa: B023
            )
            print(f"rope + store, {heads} heads: {took:7.1f} {4e-6 * qkv.numel() / took:5.2f}")
        took = microseconds(lambda: x[2].copy_(x[0]))  # noqa: B023
        print(f"copy: {took:7.1f} {4e-6 * rows * H / took:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of the products")
    args = parser.parse_args()
    with torch.inference_mode():
        for part in (attention, small_kernels):
            try:
                part()
            except Exception as error:
                print(f"{part.__name__}: {type(error).__name__}: {error}"[:2000], flush=True)
        products(monotonic() + args.seconds)


if __name__ == "__main__":
    main()
