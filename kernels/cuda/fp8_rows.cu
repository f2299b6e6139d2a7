// Linear layer of up to 8 rows with FP8 codes on both sides:
// out[r, o] = scale_x[r] scale[o / scale_rows] sum_k x[r, k] w[o, k] (+ bias[o]), or with scales of
// 128 columns each: scale_x[r, k / 128] and scale[o / scale_rows, k / 128], inside of the sum.
//
// Compile-time: TYPE (of bias and out), SLOTS (steps of the weight in shared memory), CLUSTER (blocks
// that share the columns), BIAS, BY_BLOCK (scales of 128 columns; scale_rows is a multiple of 128).
//
// A block computes 64 outputs, in steps of 256 columns. The processor keeps fewer bits of a longer sum
// than float32: a step's sums, or its halves', are added up in float32, as in fp8_codes_triton.py,
// whose bits these are. Four warps fetch the weight and multiply; a fifth fetches x.
//
// The weight is fetched before the kernel ahead has ended (griddepcontrol), as much of it as shared
// memory holds; x is read after the wait, and never through the read-only cache.

#include "ptx.cuh"
#include "shared_sums.cuh"
#include "warpgroup.cuh"

#define OUTS 64
#define ROWS 8
#define X_SLOTS 8
#define STEP 256  // columns
#define WORKERS 128
#define THREADS 160
#define SLOT_BYTES (OUTS * STEP)
#define X_BYTES (ROWS * STEP)
#define RING_BYTES (SLOTS * SLOT_BYTES)
#define BARRIERS (RING_BYTES + X_SLOTS * X_BYTES)
#define SCALES (BARRIERS + 2 * 8 * X_SLOTS)  // float [2 steps][ROWS], by block
#define WIDTH (OUTS + 4)
#define PLACES 4  // of a thread

typedef unsigned char u8;

// 16 bytes of a row's step, zeros behind its end.
__device__ __forceinline__ void fetch_piece(u32 to, const u8* row, int column, int columns,
                                            bool exists) {
  exists = exists && column < columns;
  copy_async(to, (const u16*)(row + (exists ? column : 0)), exists ? 16 : 0);
}

// A step of the weight, by the workers.
__device__ __forceinline__ void fetch_weights(u32 slot, const u8* codes, int step, int columns,
                                              int outs_left) {
  const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
#pragma unroll
  for (int half = 0; half < STEP / HALF; half++)
#pragma unroll
    for (int r = 0; r < OUTS; r += 16) {
      const bool exists = row + r < outs_left;
      fetch_piece(slot + half * OUTS * HALF + swizzled(row + r, piece),
                  codes + (u64)(exists ? row + r : 0) * columns, step * STEP + half * HALF + piece * 16,
                  columns, exists);
    }
}

// A step of x, by a warp.
__device__ __forceinline__ void fetch_rows(u32 slot, const u8* x, int step, int columns, int stride,
                                           int rows_left) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < X_BYTES / 16 / 32; i++) {
    const int place = i * 32 + lane, row = place / 16, half = place / 8 % 2, piece = place % 8;
    const bool exists = row < rows_left;
    fetch_piece(slot + half * ROWS * HALF + swizzled(row, piece),
                x + (u64)(exists ? row : 0) * stride, step * STEP + half * HALF + piece * 16, columns,
                exists);
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS) fp8_rows(
    const u8* x, const float* x_scale, const u8* codes, const float* scale, const u16* bias, u16* out,
    int num_rows, int num_outs, int columns, int stride_x, int scale_rows, int scale_parts) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int rank = blockIdx.x % CLUSTER, first_out = blockIdx.x / CLUSTER * OUTS;
  const int all = (columns + STEP - 1) / STEP, share = (all + CLUSTER - 1) / CLUSTER;
  const int first = min(rank * share, all), steps = min(first + share, all) - first;
  const u32 base = (u32)__cvta_generic_to_shared(shared), x_base = base + RING_BYTES;
  const u32 full = base + BARRIERS, empty = full + 8 * X_SLOTS;
  float sums[PLACES] = {};

  if (threadIdx.x == WORKERS) {
    for (int slot = 0; slot < X_SLOTS; slot++) {
      prepare_barrier(full + 8 * slot, 32);
      prepare_barrier(empty + 8 * slot, WORKERS / 32);
    }
    show_barriers();
  }
  const int outs_left = num_outs - first_out;
  codes += (u64)first_out * columns;
  float of_outs[2] = {};
  if (warp < WORKERS / 32) {
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; slot++) {
      if (slot < steps) fetch_weights(base + slot * SLOT_BYTES, codes, first + slot, columns, outs_left);
      end_of_copies();
    }
#pragma unroll
    for (int i = 0; i < 2 && !BY_BLOCK; i++) {
      const int o = warp * 16 + lane / 4 + i * 8;
      if (o < outs_left) of_outs[i] = scale[(first_out + o) / scale_rows];
    }
  }
  __syncthreads();  // the barriers are prepared
  // In this order: what starts behind this kernel may read what was written before it.
  wait_for_last_kernel();
  allow_next_kernel();

  if (warp == WORKERS / 32) {
    for (int step = 0; step < steps; step++) {
      const int slot = step % X_SLOTS, turn = step / X_SLOTS;
      if (turn > 0) wait_at(empty + 8 * slot, (turn - 1) & 1);
      fetch_rows(x_base + slot * X_BYTES, x, first + step, columns, stride_x, num_rows);
      arrive_after_copies(full + 8 * slot);
    }
  } else {
    float of_rows[2];
    float* of_halves = (float*)(shared + SCALES);
    if (BY_BLOCK) {  // the workers meet before they read them
      const float* of_block = scale + first_out / scale_rows * scale_parts;
      for (int place = threadIdx.x; place < 2 * steps * ROWS; place += WORKERS) {
        const int half = 2 * first + place / ROWS, row = place % ROWS;
        const bool exists = row < num_rows && half < scale_parts;
        of_halves[place] =
            exists ? __fmul_rn(load_float_from_l2(x_scale + row * scale_parts + half), of_block[half]) : 0.f;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = lane % 4 * 2 + i;
        of_rows[i] = row < num_rows ? load_float_from_l2(x_scale + row) : 0.f;
      }
    }
    int slot = 0, x_slot = 0, turn = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      wait_for_copies_but(SLOTS - 2);
      wait_at(full + 8 * x_slot, turn & 1);
      meet_among(1, WORKERS);  // all workers' copies; and the slot before is read no more
      if (step > 0) {
        const int next = step - 1 + SLOTS;
        if (next < steps)
          fetch_weights(base + (slot == 0 ? SLOTS - 1 : slot - 1) * SLOT_BYTES, codes, first + next,
                        columns, outs_left);
        end_of_copies();
      }
      float parts[2][PLACES] = {};
      show_to_products();
#pragma unroll
      for (int k = 0; k < STEP / 32; k++) {
        const u32 half = k / 4, at = k % 4 * 32;
        multiply_codes(parts[BY_BLOCK ? half : 0],
                       matrix_at(base + slot * SLOT_BYTES + half * OUTS * HALF + at),
                       matrix_at(x_base + x_slot * X_BYTES + half * ROWS * HALF + at),
                       BY_BLOCK ? k % 4 > 0 : k > 0);
      }
      wait_for_products();
      if (lane == 0) arrive_at(empty + 8 * x_slot);
#pragma unroll
      for (int i = 0; i < PLACES; i++) {
        if (BY_BLOCK) {
          const float* of_step = of_halves + 2 * step * ROWS + lane % 4 * 2 + i % 2;
          sums[i] = __fmaf_rn(parts[0][i], of_step[0], sums[i]);
          sums[i] = __fmaf_rn(parts[1][i], of_step[ROWS], sums[i]);
        } else {
          sums[i] += parts[0][i];
        }
      }
      if (++slot == SLOTS) slot = 0;
      if (++x_slot == X_SLOTS) x_slot = 0, turn++;
    }
    // Scaled sums, [ROWS][WIDTH], where the ring was.
    meet_among(1, WORKERS);
    float* partial = (float*)shared;
#pragma unroll
    for (int i = 0; i < PLACES; i++) {
      const int o = warp * 16 + lane / 4 + i / 2 * 8, r = lane % 4 * 2 + i % 2;
      partial[r * WIDTH + o] =
          BY_BLOCK ? sums[i] : __fmul_rn(__fmul_rn(sums[i], of_outs[i / 2]), of_rows[i % 2]);
    }
  }

  meet_sharers();
  for (int cell = threadIdx.x; cell < ROWS / CLUSTER * OUTS; cell += THREADS) {
    const int r = cell / OUTS * CLUSTER + rank, o = cell % OUTS;
    if (r >= num_rows || o >= outs_left) continue;
    const float* place = (const float*)shared + r * WIDTH + o;
#if CLUSTER > 1
    float sum = load_float_of_block(place, 0);
#pragma unroll
    for (int other = 1; other < CLUSTER; other++) sum += load_float_of_block(place, other);
#else
    float sum = *place;
#endif
    if (BIAS) sum += widen(bias[first_out + o]);
    out[(u64)r * num_outs + first_out + o] = (u16)(pack(sum, 0.f) & 0xffff);
  }
  if (CLUSTER > 1) meet_sharers();  // the others have read this block's sums
}
