// One of the two products of experts in MXFP4 for few rows: what packed_triton.py computes, of weights
// as kernels/linear/mxfp4_words.py lays them out, in bfloat16.
//
// Compile-time: DOWN (the second product), NT (parts of 16 rows of the weight a tile), WARPS (which share
// the columns), STAGES (chunks of a warp on their way), TILES (of a block), CHOSEN (experts a row), EVERY
// (a block an expert, else a slot), BIAS, CLAMPED.
//
// A tile is 16 NT rows of one expert's weight (of the first product 8 NT of gate and as many of up),
// multiplied by the expert's slots, `held` of them at once, at most ROWS. Chunks go through a ring in
// shared memory that each warp has for itself, from one tile to the next.
//
// The second product finds its slots, and fetches weights, before the first one has ended
// (griddepcontrol): the kernel that chose experts stands before that one, and is complete.

#include "mxfp4.cuh"

#define ROWS 8
#define THREADS (32 * WARPS)
#define OUTS (DOWN ? 16 * NT : 8 * NT)
#define WIDTH (16 * NT + 4)
#define X_CHUNK 64  // words
#define X_PAD 16    // words: rows of two groups of lanes read different banks
#define STAGE_BYTES (NT * PART_BYTES)
#define SUMS (WARPS * ROWS * WIDTH)

// One output o of a slot, of the warps' sums.
__device__ __forceinline__ void finish_sums(const float* sums, const u16* bias, const float* weights,
                                            void* out, int expert, int slot, int o, int num_rows,
                                            int width, float alpha, float limit) {
  float sum = 0.f, up = 0.f;
#pragma unroll
  for (int j = 0; j < WARPS; j++) {
    sum += sums[j * ROWS * WIDTH];
    if (!DOWN) up += sums[j * ROWS * WIDTH + 8];
  }
  finish(sum, up, bias_of(bias, expert, o, width, 0), DOWN ? 0.f : bias_of(bias, expert, o, width, 1),
         DOWN ? load_float_from_l2(weights + slot) : 0.f, out, place_of(slot, num_rows, width) + o, alpha,
         limit);
}

// A chunk of a tile's rows.
__device__ __forceinline__ void fetch_chunk(u32 to, const u32* words, const u32* factors, int expert,
                                            int first_out, int chunk, int chunks, int width) {
  const int lane = threadIdx.x & 31;
  const u64 before = (u64)expert * ((DOWN ? width : 2 * width) / 16);
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int o = first_out + (DOWN ? n * 16 + h * 8 : n * 8);
      const int unit = (min(o, width - 8) + (!DOWN && h ? width : 0)) / 8;
      const u64 place = ((before + unit / 2) * chunks + chunk) * 2 + unit % 2;
      const int bytes = o < width ? 16 : 0;
      const u32 part = to + n * PART_BYTES;
      copy_async(part + h * 512 + lane * 16, (const u16*)(words + place * 128 + lane * 4), bytes);
      if (lane >> 1 == h)
        copy_async(part + 1024 + lane * 16, (const u16*)(factors + place * 8 + lane % 2 * 4), bytes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) mxfp4_rows(
    const u16* x, const u32* words, const u32* factors, const u16* bias, const int* ids,
    const float* weights, void* out, int num_slots, int num_rows, int columns, int width, int held,
    float alpha, float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;
  const int number = blockIdx.y, first_tile = blockIdx.x * TILES;
  const int chunks = (columns + CHUNK - 1) / CHUNK, stride = chunks * X_CHUNK + X_PAD;
  const int mine = (chunks - warp + WARPS - 1) / WARPS;  // chunks of a tile
  const int tiles = min(TILES, (width + OUTS - 1) / OUTS - first_tile);
  u32* const inputs = (u32*)(shared + WARPS * STAGES * STAGE_BYTES);
  float* const partial = (float*)(inputs + held * stride);  // of two tiles
  int* const slots = (int*)(partial + 2 * SUMS);
  if (!DOWN) {
    wait_for_last_kernel();
    allow_next_kernel();
  }

  const int expert = EVERY ? number : load_fresh_int(ids + number);
  int count = 0;
  bool before = false;
  for (int base = 0; base < num_slots; base += 32) {
    const int slot = base + lane;
    const bool hits = slot < num_slots && load_fresh_int(ids + slot) == expert;
    const u32 all = __ballot_sync(0xffffffff, hits);
    if (!EVERY && base <= number)
      before |= (all & (number - base < 32 ? (1u << (number - base)) - 1 : 0xffffffffu)) != 0;
    if (hits && warp == 0) slots[count + __popc(all & ((1u << lane) - 1))] = slot;
    count += __popc(all);
  }
  if (before || count == 0) return;

  unsigned char* const ring = shared + warp * STAGES * STAGE_BYTES;
  const u32 to = (u32)__cvta_generic_to_shared(ring);
  for (int start = 0; start < count; start += held) {
    const int have = min(count - start, held), total = mine * tiles;
    int fetched = 0, of_tile = 0, chunk = warp;  // the next to be fetched
    auto fetch = [&](int slot) {
      if (fetched < total) {
        fetch_chunk(to + slot * STAGE_BYTES, words, factors, expert, (first_tile + of_tile) * OUTS,
                    chunk, chunks, width);
        fetched++;
        chunk += WARPS;
        if (chunk >= chunks) chunk = warp, of_tile++;
      }
      end_of_copies();
    };
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) fetch(slot);
    if (DOWN && start == 0) {
      wait_for_last_kernel();
      allow_next_kernel();
    }
    __syncthreads();  // slots are known; what was held before is read no more
    const int pieces = chunks * (CHUNK / 8);
    for (int piece = threadIdx.x; piece < have * pieces; piece += THREADS) {
      const int r = piece / pieces, at = piece % pieces, slot = slots[start + r];
      const uint4 v = at * 8 < columns
                          ? load_fresh(x + (u64)(DOWN ? slot : slot / CHOSEN) * columns + at * 8)
                          : make_uint4(0, 0, 0, 0);
      u32* place = inputs + r * stride + at / 4 * 16 + at % 4;  // [block of 32][part][q]
      place[0] = v.x, place[4] = v.y, place[8] = v.z, place[12] = v.w;
    }
    __syncthreads();

    int slot = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
      float acc[NT][4] = {};
#pragma unroll 1
      for (int at = warp; at < chunks; at += WARPS) {
        wait_for_copies_but(STAGES - 1);
        __syncwarp();  // all lanes' copies
        const unsigned char* stage = ring + slot * STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const u32* row =
              inputs + min(group, have - 1) * stride + at * X_CHUNK + j * 32 + part * 4;
          const uint4 of_even = *(const uint4*)row, of_odd = *(const uint4*)(row + 16);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            u32 even[2][4], odd[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const unsigned char* from = stage + n * PART_BYTES;
              const uint2 pair = *(const uint2*)(from + h * 512 + lane * 16 + j * 8);
              const u32 bytes = *(const u32*)(from + 1024 + h * 32 + group * 4);
              widened(even[h], odd[h], pair.x, pair.y, even_factors(bytes), odd_factors(bytes), j);
            }
            float* c = acc[n];
            multiply(c, even[0][0], even[1][0], even[0][1], even[1][1], of_even.x, of_even.y);
            multiply(c, even[0][2], even[1][2], even[0][3], even[1][3], of_even.z, of_even.w);
            multiply(c, odd[0][0], odd[1][0], odd[0][1], odd[1][1], of_odd.x, of_odd.y);
            multiply(c, odd[0][2], odd[1][2], odd[0][3], odd[1][3], of_odd.z, of_odd.w);
          }
        }
        __syncwarp();  // all lanes have read the stage
        fetch(slot);
        if (++slot == STAGES) slot = 0;
      }

      // Sums of the warps, [WARPS][ROWS][WIDTH]; those of the tile before may still be read.
      float* const sums = partial + tile % 2 * SUMS;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[(warp * ROWS + part * 2 + i % 2) * WIDTH + n * 16 + i / 2 * 8 + group] = acc[n][i];
      __syncthreads();
      for (int cell = threadIdx.x; cell < have * OUTS; cell += THREADS) {
        const int r = cell / OUTS, c = cell % OUTS, o = (first_tile + tile) * OUTS + c;
        if (o < width)
          finish_sums(sums + r * WIDTH + (DOWN ? c : c / 8 * 16 + c % 8), bias, weights, out, expert,
                      slots[start + r], o, num_rows, width, alpha, limit);
      }
    }
  }
}
