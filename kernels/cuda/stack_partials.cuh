// How the parts of decoder_stack.cu's attention come together: those of a block's warps, and those of
// the blocks that share a request's keys.

#include "stack_attention.cuh"

struct Places {
  u16* at;        // of this layer
  float* partials;  // [tasks and partials][ROWS][SHARE_SIZE], of any layer
  int* flags;     // of each of them, the tag that it was last written with
  int tag;        // of this launch and layer
  int num_rows;
};

// Two neighbouring values of a row of a task, for all blocks.
__device__ __forceinline__ void settle_heads(const Task& task, const Places& places, int row, int d,
                                             float2 out, float total) {
  const int query = (task.first + row) / GROUP, head = (task.first + row) % GROUP;
  const int column = HEADS_AT + (task.head * GROUP + head) * HEAD + d;
  u16* to = places.at + place_of(column, task.first_row + query, places.num_rows);
  const float by = reciprocal(total);
  settle(to, pack(out.x * by, out.y * by));
}

// What the warps have left in their areas.
__device__ __forceinline__ void merge_warps(const Task& task, const Places& places) {
#pragma unroll 1
  for (int i = threadIdx.x; i < task.num_rows * (HEAD / 2); i += THREADS) {
    const int row = i / (HEAD / 2), d = i % (HEAD / 2) * 2;
    float most[WARPS], high = LOWEST, total = 0.f;
    float2 out = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      most[w] = ((const float*)area_of(w))[row];
      high = fmaxf(high, most[w]);
    }
    const float base = high == LOWEST ? 0.f : high;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* from = (const float*)area_of(w);
      const float2 theirs = *(const float2*)(from + 2 * ROWS + row * SUM_STRIDE + d);
      const float weight = power_of_2(most[w] - base);
      total += weight * from[ROWS + row];
      out.x += weight * theirs.x;
      out.y += weight * theirs.y;
    }
    if (task.partials == 1) {
      settle_heads(task, places, row, d, out, total);
    } else {
      float* to = places.partials + ((u64)task.number * ROWS + row) * SHARE_SIZE;
      to[d] = out.x;
      to[d + 1] = out.y;
      if (d == 0) to[HEAD] = high, to[HEAD + 1] = total;
    }
  }
}

// What the blocks have left, by the block of the first share.
__device__ __forceinline__ void merge_partials(const Task& task, const Places& places) {
#pragma unroll 1
  for (int share = 1 + threadIdx.x; share < task.partials; share += THREADS)
    while (seen_in_memory(places.flags + task.number + share * task.apart) != places.tag)
      look_again();
  meet();
#pragma unroll 1
  for (int i = threadIdx.x; i < task.num_rows * (HEAD / 2); i += THREADS) {
    const int row = i / (HEAD / 2), d = i % (HEAD / 2) * 2;
    float most = LOWEST, total = 0.f;
    float2 out = make_float2(0.f, 0.f);
#pragma unroll 1
    for (int share = 0; share < task.partials; share++) {
      const u64 number = task.number + share * task.apart;
      const float* from = places.partials + (number * ROWS + row) * SHARE_SIZE;
      const float x = load_float_from_l2(from + d), y = load_float_from_l2(from + d + 1);
      const float their_most = load_float_from_l2(from + HEAD);
      const float their_total = load_float_from_l2(from + HEAD + 1);
      const float high = fmaxf(most, their_most), base = high == LOWEST ? 0.f : high;
      const float mine = power_of_2(most - base), theirs = power_of_2(their_most - base);
      out.x = out.x * mine + x * theirs;
      out.y = out.y * mine + y * theirs;
      total = total * mine + their_total * theirs;
      most = high;
    }
    settle_heads(task, places, row, d, out, total);
  }
}

__device__ __forceinline__ void attend(const Batch& batch, const Layer& layer, const Task& task,
                                       const Places& places, float scale) {
  Attention attention;
  const bool is_new = warp_of() == OLD_WARPS;
  attention.begin(batch, layer, task, places.at, is_new && task.share == 0);
  int first = is_new ? task.share : task.begin + warp_of() * KEYS;  // of the warp's next keys
  wait_for_all_copies();
  __syncwarp();
#pragma unroll 1
  while (is_new ? first == 0 : first < task.end) {
    u32 seen[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int left = task.end - first, row = (lane_of() >> 2) + i * 8;
      if (is_new)
        seen[i] = HAS_TREE ? task.tree_keys[i] : chain_keys_of(task, row);
      else
        seen[i] = left >= KEYS ? EMPTY : (1u << left) - 1;
    }
    attention.absorb(scale, seen);
    first += SWEEP;
    if (is_new || first - warp_of() * KEYS >= task.end) break;
    __syncwarp();
    fetch_keys(batch, layer, task, first - warp_of() * KEYS);
    wait_for_all_copies();
    __syncwarp();
  }
  attention.leave();
  meet();
  merge_warps(task, places);
  meet();
  if (task.partials == 1) return;
  if (threadIdx.x == 0) tell(places.flags + task.number, places.tag);
  if (task.share == 0) merge_partials(task, places);
}
