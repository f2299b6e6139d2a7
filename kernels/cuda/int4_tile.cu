// Linear layer for dozens of rows with a weight of 4 bits: what int4_rows.cu computes, bit for bit.
//
// Compile-time: those of int4.cuh (GROUP a multiple of 128, ZERO 0 or 1), MT (tiles of 8 rows a
// block), WARPS, SLOTS (stages in shared memory), WAYS (warps that share the depth in int4_rows.cu),
// CLUSTER (blocks that share it here), BIAS.
//
// A block computes 16 NT WARPS outputs of 8 MT rows; x goes through shared memory, for all warps. A
// warp takes the stages of one way after another, so that their sums are those of int4_rows.cu, and
// the blocks of a cluster add them in the order of the ways.

#include "int4.cuh"

#define ROWS (8 * MT)
#define WARP_OUTS (16 * NT)
#define OUTS (WARP_OUTS * WARPS)
#define THREADS (32 * WARPS)
#define X_ROW (2 * STAGE + 32)  // bytes: rows of four lanes read different banks
#define X_SLOT (ROWS * X_ROW)
#define SLOT_BYTES (1024 * NT)
#define RING_BYTES (SLOTS * (X_SLOT + WARPS * SLOT_BYTES))
#define WIDTH (OUTS + 4)
#define SUMS (ROWS * WIDTH)
#define MINE (WAYS / CLUSTER)  // ways of a block

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// A way's stages follow each other, WAYS apart; then those of the next way.
struct Walk {
  int way, stage;

  __device__ __forceinline__ bool ends_way(int stages) const { return stage + WAYS >= stages; }
  __device__ __forceinline__ void step(int stages) {
    const bool ends = ends_way(stages);
    way += ends;
    stage = ends ? way : stage + WAYS;
  }
};

// A stage of x into shared memory, by all threads. Rows that do not exist are zeros.
__device__ __forceinline__ void fetch_rows(u32 to, const u16* x, int stage, int stride_x,
                                           int rows_left) {
#pragma unroll
  for (int i = 0; i < ROWS * 16 / THREADS; i++) {
    const int piece = i * THREADS + threadIdx.x, r = piece >> 4, at = piece & 15;
    copy_async(to + r * X_ROW + at * 16, x + (u64)r * stride_x + stage * STAGE + at * 8,
               r < rows_left ? 16 : 0);
  }
}

// Those of a group, as they stand in memory.
__device__ __forceinline__ void load_scales(u32 (&scales)[NT][2], u32 (&zeros)[NT][2],
                                            const unsigned char* scale, const unsigned char* zero,
                                            const int (&place)[NT][2], int group) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      scales[n][h] = raw_scale(scale, place[n][h] + group);
      zeros[n][h] = raw_zero(zero, place[n][h] + group);
    }
}

// Where the sums of a block's way stand: those of the last over the ring, which is read no more.
__device__ __forceinline__ float* sums_of(unsigned char* shared, int way) {
  if (CLUSTER == 1) return (float*)(shared + RING_BYTES);
  return way == MINE - 1 ? (float*)shared : (float*)(shared + RING_BYTES) + way * SUMS;
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS) int4_tile(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int rank = blockIdx.x % CLUSTER, first_block = blockIdx.x / CLUSTER * OUTS;
  const int first_out = first_block + warp * WARP_OUTS, first_row = blockIdx.y * ROWS;
  const int stages = columns / STAGE, groups = columns / GROUP;
  allow_next_kernel();
  x += (u64)first_row * stride_x;
  const int rows_left = num_rows - first_row;

  const u32 base = (u32)__cvta_generic_to_shared(shared);
  const u32 ring = SLOTS * X_SLOT + warp * SLOTS * SLOT_BYTES + row * 64;
  const u32 to = base + ring + ((part + (row >> 1)) & 3) * 16;
  const unsigned char* mine = codes + (u64)(first_out + row) * (columns / 2) + part * 16;
  const int outs_left = num_outs - first_out - row;
  Walk walk = {rank * MINE, rank * MINE}, ahead = walk;
  int left = 0;  // stages that are not fetched
#pragma unroll
  for (int way = 0; way < MINE; way++) left += (stages - rank * MINE - way + WAYS - 1) / WAYS;

  const Walk begin = walk;
  int count = left;
#pragma unroll
  for (int slot = 0; slot < SLOTS - 1; slot++) {
    if (slot < count) fetch_codes(to + slot * SLOT_BYTES, mine, ahead.stage, columns, outs_left);
    if (slot < count) ahead.step(stages);
  }
  wait_for_last_kernel();
  ahead = begin;
#pragma unroll
  for (int slot = 0; slot < SLOTS - 1; slot++) {
    if (slot < count) fetch_rows(base + slot * X_SLOT, x, ahead.stage, stride_x, rows_left);
    if (slot < count) ahead.step(stages);
    end_of_copies();
  }
  left = max(count - (SLOTS - 1), 0);

  int place[NT][2];  // of the first scale of this lane's outputs
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      place[n][h] = min(first_out + n * 16 + h * 8 + row, num_outs - 1) * groups;
  u32 scales[NT][2], zeros[NT][2];  // of the stage to come, as they stand in memory
  load_scales(scales, zeros, scale, zero, place, walk.stage * STAGE / GROUP);

  float acc[NT][MT][4] = {};
  int slot = 0;
#pragma unroll 1
  for (; count > 0; count--) {
    wait_for_copies_but(SLOTS - 2);
    __syncthreads();  // all threads' copies, and the slot before is read no more
    const int free = slot == 0 ? SLOTS - 1 : slot - 1;
    if (left > 0) {
      fetch_codes(to + free * SLOT_BYTES, mine, ahead.stage, columns, outs_left);
      fetch_rows(base + free * X_SLOT, x, ahead.stage, stride_x, rows_left);
      ahead.step(stages);
      left--;
    }
    end_of_copies();
    const bool ends = walk.ends_way(stages);
    const int way = walk.way - rank * MINE;
    u32 less[NT][2];
    float by[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        by[n][h] = scale_of(scales[n][h]);
        const float value = MIDDLE - 8.f + zero_of(zeros[n][h]);
        less[n][h] = pack(value, value);
      }
    walk.step(stages);
    if (count > 1) load_scales(scales, zeros, scale, zero, place, walk.stage * STAGE / GROUP);

    const unsigned char* held = shared + ring + slot * SLOT_BYTES + part * 4;
    const unsigned char* inputs = shared + slot * X_SLOT + row * X_ROW + part * 8;
    float sums[NT][MT][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      u32 a[NT][2][4];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const unsigned char* at = held + n * 1024 + ((c + (row >> 1)) & 3) * 16;
        const u32 w_0 = *(const u32*)at, w_1 = *(const u32*)(at + 512);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          a[n][h][0] = codes_at(w_0, 2 * h, less[n][0]);
          a[n][h][1] = codes_at(w_1, 2 * h, less[n][1]);
          a[n][h][2] = codes_at(w_0, 2 * h + 1, less[n][0]);
          a[n][h][3] = codes_at(w_1, 2 * h + 1, less[n][1]);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const unsigned char* from = inputs + m * 8 * X_ROW + c * 64;
        u32 b[4];
        pairs_of(b, *(const uint2*)from, *(const uint2*)(from + 32));
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int n = 0; n < NT; n++)
            multiply(sums[n][m], a[n][h][0], a[n][h][1], a[n][h][2], a[n][h][3], b[2 * h],
                     b[2 * h + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][m][i] += by[n][i / 2] * sums[n][m][i];
    slot = slot + 1 == SLOTS ? 0 : slot + 1;

    if (!ends) continue;
    if (CLUSTER > 1 && way == MINE - 1) __syncthreads();  // the ring is read no more
    float* to_sums = sums_of(shared, way);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int cell = (m * 8 + part * 2 + i % 2) * WIDTH + warp * WARP_OUTS + n * 16 + row +
                           i / 2 * 8;
          const float before = CLUSTER > 1 || way == 0 ? 0.f : to_sums[cell];
          to_sums[cell] = before + acc[n][m][i];
          acc[n][m][i] = 0.f;
        }
  }

#if CLUSTER > 1
  arrive_in_cluster();
  wait_for_cluster();
#else
  __syncthreads();
#endif
  for (int cell = threadIdx.x; cell < ROWS / CLUSTER * OUTS; cell += THREADS) {
    const int r = cell / OUTS * CLUSTER + rank, c = cell % OUTS, o = first_block + c;
    if (r >= rows_left || o >= num_outs) continue;
    float sum = 0.f;
#if CLUSTER > 1
#pragma unroll
    for (int way = 0; way < WAYS; way++)
      sum += load_float_of_block(sums_of(shared, way % MINE) + r * WIDTH + c, way / MINE);
#else
    sum = sums_of(shared, 0)[r * WIDTH + c];
#endif
    if (BIAS) sum += widen(bias[o]);
    out[(u64)(first_row + r) * num_outs + o] = (u16)(pack(sum, 0.f) & 0xffff);
  }
#if CLUSTER > 1
  arrive_in_cluster();  // the others have read this block's sums
  wait_for_cluster();
#endif
}
