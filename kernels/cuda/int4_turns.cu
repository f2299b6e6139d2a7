// Linear layer for up to 8 rows with a weight of 4 bits and groups of 128 columns: what int4_rows.cu computes,
// bit for bit.
//
// The number of outputs is a multiple of 16, and there are as many as a block has, or more; of columns it is a
// multiple of 2048.
//
// Compile-time: those of int4.cuh (NT 1, GROUP 128, ZERO 0 or 1: 127 at most), WARPS (WAYS / MINE SIDE), COLUMNS,
// ROWS (1, 2, 4 or 8: as many as there are, or more), WAYS (in which the depth is shared, 16 at most), MINE
// (neighbouring ways of a warp: 1, 2, 4 or 8), SIDE (tiles of 16 outputs that a block has beside each other),
// LINE (stages of a slot: MINE or a part of it, 4 at most), SLOTS (of a warp whose codes are on their way),
// EARLY (slots whose codes are copied while the kernel ahead may still run), PARTS (of neighbouring ways, whose
// sums are added first, then those of two neighbouring parts), BIAS. With GATED the number of outputs is a
// multiple of 8 for gate and for up, and of 16 outputs of a tile 8 are of gate and 8 the same of up.
//
// A block computes 16 SIDE outputs; WAYS / MINE warps share the depth of 16 of them. In a turn a warp takes a
// stage of 128 columns of each of its ways, which lie behind each other in memory. Codes go through a ring in
// shared memory that each warp has for itself, LINE stages of a row at once: rows of 64 bytes came at 3.2 TB/s
// with nothing multiplied.
//
// Codes, scales and zeros are fetched before the kernel ahead has ended (griddepcontrol); x is read after the
// wait, and never through the read-only cache. A multiprocessor's requests are answered in turn: x is asked for
// behind EARLY slots and ahead of the others, as nothing is multiplied before it has come.

#include "int4.cuh"

#define WIDE 16  // outputs of a tile
#define OUTS (WIDE * SIDE)
#define STORED (OUTS / (1 + GATED))
#define SHARERS (WAYS / MINE)
#define THREADS (32 * WARPS)
#define STAGES (COLUMNS / STAGE)
#define TURNS (STAGES / WAYS)
#define PITCH (64 * LINE)  // bytes of a row of a slot
#define SLOT_BYTES (PITCH * WIDE)
#define LINES (8 / LINE)  // rows that a warp copies at once,
#define LANES (4 * LINE)  // and lanes of a row
#define WIDTH (OUTS + 4)  // of a row of partial sums: so that a warp's stores spare banks
#define HELD_BY_ONE ((ROWS * COLUMNS / 8 + THREADS - 1) / THREADS)  // pieces of x, of a thread,
#define HELD_AT_ONCE (HELD_BY_ONE < 12 ? HELD_BY_ONE : 12)          // and those it loads together
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SUM_BYTES (4 * WAYS * ROWS * WIDTH)  // few have a place of their own, others that of the ring
#define RING_BYTES (SUM_BYTES <= 8192 ? SLOT_BYTES * SLOTS * WARPS : LARGER(SLOT_BYTES * SLOTS * WARPS, SUM_BYTES))
#define PADDED(bytes) (((bytes) / 16 | 1) * 16)  // so that lanes of eight outputs read different banks
#define SCALE_PITCH PADDED(STAGES * SCALE_BYTES)
#define ZERO_PITCH PADDED(STAGES * ZERO_BYTES)
#define SCALES_AT RING_BYTES
#define ZEROS_AT (SCALES_AT + SCALE_PITCH * OUTS)
#define X_AT (ZEROS_AT + ZERO_PITCH * OUTS * (ZERO > 0))
#define SUMS_AT (SUM_BYTES <= 8192 ? X_AT + 2 * ROWS * COLUMNS : 0)

constexpr int UNROLLED = TURNS * MINE <= 8 ? TURNS : 1;  // turns: the code stays short

// Where an output of the block lies behind its first one. stored: outputs of all blocks.
__device__ __forceinline__ int row_of(int out, int stored) {
  return GATED ? out / 16 * 8 + out % 8 + out / 8 % 2 * stored : out;
}

// Rows of all outputs of the block.
__device__ __forceinline__ void fetch_places(u32 to, const unsigned char* from, int bytes, int pitch,
                                             int stored) {
  const int pieces = bytes / 16;
  for (int at = threadIdx.x; at < pieces * OUTS; at += THREADS) {
    const int out = at / pieces, piece = at % pieces * 16;
    copy_async(to + out * pitch + piece, (const u16*)(from + (u64)row_of(out, stored) * bytes + piece), 16);
  }
}

// Pieces of a row of a slot change places by its number, so that lanes of eight rows read different banks.
__device__ __forceinline__ int turned(int row, int piece) {
  return LINE == 1 ? piece ^ (row >> 1 & 3) : piece ^ (row & 7);
}

// A slot of codes, from the copy E on. from: this lane's row and piece; up: the same, of up; to: their place in
// a slot, of the first copies.
template <int E = 0>
__device__ __forceinline__ void fetch_slot(const u32 (&to)[LINE], u32 slot, const unsigned char* from,
                                           const unsigned char* up) {
  constexpr int OUT = E * LINES, ROW = GATED ? OUT / 16 * 8 + OUT % 8 : OUT;
  copy_async_behind<OUT * PITCH, ROW * (COLUMNS / 2)>(
      to[E % LINE] + slot, (const u16*)(GATED && OUT / 8 % 2 ? up : from));
  if constexpr (OUT + LINES < WIDE) fetch_slot<E + 1>(to, slot, from, up);
}

// What a lane multiplies of a chunk.
__device__ __forceinline__ void load_held(u32* b, u32 at) {
  const uint4 v = load_shared(at);
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

// Pieces of x of a thread, from one on: 4 columns of a row and those 16 behind.
struct Pieces {
  uint2 low[HELD_AT_ONCE], high[HELD_AT_ONCE];

  __device__ __forceinline__ void load(const u16* x, int first, int all, int stride_x) {
#pragma unroll
    for (int i = 0; i < HELD_AT_ONCE; i++) {
      const int at = min(first + i * THREADS, all - 1);
      const u16* from = x + (u64)(at / (COLUMNS / 8)) * stride_x + at % (COLUMNS / 8) / 4 * 32 + at % 4 * 4;
      low[i] = load_fresh_four(from);
      high[i] = load_fresh_four(from + 16);
    }
  }

  // As load_held reads them: [stages][chunks][ROWS][parts][16 bytes].
  __device__ __forceinline__ void store(u32 to, int first, int all) {
#pragma unroll
    for (int i = 0; i < HELD_AT_ONCE; i++) {
      const int at = min(first + i * THREADS, all - 1);
      const int row = at / (COLUMNS / 8), chunk = at % (COLUMNS / 8) / 4, part = at % 4;
      u32 b[4];
      pairs_of(b, low[i], high[i]);
      store_shared(to + ((chunk * ROWS + row) * 4 + part) * 16, make_uint4(b[0], b[1], b[2], b[3]));
    }
  }
};

// Stages from a warp's first one to that of a slot.
__device__ __forceinline__ constexpr int behind_of(int slot) {
  return slot * LINE / MINE * WAYS + slot * LINE % MINE;
}

// Neighbouring bytes, 1 to 16 of them, at a multiple of their number.
template <int BYTES>
__device__ __forceinline__ void load_words(u32* words, const unsigned char* at) {
  if constexpr (BYTES == 1) words[0] = *at;
  if constexpr (BYTES == 2) words[0] = *(const u16*)at;
  if constexpr (BYTES == 4) words[0] = *(const u32*)at;
  if constexpr (BYTES == 8) words[0] = ((const uint2*)at)->x, words[1] = ((const uint2*)at)->y;
  if constexpr (BYTES >= 16) {
    const uint4 v = *(const uint4*)at;
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  if constexpr (BYTES > 16) load_words<BYTES - 16>(words + 4, at + 16);
}

// The scales and zeros of an output for a warp's stages of a turn.
struct Places {
  u32 scales[(MINE * SCALE_BYTES + 3) / 4], zeros[(MINE + 3) / 4];

  __device__ __forceinline__ void load(const unsigned char* scale, const unsigned char* zero) {
    load_words<MINE * SCALE_BYTES>(scales, scale);
    if (ZERO) load_words<MINE>(zeros, zero);
  }

  __device__ __forceinline__ float by(int j) const {
    return scale_of(SCALE == 2 ? scales[j] : j % 2 ? scales[j / 2] >> 16 : scales[j / 2] & 0xffff);
  }

  // MAGIC's value and the zero, twice: the zero is in the mantissas.
  __device__ __forceinline__ u32 less(int j) const {
    return ZERO ? byte_in_pair(zeros[j / 4], j % 4, MAGIC) : MAGIC | 0x80008;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) int4_turns(
    const u16* x, const unsigned char* codes, const unsigned char* scale, const unsigned char* zero,
    const u16* bias, u16* out, int num_rows, int num_outs, int columns, int stride_x) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const int side = warp / SHARERS, first_stage = warp % SHARERS * MINE;
  const int stored = num_outs / (1 + GATED);
  const int first_out = min((int)blockIdx.x * STORED, stored - STORED);  // the last blocks may overlap

  const u32 base = (u32)__cvta_generic_to_shared(shared);
  const u32 ring = base + warp * SLOTS * SLOT_BYTES;
  fetch_places(base + SCALES_AT, scale + (u64)first_out * (STAGES * SCALE_BYTES), STAGES * SCALE_BYTES,
               SCALE_PITCH, stored);
  if (ZERO)
    fetch_places(base + ZEROS_AT, zero + (u64)first_out * STAGES, STAGES * ZERO_BYTES, ZERO_PITCH, stored);
  u32 to[LINE];
#pragma unroll
  for (int e = 0; e < LINE; e++)
    to[e] = ring + lane / LANES * PITCH + turned(lane / LANES + e * LINES, lane % LANES) * 16;
  const unsigned char* mine = codes + (u64)(first_out + side * WIDE / (1 + GATED) + lane / LANES) *
                                          (COLUMNS / 2) + first_stage * 64 + lane % LANES * 16;
  const u64 to_up = GATED ? (u64)stored * (COLUMNS / 2) : 0;
#pragma unroll
  for (int slot = 0; slot < EARLY && slot * LINE < TURNS * MINE; slot++)
    fetch_slot(to, slot * SLOT_BYTES, mine + behind_of(slot) * 64, mine + behind_of(slot) * 64 + to_up);
  wait_for_last_kernel();
  allow_next_kernel();  // in this order (int4.cuh)
  const int pieces = num_rows * (COLUMNS / 8);
  Pieces of_x;
  of_x.load(x, threadIdx.x, pieces, stride_x);
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) {
    if (slot >= EARLY && slot * LINE < TURNS * MINE)
      fetch_slot(to, slot * SLOT_BYTES, mine + behind_of(slot) * 64, mine + behind_of(slot) * 64 + to_up);
    end_of_copies();
  }
  of_x.store(base + X_AT, threadIdx.x, pieces);
  for (int first = threadIdx.x + HELD_AT_ONCE * THREADS; first < pieces; first += HELD_AT_ONCE * THREADS) {
    of_x.load(x, first, pieces, stride_x);
    of_x.store(base + X_AT, first, pieces);
  }
  wait_for_copies_but(SLOTS - 1);
  __syncthreads();  // all threads' scales, and x

  // Of a matrix of eight rows and 16 bytes a lane has the place of a row; of four: rows, those 8 behind,
  // and both of the chunk behind.
  const u32 place = ring + lane % 16 * PITCH + turned(lane % 8, lane / 16) * 16;
  const u32 x_place = base + X_AT + (first_stage * CHUNKS * ROWS + row % ROWS) * 64 + part * 16;
  const unsigned char* scales =
      shared + SCALES_AT + (side * WIDE + row) * SCALE_PITCH + first_stage * SCALE_BYTES;
  const unsigned char* zeros = shared + ZEROS_AT + (side * WIDE + row) * ZERO_PITCH + first_stage;

  float acc[MINE][4] = {};
  u32 slot = 0;  // bytes behind the first one
#pragma unroll UNROLLED
  for (int turn = 0; turn < TURNS; turn++) {
    const unsigned char* of_scale = scales + turn * WAYS * SCALE_BYTES;
    const unsigned char* of_zero = zeros + turn * WAYS;
    Places of_row, of_eighth;
    of_row.load(of_scale, of_zero);
    of_eighth.load(of_scale + 8 * SCALE_PITCH, of_zero + 8 * ZERO_PITCH);
#pragma unroll
    for (int j = 0; j < MINE; j++) {
      if (j % LINE == 0) {
        wait_for_copies_but(SLOTS - 1);
        __syncwarp();  // all lanes' copies
      }
      u32 b[CHUNKS][4], w[CHUNKS][2];
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) load_held(b[c], x_place + ((turn * WAYS + j) * CHUNKS + c) * ROWS * 64);
#pragma unroll
      for (int c = 0; c < CHUNKS; c += 2) {
        const uint4 v = load_matrices((place + slot) ^ (j % LINE * CHUNKS + c) * 16);
        w[c][0] = v.x, w[c][1] = v.y, w[c + 1][0] = v.z, w[c + 1][1] = v.w;
      }
      const u32 less = of_row.less(j), less_of_eighth = of_eighth.less(j);
      float sums[4] = {};
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int h = 0; h < 4; h += 2)
          multiply(sums, codes_at(w[c][0], h, less), codes_at(w[c][1], h, less_of_eighth),
                   codes_at(w[c][0], h + 1, less), codes_at(w[c][1], h + 1, less_of_eighth), b[c][h],
                   b[c][h + 1]);
#pragma unroll
      for (int i = 0; i < 4; i++) acc[j][i] += (i < 2 ? of_row.by(j) : of_eighth.by(j)) * sums[i];
      if (j % LINE == LINE - 1) {
        __syncwarp();  // all lanes have read the slot
        const int next = j + 1 - LINE + SLOTS * LINE;  // of the warp's stages from this turn on
        if (turn + next / MINE < TURNS) {
          const int behind = (turn + next / MINE) * WAYS + next % MINE;
          fetch_slot(to, slot, mine + behind * 64, mine + behind * 64 + to_up);
        }
        end_of_copies();
        slot = slot + SLOT_BYTES == SLOTS * SLOT_BYTES ? 0 : slot + SLOT_BYTES;
      }
    }
  }

  // Sums of the ways, [WAYS][ROWS][WIDTH].
  float* const sums_of_ways = (float*)(shared + SUMS_AT);
  if (SUMS_AT == 0) __syncthreads();  // all warps have read their rings
#pragma unroll
  for (int j = 0; j < MINE; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = part * 2 + i;
      float* partial = sums_of_ways + ((first_stage + j) * ROWS + r) * WIDTH + side * WIDE + row;
      if (r < min(num_rows, ROWS)) partial[0] = acc[j][i], partial[8] = acc[j][i + 2];
    }
  __syncthreads();
  for (int cell = threadIdx.x; cell < num_rows * STORED; cell += THREADS) {
    const int r = cell / STORED, c = cell % STORED, o = first_out + c;
    const float* of_row = sums_of_ways + r * WIDTH + (GATED ? c / 8 * 16 + c % 8 : c);
    float sum = sum_of_parts<WAYS, PARTS>(of_row, ROWS * WIDTH), up = 0.f;
    if (GATED) up = sum_of_parts<WAYS, PARTS>(of_row + 8, ROWS * WIDTH);
    if (BIAS) sum += widen(bias[o]);
    if (BIAS && GATED) up += widen(bias[stored + o]);
    const u32 made = GATED ? gated_pair(sum, 0.f, up, 0.f) : pack(sum, 0.f);
    out[(u64)r * stored + o] = (u16)(made & 0xffff);
  }
}
