// Rows that are rounded to FP8 where they are made: scale[r] = max_k |made[r, k]| / 448, and
// codes[r, k] = made[r, k] / scale[r].
//
// Compile-time: TYPE, MAKES (of the four below), CLUSTER (blocks that share a row), WARPS (of a block), PIECES
// (of eight values, of a thread; one of norms, whose rows have a block each).
//
// The operations and the order of sums are those of norm_triton.py, activation_triton.py and
// round_triton.py, so that the bits are. A warp tells its sum or its maximum once, to all blocks of the row, and
// each warp adds up for itself: one barrier for either. What it tells other blocks it sends to their barriers: a
// barrier of the cluster would first wait until all that a thread has stored is in memory.
//
// The kernel behind may start at once: a product, which fetches its weight meanwhile.

#include "ptx.cuh"
#include "shared_sums.cuh"

#define AS_IT_IS 0     // x
#define ACTIVATED 1    // silu(gate) up, x being [gate | up]
#define NORMED 2       // the norm of x
#define ADDED_NORMED 3 // the norm of x + residual, which is stored, too

#define THREADS (32 * WARPS)
#define PIECE 8
#define IS_NORM (MAKES == NORMED || MAKES == ADDED_NORMED)
#define HAS_OTHER (MAKES == ACTIVATED || MAKES == ADDED_NORMED)
#define ALL 0xffffffffu

typedef unsigned char u8;

// Of all blocks of the row; each thread gets it. told: a word of each of their warps. barrier: expects these.
__device__ __forceinline__ float largest_of_row(float mine, u32* told, u32 barrier) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 most = __reduce_max_sync(ALL, __float_as_uint(mine));  // of numbers that are not negative
#if CLUSTER > 1
  wait_for_cluster();  // all blocks have prepared their barriers
  if (lane < CLUSTER) send_to_block(told + blockIdx.x % CLUSTER * WARPS + warp, lane, most, barrier);
  wait_at(barrier, 0);
#else
  if (lane == 0) told[warp] = most;
  __syncthreads();
#endif
  most = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER * WARPS; i += 32)
    if (i + lane < CLUSTER * WARPS) most = max(most, told[i + lane]);
  return __uint_as_float(__reduce_max_sync(ALL, most));
}

// Of the block, whose warps are a power of 2. told: a word of each.
__device__ __forceinline__ float sum_of_row(float sum, float* told) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL, sum, distance));
  if (threadIdx.x % 32 == 0) told[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = told[threadIdx.x % WARPS];
#pragma unroll
  for (int distance = WARPS / 2; distance > 0; distance /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL, sum, distance));
  return sum;
}

__device__ __forceinline__ float half_at(uint4 v, int k) {
  const u32 pair = k < 2 ? v.x : k < 4 ? v.y : k < 6 ? v.z : v.w;
  return widen((u16)(k % 2 ? pair >> 16 : pair));
}

// As Triton divides, of b that are 1 or more.
__device__ __forceinline__ float divide(float a, float b) {
  const float part = b > 8.507059173e37f ? 0.25f : 1.f;  // 2^126
  return __fmul_rn(__fmul_rn(a, part), reciprocal(__fmul_rn(b, part)));
}

__device__ __forceinline__ u32 silu_pair(u32 pair) {
  float of[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float v = widen((u16)(i ? pair >> 16 : pair));
    of[i] = divide(v, __fadd_rn(power_of_2(__fmul_rn(-v, 1.4426950408889634f)), 1.f));
  }
  return pack(of[0], of[1]);
}

__device__ __forceinline__ uint4 multiply_eight(uint4 a, uint4 b) {
  return {multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z),
          multiply_pairs(a.w, b.w)};
}

__device__ __forceinline__ u32 scaled_pair(u32 pair, float scale) {
  return pack(__fmul_rn(scale, widen((u16)pair)), __fmul_rn(scale, widen((u16)(pair >> 16))));
}

__device__ __forceinline__ uint4 normed(uint4 v, uint4 gains, int columns, float eps, float* told) {
  float sum = __fmul_rn(half_at(v, 1), half_at(v, 1));
  sum = fmaf(half_at(v, 0), half_at(v, 0), sum);
#pragma unroll
  for (int k = 2; k < PIECE; k++) sum = fmaf(half_at(v, k), half_at(v, k), sum);
  // Triton's compiler, too, rounds the mean and its sum with eps once.
  const float scale = rsqrtf(fmaf(sum_of_row(sum, told), reciprocal((float)columns), eps));
  return multiply_eight(gains, {scaled_pair(v.x, scale), scaled_pair(v.y, scale), scaled_pair(v.z, scale),
                                scaled_pair(v.w, scale)});
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) rounded_rows(
    const u16* x, const u16* residual, const u16* gain, u16* out, u16* total, u8* codes, float* scales,
    int stride_x, int stride_residual, int columns, float eps) {
  extern __shared__ __align__(16) u64 shared[];
  u32* told = (u32*)(shared + 1);
  const u32 barrier = (u32)__cvta_generic_to_shared(shared);
  const int block = blockIdx.x % CLUSTER;
  const u64 row = blockIdx.x / CLUSTER;
  uint4 made[PIECES], other[PIECES], gains = {};
  int place[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; i++)
    place[i] = ((block * PIECES + i) * THREADS + (int)threadIdx.x) * PIECE;

#if CLUSTER > 1
  if (threadIdx.x == 0) {
    prepare_barrier(barrier, 1);
    show_barriers();
    expect_bytes(barrier, 4 * CLUSTER * WARPS);
  }
  arrive_in_cluster();
#endif
  allow_next_kernel();
  if (IS_NORM) gains = load_fresh_if(place[0] < columns, gain + place[0]);
  x = computed_now(x + row * stride_x + place[0]);
  const u16* beside = MAKES == ACTIVATED ? x + columns : residual + row * stride_residual + place[0];
  if (HAS_OTHER) beside = computed_now(beside);
  wait_for_last_kernel();
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int behind = i * THREADS * PIECE;
    made[i] = load_fresh_if(place[i] < columns, x + behind);
    if (HAS_OTHER) other[i] = load_fresh_if(place[i] < columns, beside + behind);
  }

  if (MAKES == ADDED_NORMED) {
    const uint4 v = made[0], r = other[0];
    made[0] = {add_pairs(v.x, r.x), add_pairs(v.y, r.y), add_pairs(v.z, r.z), add_pairs(v.w, r.w)};
    if (place[0] < columns) *(uint4*)(total + row * columns + place[0]) = made[0];
  }
  if (IS_NORM) made[0] = normed(made[0], gains, columns, eps, (float*)(told + WARPS));
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    if (MAKES == ACTIVATED)
      made[i] = multiply_eight(other[i], {silu_pair(made[i].x), silu_pair(made[i].y),
                                          silu_pair(made[i].z), silu_pair(made[i].w)});
    if (MAKES != AS_IT_IS && place[i] < columns) *(uint4*)(out + row * columns + place[i]) = made[i];
#pragma unroll
    for (int k = 0; k < PIECE; k++) most = fmaxf(most, fabsf(half_at(made[i], k)));
  }

  // Triton's compiler, too, divides by a constant so.
  const float scale = fmaxf(__fmul_rn(largest_of_row(most, told, barrier), 1.f / 448.f), 1e-12f);
  if (block == 0 && threadIdx.x == 0) scales[row] = scale;
  const float by = reciprocal(scale);
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    float v[PIECE];
#pragma unroll
    for (int k = 0; k < PIECE; k++)  // what is no number gets the lowest code
      v[k] = fmaxf(__fmul_rn(half_at(made[i], k), by), -448.f);
    if (place[i] < columns)
      *(uint2*)(codes + row * columns + place[i]) = make_uint2(codes_of_four(v[0], v[1], v[2], v[3]),
                                                               codes_of_four(v[4], v[5], v[6], v[7]));
  }
}
