// The token of the largest logit of each row: out[r] = ids[argmax_o sum_k norm(x)[r, k] w[o, k]].
//
// Compile-time: those of head_stream.cuh, and IDS.
//
// Logits are never written. They are rounded as a product would round them; a thread keeps the best it
// has seen, a block the best of its threads, and the last block waits for what the others leave.

#include "head_stream.cuh"

#define READERS (THREADS / ROWS)  // threads that look at a row in the end
#define AT_ONCE (4 * NT + 1)      // of the values that each looks for: all, of up to 144 blocks

struct Best {
  float value;
  int at;  // among equals the first, which a thread sees first
};

// Nothing seen is the least.
__device__ __forceinline__ u64 key_of(Best best) {
  return best.at == NO_OUTPUT ? 1 : key_of(best.value, best.at);
}

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// A thread's logits of a tile.
__device__ __forceinline__ void see(Best (*best)[2], const Sums& sums, int tile, int group) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int o = tile * TILE + half * 8 + group;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float logit = logit_of(sums, n, half, c);
        Best& mine = best[n][c];
        if (logit > mine.value || mine.at == NO_OUTPUT) mine = {logit, o};
      }
  }
}

// The best of a warp's threads, for each row; [WARPS][ROWS] of all.
__device__ __forceinline__ void leave(const Best (*best)[2], u64* of_warps, int warp, int group,
                                      int part) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      u64 key = key_of(best[n][c]);
      for (int distance = 4; distance < 32; distance *= 2)
        key = larger(key, __shfl_xor_sync(0xffffffff, key, distance));
      if (group == 0) of_warps[warp * ROWS + n * 8 + part * 2 + c] = key;
    }
}

// The largest key that some blocks leave of one row: every READERS-th of them. Empties their places.
__device__ __forceinline__ u64 gathered(u64* slots, int num_rows) {
  const int r = threadIdx.x % ROWS;
  u64 key = 0;
  if (r < num_rows)
    for (int first = threadIdx.x / ROWS; first < gridDim.x; first += AT_ONCE * READERS) {
      u64 found[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int block = first + k * READERS;
        found[k] = block < gridDim.x ? load_settled_key(slots + (u64)block * ROWS + r) : 1;
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const int block = first + k * READERS;
        if (block >= gridDim.x) continue;
        while (!found[k]) {
          look_again();
          found[k] = load_settled_key(slots + (u64)block * ROWS + r);
        }
        settle_key(slots + (u64)block * ROWS + r, 0);
        key = larger(key, found[k]);
      }
    }
  return key;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) head_best(
    const u16* x, const u16* gain, const u16* weight, const long long* ids, u64* slots,
    long long* out, int num_rows, int num_outs, int stride_x, float eps) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;
  Best best[NT][2];
#pragma unroll
  for (int n = 0; n < NT; n++) best[n][0] = best[n][1] = {0.f, NO_OUTPUT};
  stream_head(shared, {x, gain, weight, num_rows, num_outs, stride_x, eps},
              [&](const Sums& sums, int tile) { see(best, sums, tile, group); });

  __syncthreads();
  u64* of_warps = (u64*)shared;  // where rows and weights were
  leave(best, of_warps, warp, group, part);
  __syncthreads();
  if (threadIdx.x < num_rows) {
    u64 key = 0;
    for (int j = 0; j < WARPS; j++) key = larger(key, of_warps[j * ROWS + threadIdx.x]);
    settle_key(slots + (u64)blockIdx.x * ROWS + threadIdx.x, key);
  }
  if (blockIdx.x != gridDim.x - 1) return;

  const u64 key = gathered(slots, num_rows);
  __syncthreads();
  of_warps[threadIdx.x] = key;
  __syncthreads();
  if (threadIdx.x < num_rows) {
    u64 key = 0;
    for (int j = 0; j < READERS; j++) key = larger(key, of_warps[j * ROWS + threadIdx.x]);
    const int o = NO_OUTPUT - (int)(key & NO_OUTPUT);
    out[threadIdx.x] = IDS ? ids[o] : o;
  }
}
