"""Moves the KV of the accepted path of each tree to where a chain would have written it."""

from __future__ import annotations

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.kv import kv_move_ref
from specengine.kernels.kv.types import KVBuffers, KVPaths


def kv_move(buffers: KVBuffers, paths: KVPaths, *, backend: Backend = "auto") -> None:
    """Node i of a request has its KV in the slot of place lens[b] + i::

        for b in range(B):
            slots = req_to_token[rows[b], lens[b]:]
            for k in range(accepted[b] + 1):
                for buffer in buffers:
                    buffer[slots[k]] = buffer[slots[nodes[b, k]]]    # all read before any write

    Nothing is moved to or from places past the end of the table, nor in row 0. Slots of a token
    take a multiple of 4 bytes. Any device; one Triton kernel on CUDA.
    """
    if use_triton(backend, paths.nodes_BW):
        from specengine.kernels.kv import kv_move_triton

        kv_move_triton.kv_move(buffers, paths)
        return
    kv_move_ref.kv_move(buffers, paths)
