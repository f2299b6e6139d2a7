// Linear layer for dozens and hundreds of rows with a weight of 4 bits, by products of a warpgroup.
//
// The number of outputs that are stored is a multiple of 4.
//
// Compile-time: those of int4.cuh (NT 1, GROUP a multiple of 128, ZERO 0 or 1), MT (tiles of 8 rows a
// block: 1, 2, 4, 8 or 16), WARPS (that multiply, a multiple of 4), SLOTS (stages in shared memory, 8 at
// most), WAYS (warps that share the depth in int4_rows.cu), PARTS (as there), CLUSTER (blocks that share the
// depth here: PARTS, or half as many, of which each has two neighbouring parts), ROUNDED, BIAS.
//
// A block computes 16 WARPS outputs of 8 MT rows. Of four more warps, which need few registers and leave
// theirs to the others, two copy x and codes into shared memory, and one shows to products what has landed: a
// fence waits for all copies of the thread that calls it. Codes are the left operand: each is read and
// widened once, in registers, whatever the number of rows. While the products of 32 columns run, a warp
// widens the codes of the 32 behind them. Warpgroups meet at no barrier: one runs ahead of another by as many
// stages as there are slots, so that while one waits for its products or scales their sums another multiplies.
//
// ROUNDED 0: what int4_rows.cu computes, bit for bit: the sums of 128 columns are scaled in float32, and a
// block takes the stages of one way after another. That a product of a warpgroup rounds as one of a warp
// does is measured (benchmarks/kernels/int4_rows.py, on an H200); the PTX ISA does not say it. ROUNDED 1: a
// weight is scaled and rounded to half precision before it is multiplied, as where it is dequantised first.
// Either way a row's sum has one order, whatever other rows there are.

#include "int4.cuh"
#include "shared_sums.cuh"
#include "warpgroup_half.cuh"

#define ROWS (8 * MT)
#define OUTS (16 * WARPS)
#define STORED (OUTS / (1 + GATED))
#define SHARERS (32 * WARPS)  // threads that multiply
#define COPIERS 64            // threads that copy
#define THREADS (SHARERS + 128)
#define WIDTH (OUTS + 4)            // of a row of sums: so that a warp's stores spare banks
#define MINE (WAYS / CLUSTER)       // ways of a block,
#define MY_PARTS (PARTS / CLUSTER)  // its parts,
#define OF_PART (WAYS / PARTS)      // and the ways of one
#define EARLY 2                     // stages whose codes are copied while the kernel ahead may still run

// Shared memory: rings of x and of codes, barriers, sums of the parts' ways but that of the last way,
// scales and zeros.
#define X_HALF (HALF * ROWS)  // bytes of 64 columns
#define X_SLOT (2 * X_HALF)
#define CODE_SLOT (64 * OUTS)
#define CODES_AT (SLOTS * X_SLOT)
#define BARRIERS_AT (CODES_AT + SLOTS * CODE_SLOT)
#define WAYS_AT (BARRIERS_AT + 256)
#define SCALES_AT (WAYS_AT + (ROUNDED ? 0 : (MY_PARTS - (OF_PART == 1)) * 4 * ROWS * OUTS))
#define WORDS (SCALE == 2 ? 2 : 1)                      // of a scale and a zero
#define LANDED(slot) (base + BARRIERS_AT + (slot) * 8)  // barriers: a stage has landed,
#define SHOWN(slot) (LANDED(slot) + 64)                 // is there for products,
#define READ(slot) (LANDED(slot) + 128)                 // and has been read

// Registers of a thread: of as many blocks at once as have AT_START, of those that copy, of the others.
#define AT_ONCE (WARPS == 4 || (WARPS == 8 && MT <= 8) ? 2 : 1)
#define AT_START (65536 / AT_ONCE / THREADS / 8 * 8)
#define TO_COPY 32
#define MOST_TO_MULTIPLY (((WARPS / 4 + 1) * AT_START - TO_COPY) / (WARPS / 4) / 8 * 8)
#define TO_MULTIPLY (MOST_TO_MULTIPLY > 232 ? 232 : MOST_TO_MULTIPLY)

#include "int4_stages.cuh"
#include "int4_widen.cuh"

// Four neighbouring sums of the blocks of a cluster. partial: in each. bias: of the first.
__device__ __forceinline__ void sum_of_blocks(float (&sum)[4], const float* partial, const u16* bias) {
  float4 of_even = {};
#pragma unroll
  for (int block = 0; block < CLUSTER; block++) {
#if CLUSTER > 1
    const float4 of_block = load_four_of_block(partial, block);
#else
    const float4 of_block = *(const float4*)partial;
#endif
    if (CLUSTER > 1 && MY_PARTS == 1 && block % 2 == 0) {  // with the one behind it first
      of_even = of_block;
    } else {
      sum[0] += of_even.x + of_block.x, sum[1] += of_even.y + of_block.y;
      sum[2] += of_even.z + of_block.z, sum[3] += of_even.w + of_block.w;
    }
  }
  if (BIAS) {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += widen(bias[i]);
  }
}

// The rows that this block of a cluster stores. partial: [ROWS][WIDTH] of each block. stored: outputs of
// all blocks.
__device__ __forceinline__ void add_blocks(const float* partial, const u16* bias, u16* out, int rank,
                                           int rows, int first_row, int first_block, int stored) {
  for (int cell = threadIdx.x * 4; cell < (ROWS + CLUSTER - 1) / CLUSTER * STORED; cell += SHARERS * 4) {
    const int r = cell / STORED * CLUSTER + rank, c = cell % STORED, o = first_block + c;
    if (r >= rows || o >= stored) continue;
    const float* of_row = partial + r * WIDTH + c;
    float sum[4] = {}, up[4] = {};
    sum_of_blocks(sum, of_row, bias + o);
    if (GATED) sum_of_blocks(up, of_row + STORED, bias + stored + o);
    const u32 low = GATED ? gated_pair(sum[0], sum[1], up[0], up[1]) : pack(sum[0], sum[1]);
    const u32 high = GATED ? gated_pair(sum[2], sum[3], up[2], up[3]) : pack(sum[2], sum[3]);
    *(uint2*)(out + (u64)(first_row + r) * stored + o) = make_uint2(low, high);
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, AT_ONCE) int4_wgmma(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int rank = blockIdx.x % CLUSTER, first_row = blockIdx.x / CLUSTER * ROWS;
  const int stored = num_outs / (1 + GATED), between = stored - STORED;
  const int first_block = blockIdx.y * STORED;
  const int first_out = first_block + warp * 16 + (GATED && warp * 16 >= STORED ? between : 0);
  const int stages = columns / STAGE, count = stages_of(rank, stages);

  const u32 base = (u32)__cvta_generic_to_shared(shared);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) {
      prepare_barrier(LANDED(slot), COPIERS);
      prepare_barrier(SHOWN(slot), 1);
      prepare_barrier(READ(slot), WARPS);
    }
    show_barriers();
  }
  __syncthreads();  // the barriers are initialised

  if (warp >= WARPS) {
    give_registers(TO_COPY);
    if (warp < WARPS + COPIERS / 32)
      copy_stages(base, x + (u64)first_row * stride_x, codes + (u64)first_block * (columns / 2), rank,
                  count, num_rows - first_row, stored - first_block, between, columns, stride_x);
    else if (warp == WARPS + COPIERS / 32)
      show_stages(base, count);
    __syncthreads();  // as the others do
    meet_sharers();
    if (CLUSTER > 1) meet_sharers();
  } else {
    take_registers(TO_MULTIPLY);
    u32* held_by_warp = (u32*)(shared + SCALES_AT) + warp * 16 * WORDS * count;
    hold_scales(held_by_warp, scale, zero, first_out, num_outs, columns / GROUP, rank, count, stages);
    float* of_ways = (float*)(shared + WAYS_AT) + threadIdx.x;  // sums of the ways before
    float acc[4 * MT] = {}, sums[4 * MT] = {};
    u32 a[2][2][4];
    const u64 first_matrix = matrix_at(base);
    int way = rank * MINE, left = (stages - way + WAYS - 1) / WAYS;  // stages of it
    int slot = 0, turns = 0;
    __syncwarp();  // all lanes' scales
    const u32 at = kept(base + CODES_AT + warp * 1024 + row * 64 + (row >> 1 & 3) * 16 + part * 2);
    const u32* held = held_by_warp + row;
    Scaling of_0 = scaling_of(held, count * 16), of_1 = scaling_of(held + 8, count * 16);
    wait_at(SHOWN(0), 0);
    u32 loaded[4];
    load_chunk(loaded, at, 0);
    widen_chunk(a[0], loaded, of_0, of_1);
#pragma unroll 1
    for (int turn = 0; turn < count; turn++) {
      const u32 read = READ(slot);
      const u64 matrix = behind(first_matrix, slot * X_SLOT);
      Scaling next_0 = of_0, next_1 = of_1;
      __syncwarp();  // products are of whole warps
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        before_products();
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u64 b = behind(matrix, c / 2 * X_HALF + c % 2 * 64 + h * 32);
          if (ROUNDED)
            add_product(acc, a[c % 2][h], b, 1);
          else
            add_product(sums, a[c % 2][h], b, c + h > 0);
        }
        end_of_products();
        if (c + 1 < CHUNKS) {
          load_chunk(loaded, at + slot * CODE_SLOT, c + 1);
        } else if (turn + 1 < count) {  // the first chunk of the next stage
          slot++;
          if (slot == SLOTS) slot = 0, turns ^= 1;
          held += 16;
          next_0 = scaling_of(held, count * 16);
          next_1 = scaling_of(held + 8, count * 16);
          wait_at(SHOWN(slot), turns);
          load_chunk(loaded, at + slot * CODE_SLOT, 0);
        }
        wait_for_products_but(1);  // those that read the other operands
#pragma unroll
        for (int h = 0; h < 2; h++) keep(a[(c + 1) % 2][h]);
        if (ROUNDED && c == 0 && turn > 0 && lane == 0)
          arrive_at(READ(slot == 0 ? SLOTS - 1 : slot - 1));
        widen_chunk(a[(c + 1) % 2], loaded, next_0, next_1);
#pragma unroll
        for (int h = 0; h < 2; h++) keep(a[(c + 1) % 2][h]);  // not behind the next wait
      }
      if (!ROUNDED) {
        wait_for_products_but(0);
#pragma unroll
        for (int h = 0; h < 2; h++) keep(a[1][h]);
        keep(sums);
        if (lane == 0) arrive_at(read);
#pragma unroll
        for (int i = 0; i < 4 * MT; i++) acc[i] += (i % 4 < 2 ? of_0.by : of_1.by) * sums[i];
        if (MINE > 1 && --left == 0 && turn + 1 < count) {
          const bool is_first = way % OF_PART == 0;
          float* of_part = of_ways + (way % MINE / OF_PART) * 4 * MT * SHARERS;
          way++;
          left = (stages - way + WAYS - 1) / WAYS;
#pragma unroll
          for (int i = 0; i < 4 * MT; i++) {
            float* to_way = of_part + i * SHARERS;
            *to_way = (is_first ? 0.f : *to_way) + acc[i];
            acc[i] = 0.f;
          }
        }
      }
      of_0 = next_0, of_1 = next_1;
    }
    if (ROUNDED) {
      wait_for_products_but(0);
      keep(acc);
    }
#pragma unroll
    for (int i = 0; i < 4 * MT; i++) {
      if (OF_PART > 1 && !ROUNDED) acc[i] += of_ways[((MY_PARTS - 1) * 4 * MT + i) * SHARERS];
      if (MY_PARTS > 1 && !ROUNDED) acc[i] += of_ways[i * SHARERS];
    }
    __syncthreads();  // the rings are read no more

    float* partial = (float*)shared;  // [ROWS][WIDTH]
#pragma unroll
    for (int i = 0; i < 4 * MT; i++)
      partial[(i / 4 * 8 + part * 2 + i % 2) * WIDTH + warp * 16 + row + i % 4 / 2 * 8] = acc[i];
    meet_sharers();
    add_blocks(partial, bias, out, rank, min(num_rows - first_row, ROWS), first_row, first_block, stored);
    if (CLUSTER > 1) meet_sharers();  // the others have read this block's sums
  }
}
