// One of the two products of experts in MXFP4 for more rows than mxfp4_rows.cu takes: what
// packed_triton.py computes, of weights as kernels/linear/mxfp4_words.py lays them out, in bfloat16.
//
// Compile-time: DOWN (the second product), NT (parts of 16 rows of the weight a tile; of the first
// product every second one is of up), WARPS (each with a tile of its own), STAGES (chunks of a warp on
// their way), PASS (eights of an expert's rows multiplied at once), TOGETHER (blocks of a
// multiprocessor), CHOSEN (experts a row), BIAS, CLAMPED.
//
// The blocks of a row of the grid share the tiles of an expert evenly, and each of their warps takes a
// tile a round: a code is fetched and widened once for up to 8 PASS rows, and only eights of rows that
// exist are multiplied. Further rows are a further pass. Weights go through a ring that each warp has
// for itself, from one tile to the next; one more warp fetches steps of the rows, which all share.
//
// A sum is one thread's, over all columns in their order, whatever stands beside it.
//
// Weights are fetched before the kernel ahead has ended (griddepcontrol); the second product finds its
// rows then too: the kernel that chose experts stands before the first one, and is complete.

#include "mxfp4.cuh"

#define THREADS (32 * (WARPS + 1))
#define OUTS (DOWN ? 16 * NT : 8 * NT)
#define STAGE_BYTES (NT * PART_BYTES)
#define ROWS (8 * PASS)
#define X_STAGES 3
#define X_CHUNKS 2                        // of a step
#define X_PITCH (X_CHUNKS * CHUNK * 2 + 16)  // bytes: eight rows read different banks
#define X_BYTES (ROWS * X_PITCH)
#define BARRIER_BYTES 128

// Codes of a warp's tiles, in the order in which they are multiplied.
struct Weights {
  const u32 *words, *factors;  // of the expert
  int width, chunks;
  int tile, last, stride;  // the tile to be fetched, that behind the last one
  int chunk;
  int rows, count;  // before its pass, and of all
  u32 words_at, factors_at;

  // Chunks of 16 rows ahead of part n of a tile: of gate and up in turn.
  __device__ __forceinline__ u32 chunks_before(int n) const {
    return DOWN ? n * chunks : n / 2 * chunks + n % 2 * (width / 16) * chunks;
  }

  __device__ __forceinline__ void begin() {
    const int lane = threadIdx.x & 31;
    const u32 before = tile * (OUTS / 16) * chunks;
    chunk = 0;
    words_at = before * 256 + lane * 4;
    factors_at = (before + chunks_before(lane / 4)) * 16 + lane % 4 * 4;
  }

  // The next chunk, if there is one.
  __device__ __forceinline__ void fetch(u32 to) {
    const int lane = threadIdx.x & 31;
    if (chunk == chunks) {
      rows += ROWS;
      if (rows >= count) rows = 0, tile += stride;
      begin();
    }
    if (tile < last) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const u32* from = words + chunks_before(n) * 256 + words_at;
#pragma unroll
        for (int h = 0; h < 2; h++)
          copy_async(to + n * PART_BYTES + h * 512 + lane * 16, (const u16*)(from + h * 128), 16);
      }
      if (lane < 4 * NT)
        copy_async(to + lane / 4 * PART_BYTES + 1024 + lane % 4 * 16,
                   (const u16*)(factors + factors_at), 16);
      words_at += 256, factors_at += 16, chunk++;
    }
    end_of_copies();
  }
};

// A thread's codes and factors of a chunk of NT parts of 16 rows of the weight.
struct Codes {
  uint4 words[NT][2];
  u32 factors[NT][2];

  __device__ __forceinline__ void load(const unsigned char* stage) {
    const int lane = threadIdx.x & 31, group = lane >> 2;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const unsigned char* from = stage + n * PART_BYTES;
        words[n][h] = *(const uint4*)(from + h * 512 + lane * 16);
        factors[n][h] = *(const u32*)(from + 1024 + h * 32 + group * 4);
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
        of_outs[n][i] = bias_of(bias, expert, o + (DOWN ? n : n / 2) * 16 + i * 8, width, DOWN ? 0 : n % 2);
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
        for (int n = 0; n < NT; n += DOWN ? 1 : 2)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int up = DOWN ? n : n + 1;
            finish(acc[n][t][i * 2 + k], acc[up][t][i * 2 + k], of_outs[n][i], of_outs[up][i], weight, out,
                   at + (DOWN ? n : n / 2) * 16 + i * 8, alpha, limit);
          }
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

// The next tile of a warp, or its turn without one.
template <int N>
__device__ __forceinline__ void multiply_tile(Weights& fetched, Steps& steps, const Outputs& outputs,
                                              unsigned char* ring, int& slot, int tile, int columns,
                                              const int* slots, int have) {
  const int lane = threadIdx.x & 31;
  const bool exists = tile < fetched.last;
  const u32 to = (u32)__cvta_generic_to_shared(ring);
  const u32 row = steps.at + (lane & 7) * X_PITCH + (lane >> 3) * 16;
  float acc[NT][N][4] = {};
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
      fetched.fetch(to + slot * STAGE_BYTES);
      multiply_chunk<N>(acc, codes, row + steps.stage * X_BYTES + k * 2, end - k < CHUNK ? 1 : 2);
      if (++slot == STAGES) slot = 0;
    }
    __syncwarp();
    if (lane == 0) arrive_at(steps.empty + 8 * steps.stage);
    steps.next();
  }
  if (exists) outputs.finish_tile<N>(acc, tile, slots, have);
}

// For as many eights of rows as there are.
template <int N>
__device__ __forceinline__ void multiply_eights(Weights& fetched, Steps& steps, const Outputs& outputs,
                                                unsigned char* ring, int& slot, int tile, int columns,
                                                const int* slots, int have) {
  if constexpr (N < PASS)
    if (have > 8 * N)
      return multiply_eights<N + 1>(fetched, steps, outputs, ring, slot, tile, columns, slots, have);
  multiply_tile<N>(fetched, steps, outputs, ring, slot, tile, columns, slots, have);
}

extern "C" __global__ void __launch_bounds__(THREADS, TOGETHER) mxfp4_many(
    const u16* x, const u32* words, const u32* factors, const u16* bias, const int* ids,
    const float* weights, void* out, int num_slots, int num_rows, int columns, int width, float alpha,
    float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = blockIdx.y;
  const int chunks = (columns + CHUNK - 1) / CHUNK, tiles = width / OUTS;
  const int first_tile = tiles * blockIdx.x / gridDim.x, last = tiles * (blockIdx.x + 1) / gridDim.x;
  const int rounds = (last - first_tile + WARPS - 1) / WARPS;
  const int at_once = (last - first_tile + rounds - 1) / rounds;  // tiles of a round, of warps
  unsigned char* const rings = shared + BARRIER_BYTES + X_STAGES * X_BYTES;
  int* const counts = (int*)(rings + WARPS * STAGES * STAGE_BYTES);
  int* const slots = counts + WARPS + 1;
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  Steps steps = {base + BARRIER_BYTES, base, base + 8 * X_STAGES, 0, 0};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < X_STAGES; stage++) {
      prepare_barrier(steps.full + 8 * stage, 1);
      prepare_barrier(steps.empty + 8 * stage, WARPS);
    }
    show_barriers();
  }

  unsigned char* const ring = rings + warp * STAGES * STAGE_BYTES;
  const u64 before = (u64)expert * ((DOWN ? width : 2 * width) / 16) * chunks;  // chunks
  Weights fetched = {words + before * 256, factors + before * 16, width, chunks};
  fetched.tile = warp < at_once ? first_tile + warp : last;
  fetched.last = last, fetched.stride = at_once, fetched.rows = 0;
  if (warp < WARPS) {
    const u32 to = (u32)__cvta_generic_to_shared(ring);
    fetched.begin();
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) fetched.fetch(to + slot * STAGE_BYTES);
  }
  if (!DOWN) {
    wait_for_last_kernel();
    allow_next_kernel();
  }

  int count = 0;
  for (int start = 0; start < num_slots; start += THREADS) {
    const int slot = start + threadIdx.x;
    const bool hits = slot < num_slots && load_fresh_int(ids + slot) == expert;
    const u32 all = __ballot_sync(0xffffffff, hits);
    if (lane == 0) counts[warp] = __popc(all);
    __syncthreads();  // the barriers are prepared too
    int before = count;
    for (int other = 0; other <= WARPS; other++) {
      if (other < warp) before += counts[other];
      count += counts[other];
    }
    if (hits) slots[before + __popc(all & ((1u << lane) - 1))] = slot;
    __syncthreads();
  }
  fetched.count = count;

  if (warp == WARPS) {
    if (DOWN) {
      wait_for_last_kernel();
      allow_next_kernel();
    }
    for (int round = 0; round < rounds; round++)
      for (int start = 0; start < count; start += ROWS)
        fetch_rows(steps, x, columns, slots + start, min(count - start, ROWS));
    return;
  }
  const Outputs outputs = {bias, weights, out, num_rows, width, expert, alpha, limit};
  int slot = 0;  // of the ring
#pragma unroll 1
  for (int round = 0; round < rounds; round++) {
#pragma unroll 1
    for (int start = 0; start < count; start += ROWS)
      multiply_eights<1>(fetched, steps, outputs, ring, slot,
                         warp < at_once ? first_tile + round * at_once + warp : last, columns,
                         slots + start, min(count - start, ROWS));
  }
  if (count == 0) wait_for_all_copies();  // of an expert that no row chose
}
