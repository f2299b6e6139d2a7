// Linear layer for few rows: out[r, o] = sum_k x[r, k] w[o, k], with the norm before it, or the
// gated activation or the residual addition after it.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), MT (tiles of 16 rows), NT (tiles of 8 outputs a
// block), WARPS, UNROLL, NORM, GATED, BIAS, RESIDUAL, WIDE_OUT (float32 results).
//
// A block computes 8 NT outputs of all rows; its warps share the depth between them. Weights go
// straight from memory into the registers of the matrix unit: since a sum may be taken in any order,
// a thread loads 8 consecutive values of a row, and they stand for the places of the fragment that
// it holds. x takes the same places.
//
// Weights are fetched before the kernel ahead has ended (griddepcontrol); all that is not a weight
// is read after the wait, and never through the read-only cache.

#include "few_row.cuh"

#define ROWS (16 * MT)
#define OUTS (8 * NT)
#define WEIGHTS (GATED ? 2 * NT : NT)
#define THREADS (32 * WARPS)
#define CELLS ((ROWS * OUTS + THREADS - 1) / THREADS)

// The values at the places of the output that this thread finishes.
__device__ __forceinline__ void load_cells(u16* cells, const u16* from, int first_out,
                                           int num_rows, int num_outs, int stride) {
#pragma unroll
  for (int i = 0; i < CELLS; i++) {
    const int cell = i * THREADS + threadIdx.x, r = cell / OUTS, o = first_out + cell % OUTS;
    if (r < num_rows && o < num_outs) cells[i] = load_fresh_one(from + (u64)r * stride + o);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) few_row(
    const u16* x, const u16* gain, const u16* weight, const u16* bias, const u16* residual,
    void* out, int num_rows, int num_outs, int hidden, int stride_x, int stride_residual,
    float eps) {
  extern __shared__ float shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;
  const int first_out = blockIdx.x * OUTS;
  const int num_chunks = (hidden + 31) / 32;
  allow_next_kernel();

  float acc[MT][WEIGHTS][4] = {};
  float squares[MT][2] = {};
  u16 before[CELLS] = {};

  for (int first = warp; first < num_chunks; first += WARPS * UNROLL) {
    uint4 w[UNROLL][WEIGHTS], g[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = (first + u * WARPS) * 32 + part * 8;
      if (NORM) g[u] = k < hidden ? load_constant(gain + k) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int n = 0; n < WEIGHTS; n++) {
        const int row = first_out + (n % NT) * 8 + group;
        const u64 place = (u64)(row + (n >= NT ? num_outs : 0)) * hidden + k;
        w[u][n] = k < hidden && row < num_outs ? load_constant(weight + place)
                                               : make_uint4(0, 0, 0, 0);
      }
    }
    if (first == warp) {
      wait_for_last_kernel();
      if (RESIDUAL) load_cells(before, residual, first_out, num_rows, num_outs, stride_residual);
    }
    // Rows of two tiles are on their way before the first is waited for.
#pragma unroll
    for (int pair = 0; pair < MT; pair += 2) {
      uint4 rows[2][2][UNROLL];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = pair * 16 + i * 8 + group;
        if (pair + i / 2 >= MT) continue;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
          const int k = (first + u * WARPS) * 32 + part * 8;
          rows[i / 2][i % 2][u] = k < hidden && row < num_rows
                                      ? load_fresh(x + (u64)row * stride_x + k)
                                      : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int m = pair + i;
        if (m >= MT) continue;
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
          uint4 a = rows[i][0][u], b = rows[i][1][u];
          if (NORM) {
            a = scaled_by(a, g[u], squares[m][0]);
            b = scaled_by(b, g[u], squares[m][1]);
          }
#pragma unroll
          for (int n = 0; n < WEIGHTS; n++) {
            multiply(acc[m][n], a.x, b.x, a.y, b.y, w[u][n].x, w[u][n].y);
            multiply(acc[m][n], a.z, b.z, a.w, b.w, w[u][n].z, w[u][n].w);
          }
        }
      }
    }
  }
  if (warp >= num_chunks) {
    wait_for_last_kernel();
    if (RESIDUAL) load_cells(before, residual, first_out, num_rows, num_outs, stride_residual);
  }

  // Partial sums of the warps, [WARPS][ROWS][8 WEIGHTS], then their squares, [WARPS][ROWS].
  const int width = 8 * WEIGHTS;
  float* partial = shared + warp * ROWS * width;
  float* all_squares = shared + WARPS * ROWS * width;
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int n = 0; n < WEIGHTS; n++) {
      float* at = partial + (m * 16 + group) * width + n * 8 + part * 2;
      at[0] = acc[m][n][0];
      at[1] = acc[m][n][1];
      at[8 * width] = acc[m][n][2];
      at[8 * width + 1] = acc[m][n][3];
    }
    if (NORM) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float s = squares[m][half];
        s += __shfl_xor_sync(0xffffffff, s, 1);
        s += __shfl_xor_sync(0xffffffff, s, 2);
        if (part == 0) all_squares[warp * ROWS + m * 16 + half * 8 + group] = s;
      }
    }
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < CELLS; i++) {
    const int cell = i * THREADS + threadIdx.x, r = cell / OUTS, c = cell % OUTS;
    const int o = first_out + c;
    const bool exists = r < num_rows && r < ROWS && o < num_outs;
    float sum = 0.f, up = 0.f, scale = 1.f;
    if (exists) {
#pragma unroll
      for (int j = 0; j < WARPS; j++) {
        sum += shared[(j * ROWS + r) * width + c];
        if (GATED) up += shared[(j * ROWS + r) * width + OUTS + c];
      }
      if (NORM) {
        float s = 0.f;
#pragma unroll
        for (int j = 0; j < WARPS; j++) s += all_squares[j * ROWS + r];
        scale = rsqrtf(s * (1.f / hidden) + eps);
      }
    }
    sum *= scale;
    if (GATED) sum = gated(sum, up * scale);
    if (BIAS && exists) sum += widen(bias[o]);
    if (RESIDUAL) sum = rounded(sum) + widen(before[i]);
    if (exists) {
      if (WIDE_OUT)
        ((float*)out)[(u64)r * num_outs + o] = sum;
      else
        ((u16*)out)[(u64)r * num_outs + o] = narrow(sum);
    }
  }
}
