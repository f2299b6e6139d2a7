// Linear layer for few rows: out[r, o] = sum_k x[r, k] w[o, k], with the norm before it, or the
// gated activation or the residual addition after it.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), NT (tiles of 8 outputs a block), WARPS, UNROLL, NORM,
// GATED, BIAS, RESIDUAL, WIDE_OUT (float32 results), BESIDE (x is there before the kernel ahead has
// ended; without RESIDUAL).
//
// A block computes 8 NT outputs of 16 rows; its warps share the depth between them. Weights go
// straight from memory into the registers of the matrix unit: since a sum may be taken in any order,
// a thread loads 8 consecutive values of a row, and they take the places of the fragment that
// it holds. x takes the same places.
//
// Weights are fetched before the kernel ahead has ended (griddepcontrol); all that is not a weight
// is read after the wait, and never through the read-only cache. BESIDE waits last, so that what
// waits for this kernel has waited for the one ahead.

#include "few_row.cuh"

#define ROWS 16
#define OUTS (8 * NT)
#define WEIGHTS (GATED ? 2 * NT : NT)
#define WIDTH (8 * (WEIGHTS | 1))  // of a row of partial sums: an odd number of eights spares banks
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
  const int first_out = blockIdx.x * OUTS, first_row = blockIdx.y * ROWS;
  const int num_chunks = (hidden + 31) / 32;
  allow_next_kernel();
  x += (u64)first_row * stride_x;
  if (RESIDUAL) residual += (u64)first_row * stride_residual;
  num_rows -= first_row;

  float acc[WEIGHTS][4] = {};
  float squares[2] = {};
  u16 before[CELLS] = {};

  for (int first = warp; first < num_chunks; first += WARPS * UNROLL) {
    uint4 w[UNROLL][WEIGHTS], g[UNROLL], rows[2][UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int k = (first + u * WARPS) * 32 + part * 8;
      if (NORM) g[u] = k < hidden ? load_constant_now(gain + k) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int n = 0; n < WEIGHTS; n++) {
        const int row = first_out + (n % NT) * 8 + group;
        const u64 place = (u64)(row + (n >= NT ? num_outs : 0)) * hidden + k;
        w[u][n] = k < hidden && row < num_outs ? load_constant_now(weight + place)
                                               : make_uint4(0, 0, 0, 0);
      }
    }
    if (first == warp && !BESIDE) {
      wait_for_last_kernel();
      if (RESIDUAL) load_cells(before, residual, first_out, num_rows, num_outs, stride_residual);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = half * 8 + group;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        const int k = (first + u * WARPS) * 32 + part * 8;
        rows[half][u] = k < hidden && row < num_rows ? load_fresh(x + (u64)row * stride_x + k)
                                                     : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      uint4 a = rows[0][u], b = rows[1][u];
      if (NORM) {
        a = scaled_by(a, g[u], squares[0]);
        b = scaled_by(b, g[u], squares[1]);
      }
#pragma unroll
      for (int n = 0; n < WEIGHTS; n++) {
        multiply(acc[n], a.x, b.x, a.y, b.y, w[u][n].x, w[u][n].y);
        multiply(acc[n], a.z, b.z, a.w, b.w, w[u][n].z, w[u][n].w);
      }
    }
  }
  if (warp >= num_chunks && !BESIDE) {
    wait_for_last_kernel();
    if (RESIDUAL) load_cells(before, residual, first_out, num_rows, num_outs, stride_residual);
  }

  // Partial sums of the warps, [WARPS][ROWS][WIDTH], then their squares, [WARPS][ROWS].
  float* partial = shared + warp * ROWS * WIDTH;
  float* all_squares = shared + WARPS * ROWS * WIDTH;
#pragma unroll
  for (int n = 0; n < WEIGHTS; n++) {
    float* at = partial + group * WIDTH + n * 8 + part * 2;
    *(float2*)at = make_float2(acc[n][0], acc[n][1]);
    *(float2*)(at + 8 * WIDTH) = make_float2(acc[n][2], acc[n][3]);
  }
  if (NORM) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float s = squares[half];
      s += __shfl_xor_sync(0xffffffff, s, 1);
      s += __shfl_xor_sync(0xffffffff, s, 2);
      if (part == 0) all_squares[warp * ROWS + half * 8 + group] = s;
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
        sum += shared[(j * ROWS + r) * WIDTH + c];
        if (GATED) up += shared[(j * ROWS + r) * WIDTH + OUTS + c];
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
      const u64 at = (u64)(first_row + r) * num_outs + o;
      if (WIDE_OUT)
        ((float*)out)[at] = sum;
      else
        ((u16*)out)[at] = narrow(sum);
    }
  }
  if (BESIDE) wait_for_last_kernel();
}
