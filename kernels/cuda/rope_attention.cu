// Rotation, KV write and paged attention of a few new tokens a request, for few requests: what
// rope_attention_triton.py computes, where too few programs would share too many keys.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), GROUP (query heads of a KV head), QUERIES (of a request, at
// most: GROUP x QUERIES rows are 8 at most), CLUSTER (blocks that share a request's keys: at least 4),
// NORM (0 or 1: heads of q and k are normalised first).
//
// A cluster takes one KV head of one request; its rows go query by query, head by head. Old keys are dealt
// out by units of 16, one block after another, then one warp after another. Of a unit a warp computes the
// scores; of all units of the block it adds up SPAN dimensions of the values. So a sweep of WARPS units
// takes one barrier, and each value is read once. Keys and values go straight into registers. What needs
// nothing of the kernel ahead, the old keys of the first sweep too, is on its way before that has ended.
//
// New keys are a unit of the last block, which also writes them to the cache. In the end each block adds up
// OWN dimensions of the blocks' sums, which these send into its shared memory and tell its barrier of: a
// barrier of the cluster would first wait until all that a thread has sent is there.
//
// Both operands of Q K^T take values of a 16-byte piece in an order of their own, the same for both, which
// the sum does not see; so do values and what is stored of their sums.
//
// The kernel behind may start at once: it reads nothing of this one's before its own wait, and this one
// waits before it ends.
//
// A row's result depends on its keys, its place among its request's queries and CLUSTER: not on what stands
// beside it.

#include "rope_keys.cuh"

static_assert(QUERIES * GROUP <= ROWS, "rows of one tile");
static_assert(ROWS * OWN / 2 <= THREADS, "pairs that store_own has a thread for");

// Of rows 2 part and 2 part + 1, over what the block has seen of its keys.
struct Sums {
  float peak[2], total[2], of[2][4];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      peak[r] = NOTHING;
      total[r] = of[0][r] = of[0][2 + r] = of[1][r] = of[1][2 + r] = 0.f;
    }
  }

  __device__ __forceinline__ void raise(float (&high)[2], int unit) const {
    const float2 peaks = *(const float2*)(peaks_of(unit) + (lane_of() & 3) * 2);
    high[0] = fmaxf(high[0], peaks.x);
    high[1] = fmaxf(high[1], peaks.y);
  }

  __device__ __forceinline__ void add(int unit, const uint2 (&v)[4]) {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    const float2 peaks = *(const float2*)(peaks_of(unit) + part * 2);
    const float2 sum = *(const float2*)(peaks_of(unit) + ROWS + part * 2);
    const float scale[2] = {power_of_2(peaks.x - peak[0]), power_of_2(peaks.y - peak[1])};
    const u32* weights = (const u32*)(weights_of(unit) + group * WEIGHT_STRIDE) + part;
    total[0] += sum.x * scale[0];
    total[1] += sum.y * scale[1];
    float c[2][4] = {};
    multiply(c[0], low_halves(v[0].x, v[1].x), high_halves(v[0].x, v[1].x), low_halves(v[2].x, v[3].x),
             high_halves(v[2].x, v[3].x), weights[0], weights[4]);
    multiply(c[1], low_halves(v[0].y, v[1].y), high_halves(v[0].y, v[1].y), low_halves(v[2].y, v[3].y),
             high_halves(v[2].y, v[3].y), weights[0], weights[4]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      of[0][i] += c[0][i] * scale[i % 2];
      of[1][i] += c[1][i] * scale[i % 2];
    }
  }

  // Values of a sweep's units, where it has any, and of the new keys.
  __device__ __forceinline__ void add_all(const OldKeys& old, bool with_old, bool with_new) {
    float high[2] = {peak[0], peak[1]};
    if (with_old)
#pragma unroll
      for (int u = 0; u < WARPS; u++) raise(high, u);
    if (with_new) raise(high, WARPS);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float decay = power_of_2(peak[r] - high[r]);
      peak[r] = high[r];
      total[r] *= decay;
      of[0][r] *= decay, of[0][2 + r] *= decay;
      of[1][r] *= decay, of[1][2 + r] *= decay;
    }
    if (with_old)
#pragma unroll
      for (int u = 0; u < WARPS; u++) add(u, old.v[u]);
    if (with_new) {
      uint2 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = (lane_of() & 3) * 2 + i % 2 + i / 2 * 8;
        v[i] = *((const uint2*)(shared + NEW_VALUES_AT + key * STRIDE) + threadIdx.x / 4);
      }
      add(WARPS, v);
    }
  }

  // To the blocks that add up: each dimension to its own, a row's peak and total to all of them.
  __device__ __forceinline__ void send(const Task& task, u32 barrier) const {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    const int peer = group * WARPS + warp_of();  // that this lane tells
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = part * 2 + r;
      if (row >= task.num_rows) continue;
      const int place = task.block * ROWS + row;
#pragma unroll
      for (int w = 0; w < 2; w++) {
        const int dim = warp_of() * SPAN + (group * 2 + w) * 2;
        float* at = (float*)(shared + GIVEN_AT) + place * OWN + dim % OWN;
        send_two_to_block((u64*)at, dim / OWN, joined(of[w][r], of[w][2 + r]), barrier);
      }
      u64* told = (u64*)(shared + TOLD_AT) + place;
      if (peer < CLUSTER) send_two_to_block(told, peer, joined(peak[r], total[r]), barrier);
    }
  }
};

// This block's dimensions of all rows, once all have sent theirs.
__device__ __forceinline__ void store_own(const Given& given, const Task& task, int num_heads, u32 barrier) {
  if (threadIdx.x >= task.num_rows * (OWN / 2)) return;
  wait_at(barrier, 0);
  const int row = threadIdx.x / (OWN / 2), dim = threadIdx.x % (OWN / 2) * 2;
  float2 told[CLUSTER], of[CLUSTER];
  float high = NOTHING, total = 0.f, low_sum = 0.f, high_sum = 0.f;
#pragma unroll
  for (int b = 0; b < CLUSTER; b++) {
    told[b] = make_float2(NOTHING, 0.f), of[b] = make_float2(0.f, 0.f);
    if (!task.has_keys(b)) continue;
    told[b] = *(const float2*)(shared + TOLD_AT + (b * ROWS + row) * 8);
    of[b] = *(const float2*)(shared + GIVEN_AT + ((b * ROWS + row) * OWN + dim) * 4);
    high = fmaxf(high, told[b].x);
  }
#pragma unroll
  for (int b = 0; b < CLUSTER; b++) {
    const float scale = power_of_2(told[b].x - high);
    total += told[b].y * scale;
    low_sum += of[b].x * scale;
    high_sum += of[b].y * scale;
  }
  const int head = task.kv_head * GROUP + row % GROUP;
  const u64 row_at = (u64)(task.first_token + row / GROUP) * num_heads + head;
  u16* to = given.out + row_at * HEAD + task.block * OWN + dim;
  *(u32*)to = pack(divided(low_sum, total), divided(high_sum, total));
}

// A multiprocessor has room for a block beside one of a product in 4 bits (384 threads of 96 registers), so
// that it starts before that has ended: hence four warps, and registers for two blocks.
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 2) rope_attention(
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

  const u32 barrier = (u32)__cvta_generic_to_shared(shared);
  if (threadIdx.x == 0) {
    prepare_barrier(barrier, 1);
    show_barriers();
    const int from = min(task.units(), CLUSTER - 1) + 1;
    expect_bytes(barrier, from * task.num_rows * (4 * OWN + 8));
  }
  __syncwarp();
  arrive_in_cluster();
  if (task.has_new)
    for (int i = task.num_queries * STRIDE / 16 + threadIdx.x; i < UNIT * STRIDE / 16; i += THREADS)
      ((uint4*)(shared + NEW_VALUES_AT))[i] = make_uint4(0, 0, 0, 0);

  const int my_units = task.my_units(), sweeps = (my_units + WARPS - 1) / WARPS;
  const u16* my_keys = k_cache + (u64)task.kv_head * stride_ch;
  const u16* my_values = v_cache + (u64)task.kv_head * stride_ch;
  const bool has_keys = task.has_keys(task.block);
  OldKeys old;
  NewHeads heads;
  old.find(task, 0);
  if (has_keys) heads.find(given, task);
  if (NORM) heads.load_gains(given);
  if (my_units > 0) old.load_keys(my_keys, stride_cs);
  if (has_keys) heads.load_angles(given);
  if (my_units > 0) old.load_values(my_values, stride_cs);
#pragma unroll 1
  for (int sweep = min(sweeps, AHEAD + 1) - 1; sweep > 0; sweep--) {
    old.find(task, sweep);  // the first one last: it is next
    old.prefetch(old.mine, my_keys, my_values, stride_cs);
  }
  wait_for_cluster();  // all blocks have prepared their barriers
  wait_for_last_kernel();

  if (has_keys) {
    heads.finish(given, task);
    __syncthreads();
    Sums sums;
    sums.begin();
    int sweep = 0, far = old.slot(task, (AHEAD + 1) * WARPS + warp_of());  // of a key that comes much later
#pragma unroll 1
    do {
      const bool with_old = sweep < sweeps, has_more = sweep + 1 < sweeps;
      const bool with_new = task.has_new && sweep == 0;
      const int left = task.prefix - task.unit(sweep * WARPS + warp_of()) * UNIT;
      if (with_old) score<false>(old.k, warp_of(), left, scale_log2);
      if (with_new && warp_of() == WARPS - 1) {
        old.load_new_keys();
        score<true>(old.k, WARPS, task.num_queries, scale_log2);
      }
      if (has_more) old.load_keys(my_keys, stride_cs);
      __syncthreads();
      sums.add_all(old, with_old, with_new);
      if (has_more) {
        old.load_values(my_values, stride_cs);
        old.find(task, sweep + 2);
        if (sweep + AHEAD + 1 < sweeps) old.prefetch(far, my_keys, my_values, stride_cs);
        far = old.slot(task, (sweep + AHEAD + 2) * WARPS + warp_of());
        __syncthreads();  // weights have been read
      }
    } while (++sweep < sweeps);
    sums.send(task, barrier);
  }
  store_own(given, task, num_heads, barrier);
}
