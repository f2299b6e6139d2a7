// Attention of decoder_stack.cu: queries of one KV head of a request, and a share of its old keys, a
// block. Online softmax after FlashAttention-2 (Dao 2023), shares merged after Flash-Decoding (Dao et
// al. 2023).

#include "stack_product.cuh"

// What a block has to attend to: rows of a request, query by query, head by head, ROWS at most.
struct Task {
  int request, head, first, num_rows;  // first: of its rows
  int first_row, num_queries, page_row;
  int begin, end;  // old keys
  int number, share, partials, apart;  // apart: between the numbers of its shares
  int new_slots[2];                  // of this lane's keys among the new ones
  u32 tree_keys[2];                  // which of them this lane's rows see in a tree, bit by bit
  bool exists;
};

__device__ __forceinline__ Task task_of(const Batch& batch, int number) {
  Task task = {};
  int tasks = 0;
#pragma unroll 1
  for (int i = 0; i < batch.num_requests; i++) {
    const int queries = (int)(batch.indptr[i + 1] - batch.indptr[i]);
    tasks += KV_HEADS * ((queries * GROUP + ROWS - 1) / ROWS);
  }
  if (tasks == 0) return task;
  const int most = max(1, (int)gridDim.x / tasks);
  task.share = number / tasks;
  if (task.share >= most) return task;
  int place = number % tasks;
#pragma unroll 1
  for (int i = 0; i < batch.num_requests; i++) {
    const int first_row = (int)batch.indptr[i], queries = (int)batch.indptr[i + 1] - first_row;
    const int tiles = (queries * GROUP + ROWS - 1) / ROWS;
    if (place >= KV_HEADS * tiles) {
      place -= KV_HEADS * tiles;
      continue;
    }
    task.request = i;
    task.head = place / tiles;
    task.first = place % tiles * ROWS;
    task.num_rows = min(ROWS, queries * GROUP - task.first);
    task.first_row = first_row;
    task.num_queries = queries;
    task.page_row = (int)batch.rows[i];
    const int prefix = (int)batch.seq_lens[i] - queries;
    int low = 0;
    if (HAS_FIRST) low = (int)min(batch.first_keys[task.page_row], (long long)prefix);
    const int sweeps = (prefix - low + SWEEP - 1) / SWEEP;
    const int each = max(1, (sweeps + most - 1) / most);
    task.partials = max(1, (sweeps + each - 1) / each);
    task.begin = low + task.share * each * SWEEP;
    task.end = min(task.begin + each * SWEEP, prefix);
    task.number = number;
    task.apart = tasks;
    task.exists = task.share < task.partials;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int key = n * 8 + (lane_of() >> 2);
      task.new_slots[n] = key < queries ? (int)batch.loc[first_row + key] : 0;
    }
    break;
  }
  return task;
}

__device__ __forceinline__ unsigned char* area_of(int warp) {
  return shared + AREAS_AT + warp * AREA_BYTES;
}

__device__ __forceinline__ const float* angles_of(int query) {
  return (const float*)(shared + ANGLES_AT) + query * HEAD;
}

// Old keys and values of this warp, on their way into its area; what is not there is zero. The last
// warp empties its own.
__device__ __forceinline__ void fetch_keys(const Batch& batch, const Layer& layer, const Task& task,
                                           int from) {
  if (warp_of() == OLD_WARPS)
#pragma unroll 4
    for (int i = lane_of(); i < AREA_BYTES / 16; i += 32)
      ((uint4*)area_of(OLD_WARPS))[i] = make_uint4(0, 0, 0, 0);
  if (warp_of() >= OLD_WARPS) return;
  const int key = from + warp_of() * KEYS + lane_of(), piece = lane_of() & 7;
  const int mine =
      key < task.end ? batch.table[(u64)task.page_row * batch.stride_table + key] : -1;
  const u32 to = in_shared(AREAS_AT + warp_of() * AREA_BYTES) + piece * 16;
  const u64 head = task.head * HEAD + piece * 8;
#pragma unroll 2
  for (int i = 0; i < KEYS / 4; i++) {
    const int row = i * 4 + (lane_of() >> 3), slot = __shfl_sync(0xffffffff, mine, row);
    const u64 at = (u64)max(slot, 0) * batch.stride_cache + head;
    const int bytes = slot >= 0 ? 16 : 0;
    copy_async(to + row * KEY_BYTES, layer.k_cache + at, bytes);
    copy_async(to + (KEYS + row) * KEY_BYTES, layer.v_cache + at, bytes);
  }
}

// Eight pairs (i, i + HEAD / 2) of a head, rotated in float32. angles: of the row, from the first.
__device__ __forceinline__ void rotate(uint4& low, uint4& high, const float* angles) {
  u32 *a = &low.x, *b = &high.x;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 c = *(const float2*)(angles + 2 * i);
    const float2 s = *(const float2*)(angles + HEAD / 2 + 2 * i);
    const float a0 = widen((u16)a[i]), a1 = widen((u16)(a[i] >> 16));
    const float b0 = widen((u16)b[i]), b1 = widen((u16)(b[i] >> 16));
    a[i] = pack(a0 * c.x - b0 * s.x, a1 * c.y - b1 * s.y);
    b[i] = pack(b0 * c.x + a0 * s.x, b1 * c.y + a1 * s.y);
  }
}

// Eight new keys and values that have come (by lane: halves of a key, of a value): into the area of the
// last warp, and the cache. slot: of the lane's key.
__device__ __forceinline__ void keep_new_keys(const Batch& batch, const Layer& layer,
                                              const Task& task, uint4* kv, int key, int slot) {
  const int part = lane_of() & 3;
  if (key >= task.num_queries) return;
  rotate(kv[0], kv[1], angles_of(key) + part * 8);
  unsigned char* to = area_of(OLD_WARPS) + key * KEY_BYTES + part * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) *(uint4*)(to + i / 2 * KEYS * KEY_BYTES + i % 2 * 64) = kv[i];
  if (task.first > 0) return;
  const u64 in_cache = (u64)slot * batch.stride_cache + task.head * HEAD + part * 8;
  *(uint4*)(layer.k_cache + in_cache) = kv[0];
  *(uint4*)(layer.k_cache + in_cache + 32) = kv[1];
  *(uint4*)(layer.v_cache + in_cache) = kv[2];
  *(uint4*)(layer.v_cache + in_cache + 32) = kv[3];
}

// Where halves of a new key and value come from; nowhere, where `wanted` is false.
__device__ __forceinline__ void places_of_key(const u16** places, const Task& task, const u16* from,
                                              int key, int num_rows, bool wanted) {
  const bool is_there = wanted && key < task.num_queries;
  const int column = QKV_AT + ATTENDED + task.head * HEAD + (lane_of() & 3) * 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = column + i / 2 * KV_HEADS * HEAD + i % 2 * 32;
    places[i] = is_there ? from + place_of(at, task.first_row + key, num_rows) : 0;
  }
}

// Which of the new keys a row sees, bit by bit: of a chain those up to its own, of a tree what it says.
__device__ __forceinline__ u32 chain_keys_of(const Task& task, int row) {
  const int query = (task.first + row) / GROUP;
  return query < task.num_queries ? (2u << query) - 1 : 0;
}

__device__ __forceinline__ u32 tree_keys_of(const Batch& batch, const Task& task, int row) {
  const int query = (task.first + row) / GROUP;
  if (query >= task.num_queries) return 0;
  u32 seen = 0;
#pragma unroll 8
  for (int key = 0; key < task.num_queries; key++)
    seen |= (batch.tree[((u64)task.request * batch.nodes + query) * batch.nodes + key] != 0) << key;
  return seen;
}

// Of this warp's rows `group` and `group + 8`: rotated queries, and what its keys have given them.
struct Attention {
  uint4 q[4];  // first row, its halves of a head; second row
  float most[2], total[2], out[8][4];

  // takes_keys: the warp takes the new keys, too.
  __device__ __forceinline__ void begin(const Batch& batch, const Layer& layer, const Task& task,
                                        const u16* from, bool takes_keys) {
    const int part = lane_of() & 3, key = lane_of() >> 2;
    const u16* places[8];
    uint4 values[8];
    int queries[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = (lane_of() >> 2) + i * 8, place = task.first + row;
      queries[i] = place / GROUP;
      const int column = QKV_AT + (task.head * GROUP + place % GROUP) * HEAD + part * 8;
#pragma unroll
      for (int half = 0; half < 2; half++)
        places[2 * i + half] =
            row < task.num_rows
                ? from + place_of(column + half * 32, task.first_row + queries[i], batch.num_rows)
                : 0;
      most[i] = LOWEST;
      total[i] = 0.f;
    }
    places_of_key(places + 4, task, from, key, batch.num_rows, takes_keys);
    wait_for(values, places);
    __syncwarp();  // other lanes have emptied the area of new keys
    if (takes_keys) {
      keep_new_keys(batch, layer, task, values + 4, key, task.new_slots[0]);
      if (task.num_queries > 8) {
        const u16* others[4];
        uint4 kv[4];
        places_of_key(others, task, from, key + 8, batch.num_rows, true);
        wait_for(kv, others);
        keep_new_keys(batch, layer, task, kv, key + 8, task.new_slots[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = values[i];
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (places[2 * i]) rotate(q[2 * i], q[2 * i + 1], angles_of(queries[i]) + part * 8);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) out[j][c] = 0.f;
  }

  // One step of the online softmax over the keys of this warp's area. seen: by row, bit by bit.
  __device__ __forceinline__ void absorb(float scale, const u32 (&seen)[2]) {
    float scores[KEYS / 8][4] = {}, high[2] = {most[0], most[1]};
    score(scores, high, scale, seen);
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], 1));
      high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], 2));
      base[i] = high[i] == LOWEST ? 0.f : high[i];
      const float decay = power_of_2(most[i] - base[i]);
      most[i] = high[i];
      total[i] *= decay;
#pragma unroll
      for (int j = 0; j < 8; j++) out[j][2 * i] *= decay, out[j][2 * i + 1] *= decay;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        scores[n][c] = power_of_2(scores[n][c] - base[c / 2]);
        total[c / 2] += scores[n][c];
      }
    add_values(scores);
  }

  // Of the keys in the warp's area; what a row does not see is minus infinity. high: by row.
  __device__ __forceinline__ void score(float (&scores)[KEYS / 8][4], float (&high)[2], float scale,
                                        const u32 (&seen)[2]) const {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    const unsigned char* area = area_of(warp_of());
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const uint4 k = *(const uint4*)(area + (n * 8 + group) * KEY_BYTES + p * 64 + part * 16);
        multiply(scores[n], q[p].x, q[2 + p].x, q[p].y, q[2 + p].y, k.x, k.y);
        multiply(scores[n], q[p].z, q[2 + p].z, q[p].w, q[2 + p].w, k.z, k.w);
      }
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const bool sees = seen[c / 2] >> (n * 8 + part * 2 + c % 2) & 1;
        scores[n][c] = sees ? scores[n][c] * scale : LOWEST;
        high[c / 2] = fmaxf(high[c / 2], scores[n][c]);
      }
    }
  }

  __device__ __forceinline__ void add_values(const float (&weights)[KEYS / 8][4]) {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    const unsigned char* area = area_of(warp_of());
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      const float *first = weights[2 * step], *second = weights[2 * step + 1];
      const u32 a0 = pack(first[0], first[1]), a1 = pack(first[2], first[3]);
      const u32 a2 = pack(second[0], second[1]), a3 = pack(second[2], second[3]);
      uint4 v[4];  // of four keys, the eight dimensions from 8 group on
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = step * 16 + part * 2 + i / 2 * 8 + i % 2;
        v[i] = *(const uint4*)(area + (KEYS + key) * KEY_BYTES + group * 16);
      }
      const u32 *v0 = &v[0].x, *v1 = &v[1].x, *v2 = &v[2].x, *v3 = &v[3].x;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        multiply(out[2 * i], a0, a1, a2, a3, v0[i] & 0xffff | v1[i] << 16,
                 v2[i] & 0xffff | v3[i] << 16);
        multiply(out[2 * i + 1], a0, a1, a2, a3, v0[i] >> 16 | v1[i] & 0xffff0000,
                 v2[i] >> 16 | v3[i] & 0xffff0000);
      }
    }
  }

  // Into the warp's area: the greatest score and the sum of each row, and [ROWS][HEAD] in float32.
  __device__ __forceinline__ void leave() {
    const int group = lane_of() >> 2, part = lane_of() & 3;
    float* to = (float*)area_of(warp_of());
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = total[i];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int row = group + i * 8;
      if (part == 0) to[row] = most[i], to[ROWS + row] = sum;
      float2* at = (float2*)(to + 2 * ROWS + row * SUM_STRIDE + part * 16);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        at[j / 2] = make_float2(out[j][2 * i], out[j + 1][2 * i]);
        at[4 + j / 2] = make_float2(out[j][2 * i + 1], out[j + 1][2 * i + 1]);
      }
    }
  }
};
