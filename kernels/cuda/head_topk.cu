// The largest logits of each row, and what its log-sum-exp is made of, by block: of the outputs that
// block s has seen, keys[r, s, k] tells the k-th largest logit and which output it is (0: there are not so
// many), sums[r, s] the largest and sum(exp(logit - largest)). Logits are those of norm(x) w^T.
//
// Compile-time: those of head_stream.cuh, and TURNS (tiles that a warp takes at most).
//
// Logits are not written to memory. They are rounded as a product would round them, and a block keeps its
// own in shared memory; when it has all of them, each warp looks through those of a row.

#include "head_stream.cuh"

#define KEPT (WARPS * TURNS * TILE)  // logits of a row
#define KEPT_PITCH (KEPT + 4)  // an odd number of 8 bytes: a tile's 8 rows go to banks of their own
#define OF_LANE (KEPT / 32)
#define NOTHING 0  // below every logit that is kept
#define MINUS_INFINITY __uint_as_float(0xff800000)

// Half precision as an integer that orders as values do; those of -0 and 0 are one.
__device__ __forceinline__ u16 kept_of(float logit) {
  const u16 bits = narrow(logit + 0.f);
  return bits & 0x8000 ? ~bits : bits | 0x8000;
}

__device__ __forceinline__ float value_of(u16 kept) {
  return widen(kept & 0x8000 ? kept & 0x7fff : ~kept);
}

// Which output a place of the block is.
__device__ __forceinline__ int output_at(int place) {
  return (place / TILE * gridDim.x + blockIdx.x) * TILE + place % TILE;
}

// What this warp finds in one row. topk: at most 32, a lane each.
__device__ __forceinline__ void look_through(const u16* kept, u64* keys, float* sums, int num_outs,
                                             int topk) {
  const int lane = threadIdx.x & 31;
  u32 mine[OF_LANE];  // of equals the first is the largest
  u32 most = NOTHING;
#pragma unroll
  for (int i = 0; i < OF_LANE; i++) {
    const int place = i * 32 + lane;
    const bool exists = output_at(place) < num_outs;
    mine[i] = exists ? (u32)kept[place] << 16 | (0xffff - place) : NOTHING;
    most = max(most, mine[i]);
  }
  most = __reduce_max_sync(0xffffffff, most);
  const float largest = most == NOTHING ? MINUS_INFINITY : value_of(most >> 16);
  const float base = largest == MINUS_INFINITY ? 0.f : largest;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < OF_LANE; i++)
    if (mine[i] != NOTHING) sum += __expf(value_of(mine[i] >> 16) - base);
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (lane == 0) sums[0] = largest, sums[1] = sum;

  u32 my_best = NOTHING;  // the lane-th
  for (int k = 0; k < topk; k++) {
    if (lane == k) my_best = most;
    u32 next = NOTHING;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      if (mine[i] == most) mine[i] = NOTHING;
      next = max(next, mine[i]);
    }
    most = __reduce_max_sync(0xffffffff, next);
  }
  if (lane < topk)
    keys[lane] = my_best == NOTHING ? 0
                                    : key_of(value_of(my_best >> 16), output_at(0xffff - (my_best & 0xffff)));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) head_topk(
    const u16* x, const u16* gain, const u16* weight, u64* keys, float* sums, int num_rows,
    int num_outs, int topk, int stride_x, float eps) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;
  u16* kept = (u16*)(shared + STREAM_BYTES);
  u16* mine = kept + part * 2 * KEPT_PITCH + warp * TILE + group;
  stream_head(shared, {x, gain, weight, num_rows, num_outs, stride_x, eps},
              [&](const Sums& sums, int) {
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                  for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                      mine[(n * 8 + c) * KEPT_PITCH + half * 8] = kept_of(logit_of(sums, n, half, c));
                mine += WARPS * TILE;
              });
  __syncthreads();
  for (int r = warp; r < num_rows; r += WARPS) {
    const u64 share = (u64)r * gridDim.x + blockIdx.x;
    look_through(kept + r * KEPT_PITCH, keys + share * topk, sums + share * 2, num_outs, topk);
  }
}
