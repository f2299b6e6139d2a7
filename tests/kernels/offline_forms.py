"""Triton kernels in the forms that models of published sizes launch on an H100, compiled for it;
for a process of its own. Prints, a form each: kernel, constants, bytes of shared memory, bytes of
local memory a thread (what does not fit in registers), and whether it writes over what a running
product still reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from specengine.kernels.attention import (
    latent_attention_triton,
    latent_store_triton,
    paged_attention_triton,
    rope_attention,
    rope_attention_blocks,
    rope_attention_triton,
    rope_triton,
)
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.delta import delta_decode_triton, delta_prompt_triton, delta_rule_triton
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaWeights,
    NodeBatch,
    PromptBatch,
    Save,
    StatePaths,
)
from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.experts import (
    experts_triton,
    order_triton,
    packed_triton,
    route_triton,
    tiles,
)
from specengine.kernels.experts.packed import PackedExpertWeights
from specengine.kernels.experts.types import Chosen, ExpertWeights, Router, Routing
from specengine.kernels.kv import kv_move_triton
from specengine.kernels.kv.types import KVBuffers, KVPaths
from specengine.memory.state_pool import StatePool, StateShape, StateSizes
from tests.kernels import offline_triton, wgmma_waits
from tests.kernels.offline_packed_experts import FORMS, HIDDEN, INNER, stacked

FP8 = torch.float8_e4m3fn
SLOTS, CONTEXT = 16, 4096
# Requests, queries of each, query and KV heads, keys, and whether the queries are a tree.
BATCHES = (
    *((1, 1, 32, 8, 4096, False), (32, 1, 32, 8, 4096, False), (256, 1, 32, 8, 4096, False)),
    *((2, 5, 9, 3, 1024, False), (4, 512, 32, 8, 4096, False), (1, 300, 28, 4, 2048, False)),
    *((1, 8, 32, 8, 4096, True), (16, 8, 32, 8, 4096, True), (1, 64, 16, 16, 4096, True)),
)
QWEN3_NEXT = DeltaShape(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, conv_width=4)
Run = Callable[[], object]


def integers(*size: int) -> Tensor:
    return torch.ones(*size, dtype=torch.int64)


def paged(requests: int, queries: int, keys: int, tree: bool) -> PagedBatch:
    mask = torch.zeros(requests, queries, queries, dtype=torch.bool) if tree else None
    return PagedBatch(
        req_to_token=torch.zeros(requests + 1, CONTEXT, dtype=torch.int32),
        req_pool_indices=integers(requests),
        seq_lens=integers(requests) * keys,
        qo_indptr=torch.arange(requests + 1) * queries,
        positions=integers(requests * queries),
        max_queries=queries,
        max_keys=keys,
        tree_mask=mask,
        counters=torch.zeros(4096, dtype=torch.int32),
    )


def attention(head: int, dtype: torch.dtype) -> Iterator[Run]:
    """Of heads of this size: paged and fused attention, and what writes K and V."""
    kept = (dtype, FP8) if dtype != torch.float32 else (dtype,)
    for cache_dtype, (requests, queries, heads, kv_heads, keys, tree) in product(kept, BATCHES):
        tokens = requests * queries
        q, k = (torch.zeros(tokens, n, head, dtype=dtype) for n in (heads, kv_heads))
        cache = torch.zeros(SLOTS, kv_heads, head).to(cache_dtype)
        angles, loc = torch.zeros(CONTEXT, head), integers(tokens)
        batch = paged(requests, queries, keys, tree)
        norms = HeadNorms(*torch.zeros(2, head, dtype=dtype), 0.1)
        given = q, k, k, angles, cache, cache, loc, batch, 0.1, None, None, None
        yield lambda given=given: paged_attention_triton.paged_attention(
            given[0], given[4], given[5], given[7], 0.1, None, None, None, None
        )
        if rope_attention.has_registers(queries, heads // kv_heads, head):
            for one in (None, norms) if head <= rope_attention.MOST_NORMED else (None,):
                more = one, None
                yield lambda given=given, more=more: rope_attention_triton.rope_attention(
                    *given, *more
                )
        yield lambda given=given: rope_triton.rope_store_kv(
            *given[:3], given[7].positions, *given[3:7]
        )
        yield lambda given=given: rope_triton.rotate_heads(*given[:2], given[7].positions, given[3])


def latents(dtype: torch.dtype) -> Iterator[Run]:
    """Of DeepSeek-V2 and V3."""
    cases = ((1, 1, False), (64, 1, False), (8, 4, True), (1, 64, False))
    for kept, heads, (requests, queries, tree) in product((dtype, FP8), (16, 128), cases):
        q = torch.zeros(requests * queries, heads, 576, dtype=dtype)
        cache = torch.zeros(SLOTS, 1, 576).to(kept)
        given = q, cache, 512, paged(requests, queries, CONTEXT, tree), 0.1, None
        yield lambda given=given: latent_attention_triton.latent_attention(*given)
        new, loc = torch.zeros(len(q), 576, dtype=dtype), integers(len(q))
        angles, gain, part = torch.zeros(CONTEXT, 64), torch.zeros(512, dtype=dtype), q[..., 512:]
        stored = part, new, gain, 1e-6, loc, angles, True, part, cache, loc
        yield lambda stored=stored: latent_store_triton.latent_store(*stored)


def experts(dtype: torch.dtype) -> Iterator[Run]:
    """In all tiles, few rows with few and with many experts."""
    for count, chosen, few in ((8, 2, (1, 64)), (512, 10, (1, 64))):
        one = torch.zeros(1, dtype=dtype)
        weights = ExpertWeights(one.expand(count, 512, 512), one.expand(count, 512, 256))
        kinds = [(rows, None) for rows in few]
        kinds += [(64, tile) for _, tile in tiles.WHOLE.few]
        kinds += [(100, tile) for _, tile in tiles.WHOLE.many]
        for rows, tile in kinds:
            picked = Chosen(torch.zeros(rows, chosen, dtype=torch.int32), torch.zeros(rows, chosen))
            given = torch.zeros(rows, 512, dtype=dtype), picked, weights, tile
            yield lambda given=given: experts_triton.experts(*given)

    for count, hidden in ((512, 2048), (128, 2048), (32, 2880)):
        router = Router(torch.zeros(count, hidden, dtype=dtype))
        for rows in (3, 64, 600):
            given = torch.zeros(rows, hidden, dtype=dtype), router, Routing(4)
            yield lambda given=given: route_triton.route(*given)


def packed_experts(dtype: torch.dtype) -> Iterator[Run]:
    """In all tiles."""
    for form in FORMS:
        weights = PackedExpertWeights(
            stacked(form, 2 * INNER, HIDDEN), stacked(form, HIDDEN, INNER)
        )
        for rows, tile in ((1, None), *((100, tile) for _, tile in weights.down.format.tiles.many)):
            picked = Chosen(torch.zeros(rows, 2, dtype=torch.int32), torch.zeros(rows, 2))
            given = torch.zeros(rows, HIDDEN, dtype=dtype), picked, weights, tile
            yield lambda given=given: experts_triton.experts(*given)


def delta(dtype: torch.dtype) -> Iterator[Run]:
    """Of Qwen3-Next: prompts, and up to the most nodes that a round verifies."""
    shape = QWEN3_NEXT
    pool = StatePool(StateShape((0, 1), shape, dtype), StateSizes(3, 0, 128), torch.device("cpu"))
    weights = DeltaWeights(
        torch.zeros(shape.channels, 4, dtype=dtype), *torch.zeros(2, shape.num_heads)
    )
    states, updates = ([getattr(pool, one)(i) for i in (0, 1)] for one in ("state", "updates"))
    sizes = [shape.channels, shape.num_heads, shape.num_heads]
    for saves in ((), (Save(0, 1, 2),)):
        prompts = PromptBatch(integers(2), [3, 5], [0, 4], saves)
        given = DeltaInputs(*torch.zeros(8, sum(sizes), dtype=dtype).split(sizes, -1))
        taken = given, weights, states[0], prompts, shape
        yield lambda taken=taken: delta_prompt_triton.extend(*taken)
    for width, tree in ((1, False), (5, False), (16, True), (64, True)):
        given = DeltaInputs(*torch.zeros(2 * width, sum(sizes), dtype=dtype).split(sizes, -1))
        mask = torch.zeros(2, width, width, dtype=torch.bool) if tree else None
        nodes = NodeBatch(integers(2), torch.arange(3) * width, width, mask)
        all_of = given, weights, states[0], updates[0], nodes, shape
        yield lambda all_of=all_of: delta_rule_triton.verify(*all_of)
        if width == 1:
            alone = given, weights, states[0], nodes, shape
            yield lambda alone=alone: delta_decode_triton.decode(*alone)
    for width in (0, 5, 64):
        paths = integers(2, width) if width else None
        kept = StatePaths(integers(2), integers(2), integers(2), paths, width or 3)
        yield lambda kept=kept: delta_rule_triton.keep(states, updates, kept, shape)


def moves(dtype: torch.dtype) -> Iterator[Run]:
    """Of K and V along paths of up to 32 nodes."""
    for (heads, head), width in product(((8, 128), (32, 128), (1, 576), (4, 80)), (2, 9, 32)):
        buffers = KVBuffers.of([torch.zeros(SLOTS, heads, head, dtype=dtype)])
        table = torch.zeros(3, CONTEXT, dtype=torch.int32)
        paths = KVPaths(table, integers(2), integers(2), integers(2, width), integers(2))
        yield lambda buffers=buffers, paths=paths: kv_move_triton.kv_move(buffers, paths)


GROUPS: dict[str, Callable[[torch.dtype], Iterator[Run]]] = {
    "latents": latents,
    "experts": experts,
    "packed experts": packed_experts,
    "delta": delta,
    "moves": moves,
}


def local_bytes(cubin: bytes) -> int:
    """Of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(Path(knobs.nvidia.cuobjdump.path)), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1])


def main(group: str, dtype_name: str) -> None:
    """group: of GROUPS, or a size of heads."""
    offline_triton.use()
    launch, seen = JITFunction.run, dict[str, tuple[str, str, int, int, bool]]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        if made.hash not in seen:
            cubin, name = made.asm["cubin"], kernel.__name__
            wrong = bool(wgmma_waits.overwritten(cubin)) if "wgmma" in made.asm["ptx"] else False
            form = ", ".join(f"{key}={value}" for key, value in kwargs.items())
            seen[made.hash] = name, form, made.metadata.shared, local_bytes(cubin), wrong
        return made

    JITFunction.run = compile_only
    for module in (experts_triton, order_triton, packed_triton, paged_attention_triton):
        module.has_dependent_launch = lambda _: True
    for module in (rope_attention_triton, latent_attention_triton, latent_store_triton):
        module.has_dependent_launch = lambda _: True
    rope_triton.has_dependent_launch = route_triton.has_dependent_launch = lambda _: True
    for module in (paged_attention_triton, rope_attention_blocks, latent_attention_triton):
        module.multiprocessors = lambda _: 132
    delta_decode_triton.has_dependent_launch = lambda _: True
    rope_attention_triton.shared_bytes = lambda _: MOST_SHARED
    dtype = getattr(torch, dtype_name)
    for run in GROUPS[group](dtype) if group in GROUPS else attention(int(group), dtype):
        run()
    print(json.dumps([*seen.values()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
