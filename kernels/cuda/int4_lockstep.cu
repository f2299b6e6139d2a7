// Linear layer for dozens and hundreds of rows with a weight of 4 bits, by products of a warpgroup.
//
// The number of outputs is a multiple of 4.
//
// Compile-time: those of int4.cuh (NT 1, GROUP a multiple of 128, ZERO 0 or 1), MT (tiles of 8 rows a
// block: 1, 2, 4, 8 or 16), WARPS (a multiple of 4), SLOTS (stages in shared memory, 3 or more), WAYS (warps
// that share the depth in int4_rows.cu), CLUSTER (blocks that share it here: PARTS there), ROUNDED, BIAS.
//
// A block computes 16 WARPS outputs of 8 MT rows. Codes are the left operand: each is read and widened
// once, in registers, whatever the number of rows. x stands in shared memory.
//
// ROUNDED 0: what int4_rows.cu computes, bit for bit: the sums of 128 columns are scaled in float32, and a
// block takes the stages of one way after another. That a product of a warpgroup rounds as one of a warp
// does is measured (benchmarks/kernels/int4_rows.py, on an H200); the PTX ISA does not say it. ROUNDED 1: a
// weight is scaled and rounded to half precision before it is multiplied, as where it is dequantised first.
// Either way a row's sum has one order, whatever rows stand beside it.

#include "int4.cuh"
#include "shared_sums.cuh"
#include "warpgroup_half.cuh"

#define ROWS (8 * MT)
#define OUTS (16 * WARPS)
#define THREADS (32 * WARPS)
#define X_HALF (HALF * ROWS)  // bytes of 64 columns
#define X_SLOT (2 * X_HALF)
#define RING_BYTES (SLOTS * (X_SLOT + 1024 * WARPS))
#define WIDTH (OUTS + 4)  // of a row of sums: so that a warp's stores spare banks
#define STEPS (STAGE / 16)
#define MINE (WAYS / CLUSTER)  // ways of a block
#define AT_ONCE (WARPS <= 8 && MT <= 8 ? 2 : 1)  // blocks that registers must do for

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

// What the codes of a row of a stage become.
struct Scaling {
  u32 less;       // MAGIC's value and the zero, twice
  u32 high, low;  // the scale, of two terms, each twice
  float by;
};

__device__ __forceinline__ Scaling scaling_of(u32 scale, u32 zero) {
  Scaling found;
  found.by = scale_of(scale);
  const float less = MIDDLE - 8.f + zero_of(zero);
  found.less = pack(less, less);
  if (ROUNDED) {
    found.high = pack(found.by, found.by);
    const float rest = found.by - widen((u16)found.high);
    found.low = pack(rest, rest);
  }
  return found;
}

// Two neighbouring codes that stand at bits 0 and 16.
__device__ __forceinline__ u32 pair_of(u32 codes, const Scaling& scaling) {
  const u32 value = subtract_pairs(masked_or(codes, 0x000f000f, MAGIC), scaling.less);
  if (!ROUNDED) return value;
  // Exact but for the last rounding: a code has 5 bits, and of a scale's 11 bits the second term 3.
  if (SCALE == 0 || TYPE == 1) return multiply_pairs(value, scaling.high);
  return multiply_add_pairs(value, scaling.high, multiply_pairs(value, scaling.low));
}

// The left operand of a stage. held: this lane's codes of its row, of which pieces are turned.
__device__ __forceinline__ void widen_stage(u32 (&a)[STEPS][4], const unsigned char* held, int row,
                                            const Scaling& of_row, const Scaling& of_eighth) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const unsigned char* at = held + ((c + (row >> 1)) & 3) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {  // the places of a fragment: 8 rows behind, 8 columns behind
      const u32 pair = apart(*(const u16*)(at + i % 2 * 512 + i / 2 * 8));
      a[2 * c][i] = pair_of(pair, i % 2 ? of_eighth : of_row);
      a[2 * c + 1][i] = pair_of(pair >> 4, i % 2 ? of_eighth : of_row);
    }
  }
}

// A stage of x: a thread has 16 bytes of some rows, THREADS / 16 apart. from: those of its first row, at
// stage 0; to: their place. Rows that do not exist are zeros.
__device__ __forceinline__ void fetch_rows(u32 to, const u16* from, int stage, int stride_x,
                                           int rows_left) {
  from += stage * STAGE;
#pragma unroll
  for (int r = 0; r < ROWS; r += THREADS / 16) {
    if (ROWS % (THREADS / 16) && threadIdx.x / 16 + r >= ROWS) return;
    copy_async(to + r * HALF, from, r < rows_left ? 16 : 0);
    from += THREADS / 16 * stride_x;
  }
}

// The sums of the blocks of a cluster, of the rows that this one stores. partial: [ROWS][WIDTH] of each.
__device__ __forceinline__ void add_blocks(const float* partial, const u16* bias, u16* out, int rank,
                                           int rows, int first_row, int first_block, int num_outs) {
  for (int cell = threadIdx.x * 4; cell < (ROWS + CLUSTER - 1) / CLUSTER * OUTS; cell += THREADS * 4) {
    const int r = cell / OUTS * CLUSTER + rank, c = cell % OUTS, o = first_block + c;
    if (r >= rows || o >= num_outs) continue;
    float sum[4] = {};
#pragma unroll
    for (int block = 0; block < CLUSTER; block++) {
#if CLUSTER > 1
      const float4 of_block = load_four_of_block(partial + r * WIDTH + c, block);
#else
      const float4 of_block = *(const float4*)(partial + r * WIDTH + c);
#endif
      sum[0] += of_block.x, sum[1] += of_block.y, sum[2] += of_block.z, sum[3] += of_block.w;
    }
    if (BIAS) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum[i] += widen(bias[o + i]);
    }
    *(uint2*)(out + (u64)(first_row + r) * num_outs + o) =
        make_uint2(pack(sum[0], sum[1]), pack(sum[2], sum[3]));
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, AT_ONCE) int4_lockstep(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int rank = blockIdx.x % CLUSTER, first_row = blockIdx.x / CLUSTER * ROWS;
  const int first_block = blockIdx.y * OUTS, first_out = first_block + warp * 16;
  const int stages = columns / STAGE, groups = columns / GROUP;
  Walk walk = {rank * MINE, rank * MINE}, ahead = walk, ahead_x = walk;
  int count = 0;  // stages of this block
#pragma unroll
  for (int way = 0; way < MINE; way++) count += (stages - rank * MINE - way + WAYS - 1) / WAYS;
  allow_next_kernel();

  const u32 base = (u32)__cvta_generic_to_shared(shared), barrier = base + RING_BYTES;
  const u32 ring = SLOTS * X_SLOT + warp * 1024 + row * 64;  // and 1024 WARPS a slot
  const u32 to = base + ring + ((part + (row >> 1)) & 3) * 16;
  const unsigned char* mine = codes + (u64)(first_out + row) * (columns / 2) + part * 16;
  const int outs_left = num_outs - first_out - row;
  const int x_row = threadIdx.x >> 4, piece = threadIdx.x & 15;  // of what this thread copies of x
  const u32 to_x = base + piece / 8 * X_HALF + swizzled(x_row, piece % 8);
  x += (u64)(first_row + x_row) * stride_x + piece * 8;
  const int x_left = num_rows - first_row - x_row;
  if (threadIdx.x == 0) {
    prepare_barrier(barrier, WARPS);
    show_barriers();
  }
  const int place_0 = min(first_out + row, num_outs - 1) * groups;
  const int place_1 = min(first_out + row + 8, num_outs - 1) * groups;
  int group = walk.stage * STAGE / GROUP;
  u32 scale_0 = raw_scale(scale, place_0 + group), scale_1 = raw_scale(scale, place_1 + group);
  u32 zero_0 = raw_zero(zero, place_0 + group), zero_1 = raw_zero(zero, place_1 + group);
#pragma unroll
  for (int slot = 0; slot < SLOTS - 2; slot++)
    if (slot < count) {
      fetch_codes(to + slot * 1024 * WARPS, mine, ahead.stage, columns, outs_left);
      ahead.step(stages);
    }
  wait_for_last_kernel();
#pragma unroll
  for (int slot = 0; slot < SLOTS - 2; slot++) {
    if (slot < count) {
      fetch_rows(to_x + slot * X_SLOT, x, ahead_x.stage, stride_x, x_left);
      ahead_x.step(stages);
    }
    end_of_copies();
  }
  __syncthreads();  // the barrier stands
  wait_for_copies_but(SLOTS - 3);
  __syncwarp();
  if (lane == 0) arrive_at(barrier);

  float* of_ways = (float*)(shared + RING_BYTES + 16) + threadIdx.x;  // sums of the ways before
  float acc[4 * MT] = {}, sums[4 * MT] = {};
  int slot = 0;
  // The barrier turns when all warps' copies of a stage have landed, and all products of the stage two
  // ahead of it are done: its slot is filled anew.
#pragma unroll 1
  for (int turn = 0; turn < count; turn++) {
    wait_at(barrier, turn & 1);
    __syncwarp();  // products are of whole warps
    const Scaling of_0 = scaling_of(scale_0, zero_0), of_1 = scaling_of(scale_1, zero_1);
    const u64 halves[2] = {matrix_at(base + slot * X_SLOT), matrix_at(base + slot * X_SLOT + X_HALF)};
    u32 a[STEPS][4];
    widen_stage(a, shared + ring + slot * 1024 * WARPS + part * 2, row, of_0, of_1);
    show_to_products();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const u64 b = behind(halves[i / 4], i % 4 * 32);
      if (ROUNDED)
        add_product(acc, a[i], b, 1);
      else
        add_product(sums, a[i], b, i > 0);
    }
    end_of_products();
    // Behind the fence in front of the products, which waits for what this thread has asked for before.
    const int free = slot < 2 ? slot + SLOTS - 2 : slot - 2;
    if (turn + SLOTS - 2 < count) {
      fetch_codes(to + free * 1024 * WARPS, mine, ahead.stage, columns, outs_left);
      fetch_rows(to_x + free * X_SLOT, x, ahead.stage, stride_x, x_left);
      ahead.step(stages);
    }
    end_of_copies();
    const bool ends = walk.ends_way(stages) && turn + 1 < count;
    const bool is_first = walk.way == rank * MINE;
    walk.step(stages);
    if (turn + 1 < count) {
      group = walk.stage * STAGE / GROUP;
      scale_0 = raw_scale(scale, place_0 + group), scale_1 = raw_scale(scale, place_1 + group);
      zero_0 = raw_zero(zero, place_0 + group), zero_1 = raw_zero(zero, place_1 + group);
    }
    wait_for_copies_but(SLOTS - 3);
    __syncwarp();
    if (lane == 0) arrive_at(barrier);
    wait_for_all_products();
#pragma unroll
    for (int i = 0; i < STEPS; i++) keep(a[i]);
    if (ROUNDED) {
      keep(acc);
    } else {
      keep(sums);
#pragma unroll
      for (int i = 0; i < 4 * MT; i++) acc[i] += (i % 4 < 2 ? of_0.by : of_1.by) * sums[i];
      if (MINE > 1 && ends) {
#pragma unroll
        for (int i = 0; i < 4 * MT; i++) {
          float* to_way = of_ways + i * THREADS;
          *to_way = (is_first ? 0.f : *to_way) + acc[i];
          acc[i] = 0.f;
        }
      }
    }
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }
#pragma unroll
  for (int i = 0; i < 4 * MT; i++)
    if (MINE > 1 && !ROUNDED) acc[i] += of_ways[i * THREADS];
  wait_for_all_copies();
  __syncthreads();  // the ring is read no more

  float* partial = (float*)shared;  // [ROWS][WIDTH]
#pragma unroll
  for (int i = 0; i < 4 * MT; i++)
    partial[(i / 4 * 8 + part * 2 + i % 2) * WIDTH + warp * 16 + row + i % 4 / 2 * 8] = acc[i];
  meet_sharers();
  add_blocks(partial, bias, out, rank, min(num_rows - first_row, ROWS), first_row, first_block, num_outs);
  if (CLUSTER > 1) meet_sharers();  // the others have read this block's sums
}
