// One of the two products of experts in MXFP4 for few rows, in bfloat16: what mxfp4_experts.cu computes,
// to the same bits, each row's experts by themselves.
//
// Compile-time: DOWN (the second product), TEAMS (of a block, each with a tile of 16 rows of the weight, of
// the first product 16 of gate and 16 of up), STEP (chunks fetched at once), STAGES (steps of a warp on
// their way), CHOSEN (experts a row), BIAS, CLAMPED.
//
// Blocks share the tiles of all slots evenly, a warp has 16 rows of a weight and half of the columns, and
// its codes lie one behind the other: one lane fetches a step's by two copies. The sums of a tile meet in
// shared memory.
//
// The second product fetches weights before the first one has ended (griddepcontrol), and asks the second
// cache for what its stages do not hold: the kernel that chose experts ran before that one, and is
// complete.

#include "mxfp4.cuh"

#define KINDS (DOWN ? 1 : 2)  // of rows of the weight: of gate and of up
#define TEAM (2 * KINDS)
#define WARPS (TEAM * TEAMS)
#define THREADS (32 * WARPS)
#define STAGE_BYTES (STEP * PART_BYTES)  // words of all chunks, then factors
#define SUMS (TEAM * 16)                 // of a tile
#define BARRIERS (1 + TEAMS + WARPS * STAGES)  // of the rows, of teams, of stages
#define BARRIER_BYTES ((8 * BARRIERS + 127) / 128 * 128)

// Adds the products of a chunk. words, factors: of this lane. x: this lane's row of a matrix of 16 bytes.
__device__ __forceinline__ void multiply_chunk(float* acc, u32 words, u32 factors, u32 x) {
  uint4 codes[2], rows[4];
  u32 bytes[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    codes[h] = load_shared(words + h * 512);
    bytes[h] = load_shared_word(factors + h * 32);
  }
#pragma unroll
  for (int block = 0; block < 4; block++) rows[block] = load_matrices(x + block * 64);
#pragma unroll
  for (int j = 0; j < 2; j++) {
    u32 pairs[2][2][4];  // of an even and of an odd block
#pragma unroll
    for (int h = 0; h < 2; h++)
      widened(pairs[0][h], pairs[1][h], j ? codes[h].z : codes[h].x, j ? codes[h].w : codes[h].y,
              even_factors(bytes[h]), odd_factors(bytes[h]), j);
#pragma unroll
    for (int block = 0; block < 2; block++) {
      u32(&a)[2][4] = pairs[block];
      const uint4 v = rows[2 * j + block];
      multiply(acc, a[0][0], a[1][0], a[0][1], a[1][1], v.x, v.y);
      multiply(acc, a[0][2], a[1][2], a[0][3], a[1][3], v.z, v.w);
    }
  }
}

// What a warp multiplies, one tile's behind the other's.
struct Weights {
  const unsigned char *words, *factors;  // of all experts
  int unit, last, tiles, chunks, num_experts, id;  // unit: of the tiles of all slots; id: the lane's slot's
  int kind, begin, end;  // of this warp; chunks
  int chunk;             // the next one
  u64 place;             // chunks of 16 rows before the tile's

  __device__ __forceinline__ int expert() const { return __shfl_sync(0xffffffff, id, unit / tiles); }

  // The first tile from this one on whose expert exists.
  __device__ __forceinline__ void enter() {
    for (; unit < last; unit += TEAMS) {
      const int chosen = expert();
      if ((u32)chosen >= (u32)num_experts) continue;
      place = ((u64)chosen * KINDS * tiles + kind * tiles + unit % tiles) * chunks;
      chunk = begin;
      break;
    }
  }

  // The next step, if there is one.
  __device__ __forceinline__ void fetch(u32 to, u32 barrier) {
    if (unit >= last) return;
    const int count = min(end - chunk, STEP);
    if ((threadIdx.x & 31) == 0) {
      expect_bytes(barrier, count * PART_BYTES);
      copy_bulk(to, (const u16*)(words + (place + chunk) * 1024), count * 1024, barrier);
      copy_bulk(to + STEP * 1024, (const u16*)(factors + (place + chunk) * 64), count * 64, barrier);
    }
    chunk += count;
    if (chunk == end) {
      unit += TEAMS;
      enter();
    }
  }

  // Brings what is left of this warp's part of the tile nearer.
  __device__ __forceinline__ void ask() const {
    if (unit >= last || (threadIdx.x & 31) != 0) return;
    prefetch_bulk((const u16*)(words + (place + chunk) * 1024), (end - chunk) * 1024);
    prefetch_bulk((const u16*)(factors + (place + chunk) * 64), (end - chunk) * 64);
  }
};

// By one thread.
__device__ __forceinline__ void fetch_rows(u32 to, const u16* from, int rows, int columns, int pitch,
                                           u32 barrier) {
  expect_bytes(barrier, rows * columns * 2);
  for (int row = 0; row < rows; row++)
    copy_bulk(to + row * pitch, from + (u64)row * columns, columns * 2, barrier);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_row(
    const u16* x, const u32* words, const u32* factors, const u16* bias, const int* ids,
    const float* weights, void* out, int num_slots, int num_rows, int columns, int width, int num_experts,
    float alpha, float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp / TEAM, member = warp % TEAM;
  const int tiles = width / 16, chunks = (columns + CHUNK - 1) / CHUNK, all = num_slots * tiles;
  const int begin = member % 2 ? first_half(chunks) : 0, end = member % 2 ? chunks : first_half(chunks);
  const int first = all * (int)blockIdx.x / (int)gridDim.x;
  const int last = all * ((int)blockIdx.x + 1) / (int)gridDim.x;
  const int first_row = first / tiles / (DOWN ? 1 : CHOSEN);
  const int rows = (last - 1) / tiles / (DOWN ? 1 : CHOSEN) - first_row + 1;
  const u32 base = (u32)__cvta_generic_to_shared(shared), pitch = chunks * CHUNK * 2;
  const u32 of_team = base + 8 * (1 + team), full = base + 8 * (1 + TEAMS + warp * STAGES);
  float* const sums = (float*)(shared + BARRIER_BYTES) + team * 2 * SUMS;
  unsigned char* const rings = shared + BARRIER_BYTES + TEAMS * 2 * SUMS * 4;
  unsigned char* const held = rings + WARPS * STAGES * STAGE_BYTES;  // rows, zeros behind each
  const u32 ring = (u32)__cvta_generic_to_shared(rings) + warp * STAGES * STAGE_BYTES;
  const u32 x_at = (u32)__cvta_generic_to_shared(held);
  if (threadIdx.x == 0) {
    for (int i = 0; i < BARRIERS; i++)
      prepare_barrier(base + 8 * i, i == 0 || i > TEAMS ? 1 : TEAM);
    show_barriers();
  }
  for (int row = 0; row < rows; row++)
    for (int at = columns * 2 + threadIdx.x * 4; at < pitch; at += THREADS * 4)
      *(u32*)(held + row * pitch + at) = 0;
  __syncthreads();
  if (!DOWN) {
    wait_for_last_kernel();
    allow_next_kernel();
  }

  const int id = lane < num_slots ? load_fresh_int(ids + lane) : -1;
  if (!DOWN && threadIdx.x == 0)
    fetch_rows(x_at, x + (u64)first_row * columns, rows, columns, pitch, base);
  __syncwarp();
  Weights fetched = {(const unsigned char*)words, (const unsigned char*)factors, first + team, last, tiles,
                     chunks, num_experts, id, member / 2, begin, end};
  fetched.enter();
#pragma unroll 1
  for (int stage = 0; stage < STAGES; stage++) fetched.fetch(ring + stage * STAGE_BYTES, full + 8 * stage);
  if (DOWN) fetched.ask();
  if (DOWN && threadIdx.x == 0) {
    wait_for_last_kernel();
    allow_next_kernel();
    fetch_rows(x_at, x + (u64)first_row * columns, rows, columns, pitch, base);
  }
  __syncwarp();

  int stage = 0, turn = 0, set = 0;  // set: of the sums
#pragma unroll 1
  for (int unit = first + team; unit < last; unit += TEAMS) {
    const int slot = unit / tiles, o = unit % tiles * 16 + lane;
    const int expert = __shfl_sync(0xffffffff, id, slot);
    if ((u32)expert >= (u32)num_experts) continue;
    const bool finishes = member == 0 && lane < 16;
    float of_out = 0.f, of_up = 0.f, weight = 0.f;
    if (finishes) {
      of_out = bias_of(bias, expert, o, width, 0);
      if (!DOWN) of_up = bias_of(bias, expert, o, width, 1);
      if (DOWN) weight = load_float_from_l2(weights + slot);
    }
    const u32 row = x_at + (slot / (DOWN ? 1 : CHOSEN) - first_row) * pitch + (lane >> 3) * 16;
    float* const to_sums = sums + set * SUMS + member * 16 + (lane >> 2);
    wait_at(base, 0);
    float acc[4] = {};
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += STEP) {
      const u32 words_at = ring + stage * STAGE_BYTES + lane * 16, x_at = row + chunk * 256;
      const u32 factors_at = ring + stage * STAGE_BYTES + STEP * 1024 + (lane >> 2) * 4;
      wait_at(full + 8 * stage, turn);
      if (end - chunk >= STEP) {
#pragma unroll
        for (int k = 0; k < STEP; k++)
          multiply_chunk(acc, words_at + k * 1024, factors_at + k * 64, x_at + k * 256);
      } else {
#pragma unroll 1
        for (int k = 0; k < end - chunk; k++)
          multiply_chunk(acc, words_at + k * 1024, factors_at + k * 64, x_at + k * 256);
      }
      __syncwarp();  // all lanes have read the stage
      fetched.fetch(ring + stage * STAGE_BYTES, full + 8 * stage);
      if (++stage == STAGES) stage = 0, turn ^= 1;
    }
    if (lane % 4 == 0) to_sums[0] = acc[0], to_sums[8] = acc[2];
    __syncwarp();  // all lanes have written
    if (lane == 0) arrive_at(of_team);
    wait_at(of_team, set);
    if (finishes) {
      const float* const of = sums + set * SUMS + lane;
      finish(of[0] + of[16], DOWN ? 0.f : of[32] + of[48], of_out, of_up, weight, out,
             place_of(slot, num_rows, width) + o, alpha, limit);
    }
    set ^= 1;
  }
}
