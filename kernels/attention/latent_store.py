"""What a token leaves for latent attention, written to its slot; and q rotated as it is."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.attention import latent_store_ref
from specengine.kernels.dispatch import Backend, use_triton


def latent_store(
    q: Tensor,
    compressed: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    has_pairs: bool,
    out: Tensor,
    cache: Tensor,
    loc: Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """For each token t::

        cos, sin = halves(cos_sin_cache[positions[t]])           # R / 2 values each
        for head in (*q[t], compressed[t, C:]):
            first, second = head[0::2], head[1::2] if has_pairs else halves(head)
            rotated = (first * cos - second * sin, second * cos + first * sin)   # in float32
        out[t] = rotated heads of q                              # halves, also where has_pairs
        cache[loc[t], 0] = (rms_norm(compressed[t, :C], weight, eps), rotated)

    q: [T, H, R]; out: the same shape, which may be q itself; compressed: [T, C + R]; weight: [C];
    the last dimensions contiguous; positions and loc: int64 [T]; cos_sin_cache: float32 [P, R], cos
    half then sin half; cache: [S, 1, C + R] of q's dtype, or float8_e4m3fn, to which values are
    rounded and clipped. Slots in loc are distinct, padding slot 0 excepted. Any device; one Triton
    kernel on CUDA.
    """
    given = q, compressed, weight, eps, positions, cos_sin_cache, has_pairs, out, cache, loc
    if use_triton(backend, q):
        from specengine.kernels.attention import latent_store_triton

        latent_store_triton.latent_store(*given)
        return
    latent_store_ref.latent_store(*given)
