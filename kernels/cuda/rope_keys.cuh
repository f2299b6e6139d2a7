// Of rope_attention.cu: old keys and values, on their way in registers, and the scores of a unit of keys.

#include "rope_heads.cuh"

// Old keys of this warp's unit, and what it adds up of the values of all units of the block's sweep. Where
// there is none, the last old key stands: its weight is 0.
struct OldKeys {
  int slots[WARPS / 2];  // of keys lane and lane + 32 of a sweep
  int mine;              // of key lane % UNIT of the warp's unit
  uint4 k[2][4];         // keys lane / 4 and lane / 4 + 8
  uint2 v[WARPS][4];

  __device__ __forceinline__ int slot(const Task& task, int unit) const {
    return task.table[max(min(task.unit(unit) * UNIT + lane_of() % UNIT, task.prefix - 1), 0)];
  }

  __device__ __forceinline__ void find(const Task& task, int sweep) {
#pragma unroll
    for (int i = 0; i < WARPS / 2; i++) slots[i] = slot(task, sweep * WARPS + i * 2 + lane_of() / UNIT);
    mine = slot(task, sweep * WARPS + warp_of());
  }

  __device__ __forceinline__ void load_keys(const u16* cache, int stride) {
    const int group = lane_of() >> 2, part = lane_of() & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u16* from = cache + (u64)__shfl_sync(ALL, mine, group + 8 * i) * stride + part * 8;
#pragma unroll
      for (int p = 0; p < 4; p++) k[i][p] = load_constant_now(from + p * 32);
    }
  }

  // The new keys in place of old ones that have been multiplied.
  __device__ __forceinline__ void load_new_keys() {
    const int group = lane_of() >> 2, part = lane_of() & 3;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int p = 0; p < 4; p++)
        k[i][p] = *(const uint4*)(shared + NEW_KEYS_AT + (group + 8 * i) * STRIDE + p * 64 + part * 16);
  }

  __device__ __forceinline__ void load_values(const u16* cache, int stride) {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    cache += warp_of() * SPAN + group * 4;
#pragma unroll
    for (int u = 0; u < WARPS; u++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = u % 2 * UNIT + part * 2 + i % 2 + i / 2 * 8;
        v[u][i] = load_fresh_four(cache + (u64)__shfl_sync(ALL, slots[u / 2], key) * stride);
      }
  }

  // Keys and values of a unit into the second cache. slot: of key lane % UNIT.
  __device__ __forceinline__ void prefetch(int slot, const u16* keys, const u16* values, int stride) const {
    prefetch_bulk((lane_of() < UNIT ? keys : values) + (u64)slot * stride, 2 * HEAD);
  }
};

// Scores of a unit's keys, and what they become: weights by the row's greatest, that, and their sum.
// num_keys: that are there, or fewer than none. NEW: a row sees those up to its query's own.
template <bool NEW>
__device__ __forceinline__ void score(const uint4 (&k)[2][4], int unit, int num_keys, float scale) {
  const int group = lane_of() >> 2, part = lane_of() & 3;
  float sums[2][4] = {};  // two, so that one need not wait for the other
#pragma unroll
  for (int p = 0; p < 4; p++) {
    const uint4 q = *(const uint4*)(shared + QUERIES_AT + group * STRIDE + p * 64 + part * 16);
    multiply(sums[p % 2], k[0][p].x, k[1][p].x, k[0][p].y, k[1][p].y, q.x, q.y);
    multiply(sums[p % 2], k[0][p].z, k[1][p].z, k[0][p].w, k[1][p].w, q.z, q.w);
  }
  float peak[2] = {NOTHING, NOTHING}, base[2], sum[2] = {};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const int key = group + c / 2 * 8, row = part * 2 + c % 2;
    const bool is_seen = key < num_keys && (!NEW || key <= row / GROUP);
    sums[0][c] = is_seen ? (sums[0][c] + sums[1][c]) * scale : NOTHING;
    peak[c % 2] = fmaxf(peak[c % 2], sums[0][c]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      peak[r] = fmaxf(peak[r], __shfl_xor_sync(ALL, peak[r], distance));
    base[r] = peak[r] == NOTHING ? 0.f : peak[r];
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float low = power_of_2(sums[0][2 * i] - base[0]), high = power_of_2(sums[0][2 * i + 1] - base[1]);
    const u32 both = pack(low, high);
    u16* to = (u16*)(weights_of(unit) + part * 2 * WEIGHT_STRIDE) + group + 8 * i;
    to[0] = (u16)both;
    to[WEIGHT_STRIDE / 2] = (u16)(both >> 16);
    sum[0] += low;
    sum[1] += high;
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) sum[r] += __shfl_xor_sync(ALL, sum[r], distance);
  if (group == 0) {
    *(float2*)(peaks_of(unit) + part * 2) = make_float2(peak[0], peak[1]);
    *(float2*)(peaks_of(unit) + ROWS + part * 2) = make_float2(sum[0], sum[1]);
  }
}
