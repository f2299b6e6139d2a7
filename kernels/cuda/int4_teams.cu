// Linear layer for up to 8 rows with a weight of 4 bits and groups of 128 columns: what int4_rows.cu computes,
// bit for bit.
//
// The number of outputs is a multiple of 16 NT, of columns of 2048. Whole zeros are 127 at most.
//
// Compile-time: those of int4.cuh (GROUP 128, ZERO 0 or 1), WARPS (WAYS / MINE SIDE), COLUMNS, ROWS (1, 2, 4 or
// 8: as many as there are, or more), WAYS (in which the depth is shared, 16 at most), MINE (neighbouring ways of
// a warp: 1, 2, 4 or 8), SIDE (teams of a block), SPAN (turns of a slot), SLOTS (of a team), HELD (1: x stands
// in shared memory; 2: in registers of the warps that multiply it; 0: it is loaded a turn ahead), PARTS (of
// neighbouring ways, whose sums are added first, then those of two neighbouring parts), BIAS. With GATED the
// number of outputs is a multiple of 16 NT for gate and for up, and of 16 outputs of a tile 8 are of gate and 8
// the same of up.
//
// Blocks stay: a team of WAYS / MINE warps takes tiles of 16 NT outputs one after another. In a turn a warp takes a
// stage of 128 columns of each of its ways, which stand behind each other in memory. One more warp copies
// codes, scales and zeros of all teams into rings: as many columns of a row at once as a slot has (rows of 64
// bytes, a stage, came at 2.8 TB/s whatever the shape of the blocks).
//
// Codes, scales and zeros are fetched before the kernel ahead has ended (griddepcontrol); x is read after the
// wait, and never through the read-only cache.

#include "int4.cuh"

#ifndef GATED
#define GATED 0
#endif

#define WIDE (16 * NT)
#define STORED (WIDE / (1 + GATED))
#define SHARERS (WAYS / MINE)
#define TEAM (32 * SHARERS)  // threads
#define THREADS (32 * WARPS + 32)
#define STAGES (COLUMNS / STAGE)
#define TURNS (STAGES / WAYS)
#define COUNT (TURNS * MINE)        // stages of a warp
#define PIECE (SPAN * WAYS * 64)    // bytes of a row of a slot,
#define PITCH (PIECE + 16)          // so that lanes of eight rows read different banks
#define EIGHT_SCALES (8 * STAGES * SCALE_BYTES)  // bytes of eight outputs
#define EIGHT_ZEROS (8 * STAGES * ZERO_BYTES)
#define SCALES_AT (WIDE * PITCH)  // in a slot
#define ZEROS_AT (SCALES_AT + 2 * NT * EIGHT_SCALES)
#define SLOT_BYTES (ZEROS_AT + 2 * NT * EIGHT_ZEROS)
#define WIDTH (WIDE + 4)  // of a row of partial sums: so that a warp's stores spare banks
#define SUMS (WAYS * ROWS * WIDTH)  // of a tile
#define SUMS_AT (SIDE * SLOTS * SLOT_BYTES)
#define X_AT (SUMS_AT + 2 * SIDE * SUMS * 4)
#define BARRIERS_AT (X_AT + (HELD == 1) * 2 * ROWS * COLUMNS)
#define LANDED(side, slot) (base + BARRIERS_AT + ((side) * SLOTS + (slot)) * 16)
#define READ(side, slot) (LANDED(side, slot) + 8)
#define HELD_BY_ONE ((ROWS * COLUMNS / 8 + 32 * WARPS - 1) / (32 * WARPS))  // pieces of x, of a thread,
#define HELD_AT_ONCE (HELD_BY_ONE < 10 ? HELD_BY_ONE : 10)                  // and those it loads together
#define WORDS ((COUNT + 3) / 4)  // of a lane, that hold scales of a row

constexpr int UNROLLED = HELD == 2 || COUNT * NT <= 8 ? TURNS : SPAN;  // turns: else the code stays short

// Where an output of a tile stands behind its first one. stored: outputs of all tiles.
__device__ __forceinline__ int row_of(int out, int stored) {
  return GATED ? out / 16 * 8 + out % 8 + out / 8 % 2 * stored : out;
}

__device__ __forceinline__ int first_of(int tile, int stored) {
  return min(tile * STORED, stored - STORED);
}

// What the warp does that copies.
__device__ __forceinline__ void copy_tiles(u32 base, const unsigned char* codes, const unsigned char* scale,
                                           const unsigned char* zero, int stored, int tiles) {
  const int lane = threadIdx.x & 31;
  int slot = 0, turn_of_ring = 0;
#pragma unroll 1
  for (int first = blockIdx.x; first < tiles; first += SIDE * gridDim.x) {
#pragma unroll 1
    for (int piece = 0; piece < TURNS / SPAN; piece++) {
#pragma unroll 1
      for (int side = 0; side < SIDE; side++) {
        const int tile = first + side * gridDim.x;
        if (tile >= tiles) break;
        const int first_out = first_of(tile, stored);
        const u32 landed = LANDED(side, slot), to = base + (side * SLOTS + slot) * SLOT_BYTES;
        if (turn_of_ring > 0) wait_at(READ(side, slot), (turn_of_ring - 1) & 1);
#if PROBE == 2
        if (lane == 0) arrive_at(landed);
        continue;
#endif
        if (lane == 0)
          expect_bytes(landed, WIDE * PIECE + (piece == 0 ? 2 * NT * (EIGHT_SCALES + EIGHT_ZEROS) : 0));
        __syncwarp();  // bytes are expected before they land
        if (lane < WIDE)
          copy_bulk(to + lane * PITCH,
                    (const u16*)(codes + (u64)(first_out + row_of(lane, stored)) * (COLUMNS / 2) + piece * PIECE),
                    PIECE, landed);
        if (piece == 0 && lane < 2 * NT) {
          const u64 row = first_out + row_of(lane * 8, stored);
          copy_bulk(to + SCALES_AT + lane * EIGHT_SCALES, (const u16*)(scale + row * (EIGHT_SCALES / 8)),
                    EIGHT_SCALES, landed);
          if (ZERO)
            copy_bulk(to + ZEROS_AT + lane * EIGHT_ZEROS, (const u16*)(zero + row * (EIGHT_ZEROS / 8)),
                      EIGHT_ZEROS, landed);
        }
        __syncwarp();
      }
      slot++;
      if (slot == SLOTS) slot = 0, turn_of_ring++;
    }
  }
}

// What a lane multiplies of a chunk.
__device__ __forceinline__ void load_held(u32* b, u32 at) {
  const uint4 v = load_shared(at);
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

// x into shared memory as load_held reads it: [stages][chunks][ROWS][parts][16 bytes].
__device__ __forceinline__ void hold_rows(u32 to, const u16* x, int num_rows, int stride_x) {
  const int all = num_rows * (COLUMNS / 8);
  for (int first = threadIdx.x; first < all; first += HELD_AT_ONCE * 32 * WARPS) {
    uint2 low[HELD_AT_ONCE], high[HELD_AT_ONCE];
#pragma unroll
    for (int i = 0; i < HELD_AT_ONCE; i++) {
      const int at = min(first + i * 32 * WARPS, all - 1);
      const u16* from = x + (u64)(at / (COLUMNS / 8)) * stride_x + at % (COLUMNS / 8) / 4 * 32 + at % 4 * 4;
      low[i] = load_fresh_four(from);
      high[i] = load_fresh_four(from + 16);
    }
#pragma unroll
    for (int i = 0; i < HELD_AT_ONCE; i++) {
      const int at = min(first + i * 32 * WARPS, all - 1);
      const int row = at / (COLUMNS / 8), chunk = at % (COLUMNS / 8) / 4, part = at % 4;
      u32 b[4];
      pairs_of(b, low[i], high[i]);
      store_shared(to + ((chunk * ROWS + row) * 4 + part) * 16, make_uint4(b[0], b[1], b[2], b[3]));
    }
  }
}

// This lane's columns of a stage of x.
__device__ __forceinline__ void load_stage(uint2 (&low)[CHUNKS], uint2 (&high)[CHUNKS], const u16* from) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    low[c] = load_fresh_four(from + c * 32);
    high[c] = load_fresh_four(from + c * 32 + 16);
  }
}

// Scales and zeros of an output, of stages `part`, `part` + 4... of a warp.
struct Places {
  u32 scales[WORDS], zeros[WORDS];  // zeros behind scales of 16 bits, in their words

  __device__ __forceinline__ void load(const unsigned char* scale, const unsigned char* zero, int part) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const int stage = min(i * 4 + part, COUNT - 1), group = stage / MINE * WAYS + stage % MINE;
      scales[i] = raw_scale(scale, group);
      const u32 of_zero = ZERO ? raw_zero(zero, group) : 8;
      if (SCALE == 2)
        zeros[i] = of_zero << 16;
      else
        scales[i] |= of_zero << 16;
    }
  }

  // Those of a stage, for all lanes of the row.
  __device__ __forceinline__ void show(float& by, u32& less, int stage, int row) const {
    u32 mine = scales[0], zero_of_mine = zeros[0];
#pragma unroll
    for (int i = 1; i < WORDS; i++)
      mine = chosen_bits(stage / 4 == i ? ~0u : 0u, scales[i], mine),
      zero_of_mine = chosen_bits(stage / 4 == i ? ~0u : 0u, zeros[i], zero_of_mine);
    const u32 word = __shfl_sync(0xffffffff, (int)mine, row * 4 + stage % 4);
    const u32 of_zero = SCALE == 2 ? __shfl_sync(0xffffffff, (int)zero_of_mine, row * 4 + stage % 4) : word;
    by = scale_of(SCALE == 2 ? word : word & 0xffff);
    less = byte_in_pair(of_zero, 2, MAGIC);  // MAGIC's value and the zero, which stands in the mantissas
  }
};

// Of an output of a row. sums: that of the first way; those of the others lie ROWS * WIDTH apart.
__device__ __forceinline__ float sum_of_ways(const float* sums) {
  float sum = 0.f, of_even = 0.f;
#pragma unroll
  for (int of = 0; of < PARTS; of++) {
    float of_part = 0.f;
#pragma unroll
    for (int w = of * WAYS / PARTS; w < (of + 1) * WAYS / PARTS; w++) of_part += sums[w * ROWS * WIDTH];
    if (of % 2 == 0 && PARTS > 1)
      of_even = of_part;
    else
      sum += of_even + of_part;
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) int4_teams(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int side = warp / SHARERS, first_stage = warp % SHARERS * MINE;
  const int stored = num_outs / (1 + GATED), tiles = (stored + STORED - 1) / STORED;
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  allow_next_kernel();

  if (warp == WARPS) {
    if (lane == 0) {
      for (int i = 0; i < SIDE * SLOTS; i++) {
        prepare_barrier(LANDED(0, i), 1);
        prepare_barrier(READ(0, i), SHARERS);
      }
      show_barriers();
    }
    __syncwarp();
  }
  __syncthreads();  // the barriers stand
  if (warp == WARPS) {
    copy_tiles(base, codes, scale, zero, stored, tiles);
    return;
  }

  wait_for_last_kernel();
  const u16* input = x + (u64)min(row, num_rows - 1) * stride_x + first_stage * STAGE + part * 4;
  uint2 low[MINE][CHUNKS], high[MINE][CHUNKS];
  u32 kept_x[HELD == 2 ? COUNT : 1][CHUNKS][4];
  if (HELD == 1) {
    hold_rows(base + X_AT, x, num_rows, stride_x);
    meet_among(15, 32 * WARPS);
  } else if (HELD == 2) {
#pragma unroll
    for (int s = 0; s < COUNT; s++) {
      load_stage(low[0], high[0], input + (s / MINE * WAYS + s % MINE) * STAGE);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) pairs_of(kept_x[HELD == 2 ? s : 0][c], low[0][c], high[0][c]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < MINE; j++) load_stage(low[j], high[j], input + j * STAGE);
  }

  // Of a matrix of eight rows and 16 bytes a lane has the place of a row; of four: rows, those 8 behind,
  // and both of the chunk behind.
  const u32 in_slot = side * SLOTS * SLOT_BYTES + lane % 16 * PITCH + first_stage * 64 + lane / 16 * 16;
  const u32 x_place = base + X_AT + (first_stage * CHUNKS * ROWS + row % ROWS) * 64 + part * 16;
  float* sums_of_ways = (float*)(shared + SUMS_AT) + side * 2 * SUMS;
  int slot = 0, turn_of_ring = 0, other = 0;
#pragma unroll 1
  for (int tile = blockIdx.x + side * gridDim.x; tile < tiles; tile += SIDE * gridDim.x) {
    float acc[MINE][NT][4] = {};
    Places of_row[NT], of_eighth[NT];
    wait_at(LANDED(side, slot), turn_of_ring & 1);
    const unsigned char* held = shared + (side * SLOTS + slot) * SLOT_BYTES;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const unsigned char* of_scale =
          held + SCALES_AT + n * 2 * EIGHT_SCALES + row * (EIGHT_SCALES / 8) + first_stage * SCALE_BYTES;
      const unsigned char* of_zero =
          held + ZEROS_AT + n * 2 * EIGHT_ZEROS + row * (EIGHT_ZEROS / 8) + first_stage;
      of_row[n].load(of_scale, of_zero, part);
      of_eighth[n].load(of_scale + EIGHT_SCALES, of_zero + EIGHT_ZEROS, part);
    }
    __syncwarp();  // before what the lanes give each other
#pragma unroll UNROLLED
    for (int turn = 0; turn < TURNS; turn++) {
      if (turn > 0 && turn % SPAN == 0) wait_at(LANDED(side, slot), turn_of_ring & 1);
      const u32 place = base + in_slot + slot * SLOT_BYTES;
#pragma unroll
      for (int j = 0; j < (PROBE == 1 ? 0 : MINE); j++) {
        u32 b[CHUNKS][4];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          if (HELD == 2) {
#pragma unroll
            for (int i = 0; i < 4; i++) b[c][i] = kept_x[HELD == 2 ? turn * MINE + j : 0][c][i];
          } else if (HELD == 1) {
            load_held(b[c], x_place + ((turn * WAYS + j) * CHUNKS + c) * ROWS * 64);
          } else {
            pairs_of(b[c], low[j][c], high[j][c]);
          }
        }
        if (HELD == 0)  // behind the last turn the first one again, for the next tile
          load_stage(low[j], high[j], input + ((turn + 1 < TURNS ? turn + 1 : 0) * WAYS + j) * STAGE);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          u32 w[CHUNKS][2];
#pragma unroll
          for (int c = 0; c < CHUNKS; c += 2) {
            const uint4 v =
                load_matrices(place + n * 16 * PITCH + (turn % SPAN * WAYS + j) * 64 + c * 16);
            w[c][0] = v.x, w[c][1] = v.y, w[c + 1][0] = v.z, w[c + 1][1] = v.w;
          }
          float by, by_eighth;
          u32 less, less_of_eighth;
          of_row[n].show(by, less, turn * MINE + j, row);
          of_eighth[n].show(by_eighth, less_of_eighth, turn * MINE + j, row);
          float sums[4] = {};
#pragma unroll
          for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int h = 0; h < 4; h += 2)
              multiply(sums, codes_at(w[c][0], h, less), codes_at(w[c][1], h, less_of_eighth),
                       codes_at(w[c][0], h + 1, less), codes_at(w[c][1], h + 1, less_of_eighth), b[c][h],
                       b[c][h + 1]);
#pragma unroll
          for (int i = 0; i < 4; i++) acc[j][n][i] += (i < 2 ? by : by_eighth) * sums[i];
        }
      }
      if (turn % SPAN == SPAN - 1) {
        __syncwarp();  // all lanes have read the slot
        if (lane == 0) arrive_at(READ(side, slot));
        slot++;
        if (slot == SLOTS) slot = 0, turn_of_ring++;
      }
    }

    // Sums of the ways, [WAYS][ROWS][WIDTH], of two tiles by turns.
    float* const sums_of_tile = sums_of_ways + other * SUMS;
    other ^= 1;
#pragma unroll
    for (int j = 0; j < MINE; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = part * 2 + i;
        float* partial = sums_of_tile + ((first_stage + j) * ROWS + r) * WIDTH + row;
        if (r < min(num_rows, ROWS)) {
#pragma unroll
          for (int n = 0; n < NT; n++)
            partial[n * 16] = acc[j][n][i], partial[n * 16 + 8] = acc[j][n][i + 2];
        }
      }
    meet_among(1 + side, TEAM);
    const int first_out = first_of(tile, stored);
#pragma unroll 1
    for (int cell = threadIdx.x % TEAM; cell < num_rows * STORED; cell += TEAM) {
      const int r = cell / STORED, c = cell % STORED, o = first_out + c;
      const float* of_cell = sums_of_tile + r * WIDTH + (GATED ? c / 8 * 16 + c % 8 : c);
      float sum = sum_of_ways(of_cell);
      if (BIAS) sum += widen(bias[o]);
#if GATED
      float up = sum_of_ways(of_cell + 8);
      if (BIAS) up += widen(bias[stored + o]);
      out[(u64)r * stored + o] = (u16)(gated_pair(sum, 0.f, up, 0.f) & 0xffff);
#else
      out[(u64)r * stored + o] = (u16)(pack(sum, 0.f) & 0xffff);
#endif
    }
  }
}
