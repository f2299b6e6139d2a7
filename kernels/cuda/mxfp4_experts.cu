// One of the two products of experts in MXFP4: what packed_triton.py computes, of weights as
// kernels/linear/mxfp4_words.py lays them out, in bfloat16.
//
// Compile-time: DOWN (the second product), WARPS (each with a tile of its own: 32 rows of the weight, of the
// first product 16 of gate and 16 of up), STAGES (chunks of a warp on their way), PASS (eights of an
// expert's rows multiplied at once), X_STAGES (steps of the rows on their way), CHOSEN (experts a row),
// BIAS, CLAMPED.
//
// Blocks count which experts are chosen, and share all tiles of these evenly. Of each expert of its
// share a block's warps take a tile a round: a code is fetched and widened once for up to 8 PASS rows,
// and only eights of rows that exist are multiplied. Further rows are a further pass. Weights go through
// a ring that each warp has for itself, from one tile to the next; one more warp fetches steps of the
// rows, which all share.
//
// The sum of half of the columns is one thread's, over these in their order, whatever other rows there are.
//
// The second product counts, and fetches weights, before the first one has ended (griddepcontrol): the
// kernel that chose experts ran before that one, and is complete.

#include "mxfp4.cuh"

#define THREADS (32 * (WARPS + 1))
#define NT 2  // parts of 16 rows of the weight
#define OUTS (DOWN ? 32 : 16)
#define STAGE_BYTES (NT * PART_BYTES)
#define ROWS (8 * PASS)
#define X_CHUNKS 2                        // of a step
#define X_PITCH (X_CHUNKS * CHUNK * 2 + 16)  // bytes: eight rows read different banks
#define X_BYTES (ROWS * X_PITCH)
#define BARRIER_BYTES 128
#define HELD_BYTES (NT * PASS * 4 * 32 * 4)  // of a warp: sums of the first half

#include "mxfp4_share.cuh"

// A thread's codes and factors of a chunk of a tile.
struct Codes {
  uint4 words[NT][2];
  u32 factors[NT][2];

  __device__ __forceinline__ void load(u32 stage) {
    const int lane = threadIdx.x & 31, group = lane >> 2;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 from = stage + n * PART_BYTES;
        words[n][h] = load_shared(from + h * 512 + lane * 16);
        factors[n][h] = load_shared_word(from + 1024 + h * 32 + group * 4);
      }
  }
};

// Adds the products of a chunk and of N eights of rows. x: this lane's row of a matrix of 16 bytes.
// halves: of the chunk that have columns.
template <int N>
__device__ __forceinline__ void multiply_chunk(float (&acc)[NT][N][4], const Codes& codes, u32 x,
                                               int halves) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (j == halves) break;
    u32 pairs[2][NT][2][4];  // of an even and of an odd block
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4 v = codes.words[n][h];
        const u32 bytes = codes.factors[n][h];
        widened(pairs[0][n][h], pairs[1][n][h], j ? v.z : v.x, j ? v.w : v.y, even_factors(bytes),
                odd_factors(bytes), j);
      }
#pragma unroll
    for (int block = 0; block < 2; block++)
#pragma unroll
      for (int t = 0; t < N; t++) {
        const uint4 v = load_matrices(x + t * 8 * X_PITCH + j * 128 + block * 64);
#pragma unroll
        for (int q = 0; q < 4; q += 2)
#pragma unroll
          for (int n = 0; n < NT; n++) {
            u32(&a)[2][4] = pairs[block][n];
            multiply(acc[n][t], a[0][q], a[1][q], a[0][q + 1], a[1][q + 1], q ? v.z : v.x, q ? v.w : v.y);
          }
      }
  }
}

// Keeps a thread's sums of the first half of the columns, and begins with the others; or adds these.
template <int N>
__device__ __forceinline__ void keep_or_add(float (&acc)[NT][N][4], float* held, bool adds) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& sum = held[((n * N + t) * 4 + i) * 32];
        if (adds) {
          acc[n][t][i] = sum + acc[n][t][i];
        } else {
          sum = acc[n][t][i];
          acc[n][t][i] = 0.f;
        }
      }
}

// What the outputs of a tile are made of.
struct Outputs {
  const u16* bias;
  const float* weights;
  void* out;
  int num_rows, width, expert;
  float alpha, limit;

  // slots: those of the pass, of which there are `have`.
  template <int N>
  __device__ __forceinline__ void finish_tile(float (&acc)[NT][N][4], int tile, const int* slots,
                                              int have) const {
    const int lane = threadIdx.x & 31, o = tile * OUTS + (lane >> 2);
    float of_outs[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        of_outs[n][i] = bias_of(bias, expert, o + (DOWN ? n : 0) * 16 + i * 8, width, DOWN ? 0 : n);
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int r = t * 8 + (lane & 3) * 2 + k;
        if (r >= have) continue;
        const int slot = slots[r];
        const float weight = DOWN ? load_float_from_l2(weights + slot) : 0.f;
        const u64 at = place_of(slot, num_rows, width) + o;
#pragma unroll
        for (int n = 0; n < (DOWN ? NT : 1); n++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            finish(acc[n][t][i * 2 + k], acc[1][t][i * 2 + k], of_outs[n][i], of_outs[1][i], weight, out,
                   at + n * 16 + i * 8, alpha, limit);
      }
  }
};

// Steps of the rows, in shared memory.
struct Steps {
  u32 at, full, empty;
  int stage, turn;

  __device__ __forceinline__ void next() {
    if (++stage == X_STAGES) stage = 0, turn ^= 1;
  }
};

// All steps of a pass's rows, by one warp, a lane a row.
__device__ __forceinline__ void fetch_rows(Steps& steps, const u16* x, int columns, const int* slots,
                                           int have) {
  const int lane = threadIdx.x & 31, slot = slots[min(lane, have - 1)];
  const u16* row = x + (u64)(DOWN ? slot : slot / CHOSEN) * columns;
#pragma unroll 1
  for (int first = 0; first < columns; first += X_CHUNKS * CHUNK) {
    const int bytes = min(columns - first, X_CHUNKS * CHUNK) * 2;
    const u32 full = steps.full + 8 * steps.stage;
    wait_at(steps.empty + 8 * steps.stage, steps.turn ^ 1);
    if (lane == 0) expect_bytes(full, have * bytes);
    __syncwarp();
    if (lane < have)
      copy_bulk(steps.at + steps.stage * X_BYTES + lane * X_PITCH, row + first, bytes, full);
    steps.next();
  }
}

// The next tile of a warp, or its turn without one (-1).
template <int N>
__device__ __forceinline__ void multiply_tile(Weights& fetched, Steps& steps, const Outputs& outputs,
                                              u32 ring, float* held, int& slot, int tile, int columns,
                                              const int* slots, int have) {
  const int lane = threadIdx.x & 31;
  const bool exists = tile >= 0;
  const u32 row = steps.at + (lane & 7) * X_PITCH + (lane >> 3) * 16;
  float acc[NT][N][4] = {};
  const int last_of_half = (first_half((columns + CHUNK - 1) / CHUNK) - 1) * CHUNK;
#pragma unroll 1
  for (int first = 0; first < columns; first += X_CHUNKS * CHUNK) {
    wait_at(steps.full + 8 * steps.stage, steps.turn);
    const int end = min(columns - first, X_CHUNKS * CHUNK);
#pragma unroll 1
    for (int k = 0; exists && k < end; k += CHUNK) {
      wait_for_copies_but(STAGES - 1);
      __syncwarp();  // all lanes' copies
      Codes codes;
      codes.load(ring + slot * STAGE_BYTES);
      __syncwarp();  // all lanes have read the stage
      fetched.fetch(ring + slot * STAGE_BYTES);
      multiply_chunk<N>(acc, codes, row + steps.stage * X_BYTES + k * 2, end - k < CHUNK ? 1 : 2);
      if (++slot == STAGES) slot = 0;
      if (first + k == last_of_half) keep_or_add<N>(acc, held, false);
    }
    __syncwarp();
    if (lane == 0) arrive_at(steps.empty + 8 * steps.stage);
    steps.next();
  }
  if (!exists) return;
  keep_or_add<N>(acc, held, true);
  outputs.finish_tile<N>(acc, tile, slots, have);
}

// For as many eights of rows as there are.
template <int N>
__device__ __forceinline__ void multiply_eights(Weights& fetched, Steps& steps, const Outputs& outputs,
                                                u32 ring, float* held, int& slot, int tile,
                                                int columns, const int* slots, int have) {
  if constexpr (N < PASS)
    if (have > 8 * N)
      return multiply_eights<N + 1>(fetched, steps, outputs, ring, held, slot, tile, columns, slots, have);
  multiply_tile<N>(fetched, steps, outputs, ring, held, slot, tile, columns, slots, have);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_experts(
    const u16* x, const u32* words, const u32* factors, const u16* bias, const int* ids,
    const float* weights, void* out, int num_slots, int num_rows, int columns, int width, int num_experts,
    float alpha, float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x >> 5;
  unsigned char* const rings = shared + BARRIER_BYTES + X_STAGES * X_BYTES;
  unsigned char* const all_held = rings + WARPS * STAGES * STAGE_BYTES;
  float* const held = (float*)(all_held + warp * HELD_BYTES) + (threadIdx.x & 31);
  int* const counts = (int*)(all_held + WARPS * HELD_BYTES);  // of experts
  int* const ranks = counts + num_experts;                    // of slots, and their experts
  int* const experts = ranks + num_slots;                     // of this block
  int* const slots = experts + num_experts;                   // of those, in turn
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  Steps steps = {base + BARRIER_BYTES, base, base + 8 * X_STAGES, 0, 0};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < X_STAGES; stage++) {
      prepare_barrier(steps.full + 8 * stage, 1);
      prepare_barrier(steps.empty + 8 * stage, WARPS);
    }
    show_barriers();
  }
  for (int expert = threadIdx.x; expert < num_experts; expert += THREADS) counts[expert] = 0;
  __syncthreads();
  if (!DOWN) {
    wait_for_last_kernel();
    allow_next_kernel();
  }

  for (int slot = threadIdx.x; slot < num_slots; slot += THREADS) {
    const int expert = load_fresh_int(ids + slot);
    const bool exists = (u32)expert < (u32)num_experts;  // else the slot is passed over
    ranks[slot] = exists ? expert << 16 | atomicAdd(counts + expert, 1) : -1;
  }
  __syncthreads();
  const int tiles = width / OUTS, all = count_chosen(counts, num_experts) * tiles, block = blockIdx.x;
  const Share share = {all * block / (int)gridDim.x, all * (block + 1) / (int)gridDim.x, tiles};
  const int own = share.experts();
  for (int number = warp; number < own; number += WARPS + 1)
    experts[number] = chosen_expert(counts, num_experts, share.first_expert() + number);
  __syncthreads();

  const u32 ring = (u32)__cvta_generic_to_shared(rings) + warp * STAGES * STAGE_BYTES;
  Weights fetched = {words, factors, share, experts, counts, own, width, (columns + CHUNK - 1) / CHUNK};
  if (warp < WARPS) {
    fetched.enter();
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) fetched.fetch(ring + slot * STAGE_BYTES);
  }
  for (int slot = threadIdx.x; slot < num_slots; slot += THREADS)
    for (int number = 0, before = 0; number < own; before += counts[experts[number++]])
      if (ranks[slot] >> 16 == experts[number]) slots[before + (ranks[slot] & 0xffff)] = slot;
  __syncthreads();

  if (warp == WARPS && DOWN) {
    wait_for_last_kernel();
    allow_next_kernel();
  }
  int slot = 0, before = 0;  // of the ring; slots of experts before
#pragma unroll 1
  for (int number = 0; number < own; number++) {
    const Part part(share, number);
    const int expert = experts[number], count = counts[expert];
    const Outputs outputs = {bias, weights, out, num_rows, width, expert, alpha, limit};
#pragma unroll 1
    for (int first = part.first; first < part.last; first += part.at_once)
#pragma unroll 1
      for (int start = 0; start < count; start += ROWS) {
        const int* const of_pass = slots + before + start;
        const int have = min(count - start, ROWS);
        const bool exists = warp < part.at_once && first + warp < part.last;
        if (warp == WARPS)
          fetch_rows(steps, x, columns, of_pass, have);
        else
          multiply_eights<1>(fetched, steps, outputs, ring, held, slot, exists ? first + warp : -1,
                             columns, of_pass, have);
      }
    before += count;
  }
}
