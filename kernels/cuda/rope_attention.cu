// Rotates a few new tokens a request, writes their KV and attends to their requests' paged KV. It computes
// what rope_attention_triton.py does, for some requests.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), GROUP (query heads of a KV head), QUERIES (of a request, at
// most), TILES (of 8 rows: GROUP x QUERIES are as many at most), CLUSTER (blocks that share a request's keys),
// WARPS, NORM (0 or 1: heads of q and k are normalised first).
//
// A cluster takes one KV head of one request; its rows go query by query, head by head. Old keys are dealt
// out by units of 16, one block after another, then one warp after another. Each warp copies its units into
// shared memory of its own and multiplies them alone, so that units need no barrier between them: the next keys
// are on their way while it adds values, and the next values while it scores keys. What needs nothing of the
// kernel ahead, such as the first old keys, is asked for before that has ended.
//
// New keys are a unit of the last block, which also writes them to the cache. In the end the warps of a block
// add up what they have, and each block adds up OWN dimensions of the blocks' sums. Blocks send these into its
// shared memory and tell its barrier of them: a barrier of the cluster would first wait until all that a thread
// has sent is there.
//
// The kernel behind may start at once: it reads nothing of this one's before its own wait, and this one
// waits before it ends.
//
// A row's result depends on its keys, its place among its request's queries and CLUSTER: not on other
// rows.

#include "rope_units.cuh"

static_assert(QUERIES * GROUP <= ROWS, "rows of the tiles");

// The queries' rows, as products take them. Part i of a tile holds dimensions 32 i to 32 i + 31.
struct Queries {
  uint4 of[TILES][HEAD / 32];

  __device__ __forceinline__ void load(u32 at) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < HEAD / 32; i++) of[t][i] = load_matrices(at + t * 8 * STRIDE + i * 64);
  }
};

// What a lane knows of its rows: the greatest score, and its share of the sums of weights and of values,
// both taken by that score.
struct Sums {
  float peak[TILES][2], total[TILES][2];  // of rows 8 tile + 2 part and the next
  float of[TILES][HEAD / 16][4];          // of those, dimensions 16 i + group and 8 behind

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int r = 0; r < 2; r++) peak[t][r] = NOTHING, total[t][r] = 0.f;
#pragma unroll
      for (int i = 0; i < HEAD / 16; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) of[t][i][c] = 0.f;
    }
  }

  // Scores a unit's keys, and weighs them by the greatest score of a row so far. keys: where this lane's row
  // of matrices lies. num_keys: those that exist. NEW: a row sees those up to its query's own.
  template <bool NEW>
  __device__ __forceinline__ void score(const Queries& queries, u32 keys, int num_keys, float scale_log2, u32 (&weights)[TILES][2]) {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    float scores[TILES][4] = {}, others[TILES][4] = {};  // two, so that one need not wait for the other
#pragma unroll
    for (int k = 0; k < HEAD / 16; k += 2) {
      const uint4 low = load_matrices(keys + k * 32), high = load_matrices(keys + k * 32 + 32);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint4 q = queries.of[t][k / 2];
        multiply(scores[t], low.x, low.y, low.z, low.w, q.x, q.y);
        multiply(others[t], high.x, high.y, high.z, high.w, q.z, q.w);
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int key = group + c / 2 * 8, row = t * 8 + part * 2 + c % 2;
        const bool is_seen = key < num_keys && (!NEW || key <= row / GROUP);
        scores[t][c] = is_seen ? (scores[t][c] + others[t][c]) * scale_log2 : NOTHING;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float high = fmaxf(scores[t][r], scores[t][2 + r]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          high = fmaxf(high, __shfl_xor_sync(ALL, high, distance));
        high = fmaxf(high, peak[t][r]);
        const float decay = power_of_2(peak[t][r] - high);
        peak[t][r] = high;
        scores[t][r] = power_of_2(scores[t][r] - high);
        scores[t][2 + r] = power_of_2(scores[t][2 + r] - high);
        total[t][r] = total[t][r] * decay + scores[t][r] + scores[t][2 + r];
#pragma unroll
        for (int i = 0; i < HEAD / 16; i++) of[t][i][r] *= decay, of[t][i][2 + r] *= decay;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) weights[t][i] = turned(pack(scores[t][2 * i], scores[t][2 * i + 1]));
    }
  }

  __device__ __forceinline__ void add(u32 values, const u32 (&weights)[TILES][2]) {
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
      const uint4 v = load_turned_matrices(values + i * 32);
#pragma unroll
      for (int t = 0; t < TILES; t++) multiply(of[t][i], v.x, v.y, v.z, v.w, weights[t][0], weights[t][1]);
    }
  }

  // The sums take the place of this warp's units, which it has read: [ROWS][HEAD], then peaks and totals.
  __device__ __forceinline__ void leave(float* at) {
    const int group = lane_of() >> 2, part = lane_of() & 3;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = t * 8 + part * 2 + r;
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          total[t][r] += __shfl_xor_sync(ALL, total[t][r], distance);
#pragma unroll
        for (int i = 0; i < HEAD / 16; i++) {
          at[row * LEFT_STRIDE + i * 16 + group] = of[t][i][r];
          at[row * LEFT_STRIDE + i * 16 + group + 8] = of[t][i][2 + r];
        }
        if (group == 0) ((float2*)(at + ROWS * LEFT_STRIDE))[row] = make_float2(peak[t][r], total[t][r]);
      }
  }
};

// A row's sums. They join parts that were each taken by a greatest score of its own.
struct Row {
  float peak, total;
  float2 of;  // two dimensions

  __device__ __forceinline__ void store(const Given& given, const Task& task, int row, int dim, int num_heads) const {
    const int head = task.kv_head * GROUP + row % GROUP;
    const u64 row_at = (u64)(task.first_token + row / GROUP) * num_heads + head;
    *(u32*)(given.out + row_at * HEAD + dim) = pack(divided(of.x, total), divided(of.y, total));
  }
};

template <int COUNT>
__device__ __forceinline__ Row joined(const float2 (&told)[COUNT], const float2 (&of)[COUNT]) {
  Row found = {NOTHING, 0.f, make_float2(0.f, 0.f)};
#pragma unroll
  for (int i = 0; i < COUNT; i++) found.peak = fmaxf(found.peak, told[i].x);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float scale = power_of_2(told[i].x - found.peak);
    found.total += told[i].y * scale;
    found.of.x += of[i].x * scale;
    found.of.y += of[i].y * scale;
  }
  return found;
}

// Sends what the warps have left: dimensions to the block that adds them up, a row's peak and total to all.
__device__ __forceinline__ void send(const Given& given, const Task& task, int num_heads, u32 barrier) {
  for (int i = threadIdx.x; i < task.num_rows * (HEAD / 2); i += THREADS) {
    const int row = i / (HEAD / 2), dim = i % (HEAD / 2) * 2;
    float2 told[WARPS], of[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* left = (const float*)(shared + UNITS_AT + w * UNIT_BYTES);
      told[w] = ((const float2*)(left + ROWS * LEFT_STRIDE))[row];
      of[w] = *(const float2*)(left + row * LEFT_STRIDE + dim);
    }
    const Row found = joined(told, of);
    if (CLUSTER == 1) {
      found.store(given, task, row, dim, num_heads);
      continue;
    }
    const int place = task.block * ROWS + row;
    float* at = (float*)(shared + GIVEN_AT) + place * OWN + dim % OWN;
    send_two_to_block((u64*)at, dim / OWN, joined(found.of.x, found.of.y), barrier);
    if (dim % OWN == 0)
      send_two_to_block((u64*)(shared + TOLD_AT) + place, dim / OWN, joined(found.peak, found.total), barrier);
  }
}

// Adds up this block's dimensions of all rows, once all blocks have sent theirs.
__device__ __forceinline__ void store_own(const Given& given, const Task& task, int num_heads, u32 barrier) {
  for (int i = threadIdx.x; i < task.num_rows * (OWN / 2); i += THREADS) {
    wait_in_cluster_at(barrier, 0);
    const int row = i / (OWN / 2), dim = i % (OWN / 2) * 2;
    float2 told[CLUSTER], of[CLUSTER];
#pragma unroll
    for (int b = 0; b < CLUSTER; b++) {
      told[b] = make_float2(NOTHING, 0.f), of[b] = make_float2(0.f, 0.f);
      if (!task.has_keys(b)) continue;
      told[b] = *(const float2*)(shared + TOLD_AT + (b * ROWS + row) * 8);
      of[b] = *(const float2*)(shared + GIVEN_AT + ((b * ROWS + row) * OWN + dim) * 4);
    }
    joined(told, of).store(given, task, row, task.block * OWN + dim, num_heads);
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) rope_attention(
    const u16* q, const u16* k, const u16* v, u16* out, const long long* positions, const float* cos_sin,
    u16* k_cache, u16* v_cache, const long long* loc, const int* table, const long long* rows,
    const long long* seq_lens, const long long* indptr, const u16* q_gain, const u16* k_gain, int stride_qt,
    int stride_qh, int stride_kt, int stride_kh, int stride_vt, int stride_vh, int stride_cs, int stride_ch,
    int stride_table, int stride_cos_sin, int num_heads, float scale_log2, float eps) {
  allow_next_kernel();
  const Given given = {q, k, v, out, positions, cos_sin, k_cache, v_cache, loc, q_gain, k_gain, stride_qt,
                       stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cs, stride_ch,
                       stride_cos_sin, eps};
  const int request = blockIdx.y;
  Task task;
  task.block = blockIdx.x % CLUSTER;
  task.kv_head = blockIdx.x / CLUSTER;
  task.has_new = task.block == CLUSTER - 1;
  task.first_token = (int)indptr[request];
  task.num_queries = (int)indptr[request + 1] - task.first_token;
  task.prefix = (int)seq_lens[request] - task.num_queries;
  task.num_rows = task.num_queries * GROUP;
  task.table = table + (u64)rows[request] * stride_table;
  if (task.num_rows <= 0) {  // all blocks of the cluster
    wait_for_last_kernel();
    return;
  }

  const u32 base = (u32)__cvta_generic_to_shared(shared);
  const u16* my_keys = k_cache + (u64)task.kv_head * stride_ch;
  const u16* my_values = v_cache + (u64)task.kv_head * stride_ch;
  Units old = {my_keys, my_values, stride_cs};
  old.begin(task, base);
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) {
      prepare_barrier(base, 1);
      show_barriers();
      const int from = min(task.units(), CLUSTER - 1) + 1;
      expect_bytes(base, from * task.num_rows * (4 * OWN + 8));
    }
    __syncwarp();
    arrive_in_cluster();
  }
  const bool has_keys = task.has_keys(task.block);
  NewHeads heads;
  if (has_keys) heads.find(given, task);
  if (NORM) heads.load_gains(given);
  if (has_keys) heads.load_angles(given);
  if (CLUSTER > 1) wait_for_cluster();  // all blocks have prepared their barriers
  wait_for_last_kernel();

  if (has_keys) {
    heads.finish(given, task);
    __syncthreads();
    Sums sums;
    sums.begin();
    // These say which row of which matrix this lane names, of queries, keys and values.
    const int eighth = lane_of() % 8, half = lane_of() / 8 % 2, quarter = lane_of() / 16;
    Queries queries;
    queries.load(base + QUERIES_AT + eighth * STRIDE + lane_of() / 8 * 16);
    u32 weights[TILES][2];
    if (task.has_new && warp_of() == WARPS - 1) {
      const int key = min(eighth + half * 8, task.num_queries - 1);
      const int value = min(eighth + quarter * 8, task.num_queries - 1);
      sums.score<true>(queries, base + NEW_KEYS_AT + key * STRIDE + quarter * 16, task.num_queries, scale_log2,
                       weights);
      sums.add(base + NEW_VALUES_AT + value * STRIDE + half * 16, weights);
    }
#pragma unroll 1
    for (int i = 0; i < old.count; i++) {
      old.wait();
      sums.score<false>(queries, old.keys() + (eighth + half * 8) * STRIDE + quarter * 16,
                        task.prefix - Units::before(task, i), scale_log2, weights);
      __syncwarp();  // all have read the keys
      old.ask_keys(i + 1);
      old.wait();
      sums.add(old.values() + (eighth + quarter * 8) * STRIDE + half * 16, weights);
      __syncwarp();  // and the values
      old.ask_values(i + 1);
      old.find(task, i + 2);
    }
    sums.leave((float*)(shared + UNITS_AT + warp_of() * UNIT_BYTES));
    __syncthreads();
    send(given, task, num_heads, base);
  }
  if (CLUSTER > 1) store_own(given, task, num_heads, base);
}
