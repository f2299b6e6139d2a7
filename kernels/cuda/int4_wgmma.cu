// Linear layer for dozens and hundreds of rows with a weight of 4 bits, by products of a warpgroup.
//
// The number of outputs is a multiple of 4.
//
// Compile-time: those of int4.cuh (NT 1, GROUP a multiple of 128, ZERO 0 or 1), MT (tiles of 8 rows a
// block: 1, 2, 4, 8 or 16), WARPS (that multiply, a multiple of 4), SLOTS (stages in shared memory, 8 at
// most), WAYS (warps that share the depth in int4_rows.cu), CLUSTER (blocks that share it here: PARTS there),
// ROUNDED, BIAS.
//
// A block computes 16 WARPS outputs of 8 MT rows. Of four more warps, which need few registers and leave
// theirs to the others, two copy x and codes into shared memory, and one shows to products what has landed: a
// fence waits for all copies of the thread that calls it, so that who copies must not. Codes are the left operand: each is read and widened
// once, in registers, whatever the number of rows. While the products of 32 columns run, a warp widens the
// codes of the 32 behind them. Warpgroups meet at no barrier: one runs ahead of another by as many stages as
// there are slots, so that while one waits for its products or scales their sums another multiplies.
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
#define SHARERS (32 * WARPS)    // threads that multiply
#define COPIERS 64              // threads that copy
#define THREADS (SHARERS + 128)
#define X_HALF (HALF * ROWS)    // bytes of 64 columns
#define X_SLOT (2 * X_HALF)
#define CODES_AT (SLOTS * X_SLOT)
#define CODE_SLOT (64 * OUTS)
#define BARRIERS_AT (CODES_AT + SLOTS * CODE_SLOT)
#define WAYS_AT (BARRIERS_AT + 256)
#define LANDED(slot) (base + BARRIERS_AT + (slot) * 8)  // barriers: a stage has landed,
#define SHOWN(slot) (LANDED(slot) + 64)                 // is there for products,
#define READ(slot) (LANDED(slot) + 128)                 // and has been read
#define SCALES_AT (WAYS_AT + (MINE > 1 && !ROUNDED ? 4 * ROWS * OUTS : 0))
#define WORDS (SCALE == 2 ? 2 : 1)  // of shared memory that hold a scale and a zero
#define WIDTH (OUTS + 4)  // of a row of sums: so that a warp's stores spare banks
#define MINE (WAYS / CLUSTER)  // ways of a block
#define EARLY 2         // stages whose codes are copied while the kernel ahead may still run
#define AT_ONCE (WARPS == 4 || (WARPS == 8 && MT <= 8) ? 2 : 1)  // blocks that registers must do for
#define AT_START (65536 / AT_ONCE / THREADS / 8 * 8)  // registers of a thread
#define TO_COPY 32
#define TO_MULTIPLY_ALL (((WARPS / 4 + 1) * AT_START - TO_COPY) / (WARPS / 4) / 8 * 8)
#define TO_MULTIPLY (TO_MULTIPLY_ALL > 232 ? 232 : TO_MULTIPLY_ALL)

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

// How many stages a block has.
__device__ __forceinline__ int stages_of(int rank, int stages) {
  int count = 0;
#pragma unroll
  for (int way = 0; way < MINE; way++) count += (stages - rank * MINE - way + WAYS - 1) / WAYS;
  return count;
}

// Which one the block takes `turn` stages after its first.
__device__ __forceinline__ int stage_at(int rank, int turn, int stages) {
  int found = stages - 1;
#pragma unroll
  for (int way = rank * MINE; way < rank * MINE + MINE; way++) {
    const int of_way = (stages - way + WAYS - 1) / WAYS;
    if (turn >= 0 && turn < of_way) found = way + turn * WAYS;
    turn -= of_way;
  }
  return found;
}

// What the codes of a row of a stage become.
struct Scaling {
  u32 less;       // MAGIC's value and the zero, twice
  u32 high, low;  // the scale, of two terms, each twice
  float by;
};

// The scales and zeros of a warp's outputs. held: of this warp, [count][16], and their zeros behind them if
// a scale fills a word.
__device__ __forceinline__ void hold_scales(u32* held, const unsigned char* scale, const unsigned char* zero,
                                            int first_out, int num_outs, int groups, int rank, int count,
                                            int stages) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    u32 scales[4][4], zeros[4][4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int group = stage_at(rank, first + t * 8 + (lane & 7), stages) * STAGE / GROUP;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int place = min(first_out + i * 4 + (lane >> 3), num_outs - 1) * groups + group;
        if (first + t * 8 >= count) continue;
        scales[t][i] = raw_scale(scale, place);
        zeros[t][i] = raw_zero(zero, place);
      }
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int turn = first + t * 8 + (lane & 7);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (turn >= count) continue;
        const float less = MIDDLE - 8.f + zero_of(zeros[t][i]);
        u32* at = held + turn * 16 + i * 4 + (lane >> 3);
        const u32 pair = pack(less, less);
        at[0] = SCALE == 2 ? scales[t][i] : scales[t][i] | pair << 16;
        if (SCALE == 2) at[count * 16] = pair;
      }
    }
  }
}

// at: that of its row and stage. to_zeros: words.
__device__ __forceinline__ Scaling scaling_of(const u32* at, int to_zeros) {
  const u32 word = at[0];
  Scaling found;
  found.by = scale_of(word);
  found.less = SCALE == 2 ? at[to_zeros] : high_halves(word, word);
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

// This lane's codes of a chunk: two of each place of a fragment, 8 rows behind, 8 columns behind. held: where
// those of its first chunk stand.
__device__ __forceinline__ void load_chunk(u32 (&codes)[4], u32 held, int chunk) {
#pragma unroll
  for (int i = 0; i < 4; i++) codes[i] = load_shared_pair((held ^ chunk * 16) + i % 2 * 512 + i / 2 * 8);
}

// The left operands of its two products.
__device__ __forceinline__ void widen_chunk(u32 (&a)[2][4], const u32 (&codes)[4], const Scaling& of_row,
                                            const Scaling& of_eighth) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 pair = apart(codes[i]);
    a[0][i] = pair_of(pair, i % 2 ? of_eighth : of_row);
    a[1][i] = pair_of(pair >> 4, i % 2 ? of_eighth : of_row);
  }
}

// A stage of codes: a lane has 16 bytes of some rows. Pieces of a row change places by its number,
// so that lanes of all rows read different banks.
__device__ __forceinline__ void copy_codes(u32 to, const unsigned char* from, int columns, int outs_left) {
#pragma unroll
  for (int o = 0; o < OUTS; o += COPIERS / 4) {
    if (o < outs_left) copy_async(to + o * 64, (const u16*)from, 16);
    from += COPIERS / 8 * columns;
  }
}

// A stage of x: a lane has 16 bytes of each 32 columns of some rows. What stands where rows do not
// exist reaches sums of those rows alone.
__device__ __forceinline__ void copy_rows(u32 to, u32 to_odd, const u16* from, int row, int rows_left,
                                          int stride_x) {
#pragma unroll
  for (int r = 0; r < ROWS; r += COPIERS / 4) {
    if (r < rows_left && (ROWS % (COPIERS / 4) == 0 || row < ROWS)) {
      copy_async(to + r * HALF, from, 16);
      copy_async(to_odd + r * HALF, from + 32, 16);
      copy_async(to + X_HALF + r * HALF, from + 64, 16);
      copy_async(to_odd + X_HALF + r * HALF, from + 96, 16);
    }
    from += COPIERS / 4 * stride_x;
  }
}

// What the warps do that copy.
__device__ __forceinline__ void copy_stages(u32 base, const u16* x, const unsigned char* codes, int rank,
                                            int count, int rows_left, int outs_left, int columns,
                                            int stride_x) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x - SHARERS) >> 5, piece = lane & 3;
  const int stages = columns / STAGE, out = warp * 8 + (lane >> 2);
  const int row = warp * 8 + (lane >> 2 & 1) * 4 + (lane >> 3);  // eight lanes write to all banks
  const u32 to = base + CODES_AT + out * 64 + (piece ^ (out >> 1 & 3)) * 16;
  const u32 to_x = base + swizzled(row, piece), to_odd = base + swizzled(row, piece + 4);
  codes += (u64)out * (columns / 2) + piece * 16;
  x += (u64)row * stride_x + piece * 8;
  Walk ahead = {rank * MINE, rank * MINE}, walk = ahead;
#pragma unroll 1
  for (int slot = 0; slot < min(EARLY, count); slot++) {
    copy_codes(to + slot * CODE_SLOT, codes + ahead.stage * (STAGE / 2), columns, outs_left - out);
    ahead.step(stages);
  }
  wait_for_last_kernel();
  int slot = 0, turns = 1;  // a slot is empty for the first time when it has been read once
#pragma unroll 1
  for (int turn = 0; turn < count; turn++) {
    if (turn >= SLOTS) wait_at(READ(slot), turns & 1);
    if (turn >= EARLY)
      copy_codes(to + slot * CODE_SLOT, codes + walk.stage * (STAGE / 2), columns, outs_left - out);
    copy_rows(to_x + slot * X_SLOT, to_odd + slot * X_SLOT, x + walk.stage * STAGE, row, rows_left - row,
              stride_x);
    arrive_after_copies(LANDED(slot));
    walk.step(stages);
    slot++;
    if (slot == SLOTS) slot = 0, turns++;
  }
}

// What the warp behind them does.
__device__ __forceinline__ void show_stages(u32 base, int count) {
  int slot = 0, turns = 0;
#pragma unroll 1
  for (int turn = 0; turn < count; turn++) {
    wait_at(LANDED(slot), turns & 1);
    show_copies_to_products();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_at(SHOWN(slot));
    slot++;
    if (slot == SLOTS) slot = 0, turns++;
  }
}

// The sums of the blocks of a cluster, of the rows that this one stores. partial: [ROWS][WIDTH] of each.
__device__ __forceinline__ void add_blocks(const float* partial, const u16* bias, u16* out, int rank,
                                           int rows, int first_row, int first_block, int num_outs) {
  for (int cell = threadIdx.x * 4; cell < (ROWS + CLUSTER - 1) / CLUSTER * OUTS; cell += SHARERS * 4) {
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

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, AT_ONCE) int4_wgmma(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int rank = blockIdx.x % CLUSTER, first_row = blockIdx.x / CLUSTER * ROWS;
  const int first_block = blockIdx.y * OUTS, first_out = first_block + warp * 16;
  const int stages = columns / STAGE, count = stages_of(rank, stages);
  allow_next_kernel();

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
  __syncthreads();  // the barriers stand

  if (warp >= WARPS) {
    give_registers(TO_COPY);
    if (warp < WARPS + COPIERS / 32)
      copy_stages(base, x + (u64)first_row * stride_x, codes + (u64)first_block * (columns / 2), rank,
                  count, num_rows - first_row, num_outs - first_block, columns, stride_x);
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
          const bool is_first = way == rank * MINE;
          way++;
          left = (stages - way + WAYS - 1) / WAYS;
#pragma unroll
          for (int i = 0; i < 4 * MT; i++) {
            float* to_way = of_ways + i * SHARERS;
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
    for (int i = 0; i < 4 * MT; i++)
      if (MINE > 1 && !ROUNDED) acc[i] += of_ways[i * SHARERS];
    __syncthreads();  // the rings are read no more

    float* partial = (float*)shared;  // [ROWS][WIDTH]
#pragma unroll
    for (int i = 0; i < 4 * MT; i++)
      partial[(i / 4 * 8 + part * 2 + i % 2) * WIDTH + warp * 16 + row + i % 4 / 2 * 8] = acc[i];
    meet_sharers();
    add_blocks(partial, bias, out, rank, min(num_rows - first_row, ROWS), first_row, first_block, num_outs);
    if (CLUSTER > 1) meet_sharers();  // the others have read this block's sums
  }
}
