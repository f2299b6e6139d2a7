// Linear layer for few rows with a weight of 4 bits: out[r, o] = sum_k x[r, k] w[o, k] (+ bias[o]),
// w[o, k] = (code[o, k] - zero[o, k / GROUP]) scale[o, k / GROUP].
//
// Compile-time: those of int4.cuh, NT (tiles of 16 outputs a block), MT (tiles of 8 rows a block),
// WARPS, PARTS (of neighbouring warps, whose sums are added first, then those of two neighbouring parts),
// SLOTS (stages of a warp whose copies are on their way), AHEAD (whether x is loaded a stage before it is
// multiplied), BIAS. With GATED, NT is even, and the up rows' scales and zeros begin at whole 16 bytes.
//
// A block computes 16 NT outputs of 8 MT rows; its warps take stages of 128 columns in turn. Codes go
// through a ring in shared memory that each warp has for itself, so that many are on their way and
// none takes a register.
//
// Codes, scales and zeros are fetched before the kernel ahead has ended (griddepcontrol); x is read
// after the wait, and never through the read-only cache.

#include "int4.cuh"

#define OUTS (16 * NT)
#define STORED (OUTS / (1 + GATED))
#define ROWS (8 * MT)
#define THREADS (32 * WARPS)
#define SLOT_BYTES (1024 * NT)
#define RING_BYTES (SLOT_BYTES * SLOTS * WARPS)
#define WIDTH (OUTS + 4)  // of a row of partial sums: so that a warp's stores spare banks
#define TOGETHER (GROUP % 128 == 0 ? 4 : GROUP % 64 == 0 ? 2 : 1)  // chunks of one scale
#define ALIGNED(bytes) (((bytes) + 15) / 16 * 16)
#if AHEAD  // which takes registers: so few that 24 warps fit
#define BOUNDS THREADS, 24 / WARPS
#else
#define BOUNDS THREADS
#endif

// Consecutive bytes of all outputs of the block.
__device__ __forceinline__ void fetch_flat(u32 to, const unsigned char* from, int bytes, int most) {
  for (int at = threadIdx.x * 16; at < bytes; at += THREADS * 16)
    copy_async(to + at, (const u16*)(from + at), max(0, min(16, most - at)));
}

// This lane's columns of a stage of x, zeros behind the last column; inputs: those of the warp's next one.
__device__ __forceinline__ void load_stage(uint2 (&low)[CHUNKS][MT], uint2 (&high)[CHUNKS][MT],
                                           const u16* (&inputs)[MT], int stage, int columns) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const bool exists = GROUP % STAGE == 0 || stage * STAGE + c * 32 < columns;
      low[c][m] = exists ? load_fresh_four(inputs[m] + c * 32) : make_uint2(0, 0);
      high[c][m] = exists ? load_fresh_four(inputs[m] + c * 32 + 16) : make_uint2(0, 0);
    }
#pragma unroll
  for (int m = 0; m < MT; m++) inputs[m] += WARPS * STAGE;
}

// The pairs of columns that codes_at has.
__device__ __forceinline__ void pairs_of_stage(u32 (&b)[CHUNKS][MT][4], uint2 (&low)[CHUNKS][MT],
                                               uint2 (&high)[CHUNKS][MT]) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int m = 0; m < MT; m++) pairs_of(b[c][m], low[c][m], high[c][m]);
}

extern "C" __global__ void __launch_bounds__(BOUNDS) int4_rows(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int first_out = blockIdx.x * STORED, first_row = blockIdx.y * ROWS;
  const int stored = num_outs / (1 + GATED), between = stored - STORED;
  const int groups = columns / GROUP, stages = (columns + STAGE - 1) / STAGE;
  const int scale_bytes = ALIGNED(OUTS * groups * SCALE_BYTES);
  const int zero_bytes = ALIGNED(OUTS * groups * ZERO_BYTES);

  const u32 base = (u32)__cvta_generic_to_shared(shared);
  unsigned char* scales = shared + RING_BYTES;
  unsigned char* zeros = scales + scale_bytes;
  const int left = (stored - first_out) * groups;
#pragma unroll
  for (int half = 0; half < 1 + GATED; half++) {
    const int in_scales = scale_bytes / (1 + GATED), in_zeros = zero_bytes / (1 + GATED);
    const u64 before = (u64)(first_out + half * stored) * groups;
    fetch_flat(base + RING_BYTES + half * in_scales, scale + before * SCALE_BYTES, in_scales,
               left * SCALE_BYTES);
    if (ZERO)
      fetch_flat(base + RING_BYTES + scale_bytes + half * in_zeros, zero + before * ZERO_BYTES, in_zeros,
                 left * ZERO_BYTES);
  }
  // Pieces of a row are turned by its number, so that lanes of all rows read different banks.
  const u32 ring = warp * SLOTS * SLOT_BYTES + row * 64;
  const u32 to = base + ring + ((part + (row >> 1)) & 3) * 16;
  const unsigned char* mine = codes + (u64)(first_out + row) * (columns / 2) + part * 16;
  const int outs_left = stored - first_out - row;
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) {
    const int stage = warp + slot * WARPS;
    if (stage < stages) fetch_codes(to + slot * SLOT_BYTES, mine, stage, columns, outs_left, between);
    end_of_copies();
  }
  wait_for_last_kernel();
  allow_next_kernel();  // in this order (int4.cuh)
  wait_for_copies_but(SLOTS - 1);
  __syncthreads();  // all threads' scales

  const u16* inputs[MT];
#pragma unroll
  for (int m = 0; m < MT; m++)  // a row that does not exist repeats the last one
    inputs[m] = x + (u64)min(first_row + m * 8 + row, num_rows - 1) * stride_x +
                warp * STAGE + part * 4;

  float acc[NT][MT][4] = {};
  uint2 low[CHUNKS][MT], high[CHUNKS][MT];
  if (AHEAD && warp < stages) load_stage(low, high, inputs, warp, columns);
  int slot = 0;
#pragma unroll 1
  for (int stage = warp; stage < stages; stage += WARPS) {
    u32 b[CHUNKS][MT][4];
    if (AHEAD) pairs_of_stage(b, low, high);
    if (!AHEAD || stage + WARPS < stages)
      load_stage(low, high, inputs, stage + AHEAD * WARPS, columns);
    wait_for_copies_but(SLOTS - 1);
    __syncwarp();  // all lanes' copies
    if (!AHEAD) pairs_of_stage(b, low, high);
    const unsigned char* held = shared + ring + slot * SLOT_BYTES + part * 4;
#pragma unroll
    for (int first = 0; first < CHUNKS; first += TOGETHER) {
      float totals[MT][4] = {};
      if (ZERO == 2) {
        const u32 one = pack(1.f, 1.f);
#pragma unroll
        for (int c = 0; c < TOGETHER; c++)
#pragma unroll
          for (int m = 0; m < MT; m++) {
            multiply(totals[m], one, one, one, one, b[first + c][m][0], b[first + c][m][1]);
            multiply(totals[m], one, one, one, one, b[first + c][m][2], b[first + c][m][3]);
          }
      }
      const int group = min((stage * STAGE + first * 32) / GROUP, groups - 1);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int place = (n * 16 + row) * groups + group, eight = 8 * groups;
        const float scale_0 = scale_of(raw_scale(scales, place));
        const float scale_1 = scale_of(raw_scale(scales, place + eight));
        const float zero_0 = zero_of(raw_zero(zeros, place));
        const float zero_1 = zero_of(raw_zero(zeros, place + eight));
        const float less_0 = MIDDLE - 8.f + (ZERO == 1 ? zero_0 : 8.f);
        const float less_1 = MIDDLE - 8.f + (ZERO == 1 ? zero_1 : 8.f);
        const u32 pair_0 = pack(less_0, less_0), pair_1 = pack(less_1, less_1);
        float sums[MT][4] = {};
#pragma unroll
        for (int c = 0; c < TOGETHER; c++) {
          const unsigned char* at = held + n * 1024 + ((first + c + (row >> 1)) & 3) * 16;
          const u32 w_0 = *(const u32*)at, w_1 = *(const u32*)(at + 512);
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            const u32 a0 = codes_at(w_0, h, pair_0), a1 = codes_at(w_1, h, pair_1);
            const u32 a2 = codes_at(w_0, h + 1, pair_0), a3 = codes_at(w_1, h + 1, pair_1);
#pragma unroll
            for (int m = 0; m < MT; m++)
              multiply(sums[m], a0, a1, a2, a3, b[first + c][m][h], b[first + c][m][h + 1]);
          }
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float sum = sums[m][i];
            if (ZERO == 2) sum -= ((i < 2 ? zero_0 : zero_1) - 8.f) * totals[m][i];
            acc[n][m][i] += (i < 2 ? scale_0 : scale_1) * sum;
          }
      }
    }
    __syncwarp();  // all lanes have read the slot
    if (stage + SLOTS * WARPS < stages)
      fetch_codes(to + slot * SLOT_BYTES, mine, stage + SLOTS * WARPS, columns, outs_left, between);
    end_of_copies();
    slot = slot + 1 == SLOTS ? 0 : slot + 1;
  }

  // Sums of the warps, [WARPS][ROWS][WIDTH], where the ring was.
  __syncthreads();
  float* partial = (float*)shared + warp * ROWS * WIDTH;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        partial[(m * 8 + part * 2 + i % 2) * WIDTH + n * 16 + row + i / 2 * 8] = acc[n][m][i];
  __syncthreads();
  for (int cell = threadIdx.x; cell < ROWS * STORED; cell += THREADS) {
    const int r = cell / STORED, c = cell % STORED, o = first_out + c;
    if (first_row + r >= num_rows || o >= stored) continue;
    const float* of_row = (const float*)shared + r * WIDTH + c;
    float sum = sum_of_parts<WARPS, PARTS>(of_row, ROWS * WIDTH), up = 0.f;
    if (GATED) up = sum_of_parts<WARPS, PARTS>(of_row + STORED, ROWS * WIDTH);
    if (BIAS) sum += widen(bias[o]);
    if (BIAS && GATED) up += widen(bias[stored + o]);
    const u32 made = GATED ? gated_pair(sum, 0.f, up, 0.f) : pack(sum, 0.f);
    out[(u64)(first_row + r) * stored + o] = (u16)(made & 0xffff);
  }
}
