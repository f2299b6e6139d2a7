// Linear layer for few rows of a wide model: out[r, o] = sum_k x[r, k] w[o, k], with the norm before
// it, or the gated activation or the residual addition after it. A stream of weights.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), NT (tiles of 8 rows), WARPS, STAGES, STEP, NORM, GATED,
// BIAS, RESIDUAL, WIDE_OUT (float32 results).
//
// The work is cut into units, 16 WARPS weight rows by CHUNK values of the depth, tile after tile, and
// every block takes as many units in a row. A warp takes 16 rows of a tile. Its weights come through
// a ring of its own in shared memory, STAGES deep, so that the next ones are on their way while sums
// meet. x comes through shared memory, a chunk at a time. Blocks that share a tile meet in memory: the
// last to arrive adds the sums in the order of the depth.
//
// A row's result depends on the weight's shape and the grid alone: not on NT.
//
// The kernel signals its end when its last weights have been asked for, so that the next one fills its
// rings while the last sums of this one meet. All that is not a weight is read after the wait, and the
// meeting place is written after it.

#include "few_row.cuh"

#define CHUNK 256              // values of the depth of x in shared memory
#define PIECES (STEP / 8)      // of 16 bytes, in a row of a stage
#define AT_ONCE (32 / PIECES)  // rows that a warp asks for at once
#define STAGE_BYTES (32 * STEP)
#define ROWS (8 * NT)
#define TILE (16 * WARPS)
#define OUTS (GATED ? TILE / 2 : TILE)
#define THREADS (32 * WARPS)
#define UNITS ((ROWS + WARPS - 1) / WARPS)  // rows of x that a warp brings
#define STRIDE (TILE + 4)                   // floats; keeps the sums of a fragment in separate banks
#define QUADS (OUTS / 4)                    // fours of outputs
#define CELLS ((ROWS * QUADS + THREADS - 1) / THREADS)

#define RING_BYTES (WARPS * STAGES * STAGE_BYTES)
#define X_BYTES (ROWS * CHUNK * 2)
#define PLACE_BYTES (ROWS * (TILE + 1) * 4)  // what a block leaves of a tile: sums, then squares of rows

// A warp's weights: steps of the depth, tile after tile, into the stages of its ring.
struct Stream {
  const u16* weight;
  int num_outs, hidden, depth;  // depth: in whole chunks
  u32 ring;                     // where this lane writes in the first stage
  int left;                     // steps
  int tile, k, stage;
  const u16* at;
  int rows;  // from this lane's first to the last output

  // The first of the warp's 16 rows in the tile, as an output.
  __device__ __forceinline__ int first_out() const {
    const int warp = threadIdx.x >> 5;
    return tile * OUTS + 16 * (GATED ? warp % (WARPS / 2) : warp);
  }
  __device__ __forceinline__ const u16* row(int out) const {
    const bool is_up = GATED && (threadIdx.x >> 5) >= WARPS / 2;
    return weight + (u64)(out + (is_up ? num_outs : 0)) * hidden;
  }

  __device__ __forceinline__ void begin_tile(int first_k) {
    const int lane = threadIdx.x & 31, out = first_out() + lane / PIECES;
    k = first_k + lane % PIECES * 8;
    at = row(out) + k;
    rows = num_outs - out;
  }

  // Asks for the next step, if there is one.
  __device__ __forceinline__ void ask() {
    if (left > 0) {
      const u32 to = ring + stage * STAGE_BYTES;
      const u16* from = at;
#pragma unroll
      for (int i = 0; i < 16; i += AT_ONCE, from += AT_ONCE * (u64)hidden)
        copy_async((to ^ i % 8 * 16) + i * 2 * STEP, from, k < hidden && i < rows);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      at += STEP;
      k += STEP;
      if (--left == 0) {
        allow_next_kernel();
      } else if (k >= depth) {
        tile++;
        begin_tile(0);
      }
    }
    close_group();
  }
};

// How the units lie on the blocks. units * blocks stays below 2^31.
struct Share {
  int chunks, units;

  __device__ __forceinline__ int first_unit(int block) const {
    return units * block / (int)gridDim.x;
  }
  __device__ __forceinline__ int block_of(int unit) const {
    return ((unit + 1) * (int)gridDim.x - 1) / units;
  }
};

// The blocks of one tile, first to last.
struct Meeting {
  float4* sums;
  int tile, first, last;
  Share share;

  // Where a block leaves its sums: it may share its first tile and its last.
  __device__ __forceinline__ float4* place(int block) const {
    const int which = share.first_unit(block) / share.chunks != tile;
    return sums + (u64)(2 * block + which) * (PLACE_BYTES / 16);
  }
  __device__ __forceinline__ float* squares(int block) const {
    return (float*)(place(block) + TILE * ROWS / 4);
  }

  // Leaves this block's sums; whether all the others of the tile have left theirs.
  __device__ __forceinline__ bool leave(const float acc[NT][4], const float* squares_here,
                                        int* counter, int* is_last) const {
    float4* mine = place(blockIdx.x) + (threadIdx.x >> 5) * NT * 32 + (threadIdx.x & 31);
#pragma unroll
    for (int n = 0; n < NT; n++)
      mine[n * 32] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    if (NORM) {
      __syncthreads();
      if (threadIdx.x < ROWS) squares(blockIdx.x)[threadIdx.x] = squares_here[threadIdx.x];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *is_last = atomicAdd(counter, 1) == last - first;
      if (*is_last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return *is_last;
  }

  // The sums of all, in the order of the depth.
  __device__ __forceinline__ void collect(float acc[NT][4], float* squares_here) const {
    const int mine = (threadIdx.x >> 5) * NT * 32 + (threadIdx.x & 31);
    float of_row = 0.f;
#pragma unroll
    for (int n = 0; n < NT; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
#pragma unroll 4
    for (int block = first; block <= last; block++) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const float4 v = __ldcg(place(block) + mine + n * 32);
        acc[n][0] += v.x, acc[n][1] += v.y, acc[n][2] += v.z, acc[n][3] += v.w;
      }
      if (NORM && threadIdx.x < ROWS) of_row += __ldcg(squares(block) + threadIdx.x);
    }
    if (NORM && threadIdx.x < ROWS) squares_here[threadIdx.x] = of_row;
  }
};

// Fours of outputs of a tile that this thread finishes.
struct Cells {
  int first_out, num_rows, num_outs;
  u16 before[CELLS][4];

  __device__ __forceinline__ int row(int i) const { return (i * THREADS + threadIdx.x) / QUADS; }
  __device__ __forceinline__ int column(int i) const {
    return (i * THREADS + threadIdx.x) % QUADS * 4;
  }

  __device__ __forceinline__ void load(const u16* residual, int stride) {
#pragma unroll
    for (int i = 0; i < CELLS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int o = first_out + column(i) + j;
        if (row(i) < num_rows && o < num_outs)
          before[i][j] = load_fresh_one(residual + (u64)row(i) * stride + o);
      }
  }

  __device__ __forceinline__ void store(void* out, const float* sums, const float* squares,
                                        const u16* bias, int hidden, float eps) const {
#pragma unroll
    for (int i = 0; i < CELLS; i++) {
      const int r = row(i), o = first_out + column(i);
      if (r >= num_rows) continue;
      const float* sum = sums + r * STRIDE + column(i);
      const float scale = NORM ? rsqrtf(squares[r] / hidden + eps) : 1.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (o + j >= num_outs) continue;
        float v = sum[j] * scale;
        if (GATED) v = gated(v, sum[TILE / 2 + j] * scale);
        if (BIAS) v += widen(bias[o + j]);
        if (RESIDUAL) v = rounded(v) + widen(before[i][j]);
        if (WIDE_OUT)
          ((float*)out)[(u64)r * num_outs + o + j] = v;
        else
          ((u16*)out)[(u64)r * num_outs + o + j] = narrow(v);
      }
    }
  }
};

// acc += 16 weight rows x STEP values x all rows. w, x: where this lane's rows of matrices lie.
__device__ __forceinline__ void multiply_step(float acc[NT][4], u32 w, u32 x) {
  uint4 a[STEP / 16];
#pragma unroll
  for (int j = 0; j < STEP / 16; j++) a[j] = load_matrices(w ^ j * 32);
#pragma unroll
  for (int j = 0; j < STEP / 16; j += 2)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint4 b = load_matrices((x ^ j % 4 * 32) + j / 4 * 128 + n * 16 * CHUNK);
      multiply(acc[n], a[j].x, a[j].y, a[j].z, a[j].w, b.x, b.y);
      multiply(acc[n], a[j + 1].x, a[j + 1].y, a[j + 1].z, a[j + 1].w, b.z, b.w);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, NT < 8 ? 2 : 1) few_row_wide(
    const u16* x, const u16* gain, const u16* weight, const u16* bias, const u16* residual,
    void* out, float4* left_sums, int* counters, int num_rows, int num_outs, int hidden,
    int stride_x, int stride_residual, float eps) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 ring = (u32)__cvta_generic_to_shared(shared);
  const u32 x_at = ring + RING_BYTES;
  float* sums = (float*)(shared + RING_BYTES + 2 * X_BYTES);
  float* squares = sums + ROWS * STRIDE;
  int* is_last = (int*)(squares + ROWS);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;

  const int chunks = (hidden + CHUNK - 1) / CHUNK;
  const Share share = {chunks, chunks * ((num_outs + OUTS - 1) / OUTS)};
  const int first_unit = share.first_unit(blockIdx.x), end_unit = share.first_unit(blockIdx.x + 1);

  // The 16-byte pieces of 128 bytes of a row change places, piece ^ row % 8, so that neither the rows
  // of a matrix nor the pieces of a row share banks.
  const int first_row = lane / PIECES;
  const u32 my_ring = ring + warp * STAGES * STAGE_BYTES;
  Stream stream = {weight, num_outs, hidden, chunks * CHUNK,
                   my_ring + first_row * 2 * STEP + (lane % PIECES ^ first_row) * 16,
                   (end_unit - first_unit) * (CHUNK / STEP), first_unit / chunks};
  stream.begin_tile(first_unit % chunks * CHUNK);
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) stream.ask();

  uint4 brought[UNITS], gains = make_uint4(0, 0, 0, 0);
  auto bring = [&](int chunk) {
    const int k = chunk * CHUNK + lane * 8;
    if (NORM && k < hidden) gains = load_constant(gain + k);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      const int row = warp + i * WARPS;
      brought[i] = row < num_rows && k < hidden ? load_fresh(x + (u32)(row * stride_x + k))
                                                : make_uint4(0, 0, 0, 0);
    }
  };

  wait_for_last_kernel();
  bring(first_unit % chunks);
  int stage = 0, buffer = 0;
  // Where this lane's row of a matrix lies: weights as rows 0-7, 8-15 of the first 8 values, then of
  // the second; x as four times 8 values of 8 rows.
  const u32 w_at = my_ring + (lane & 15) * 2 * STEP + ((lane & 7) ^ lane >> 4) * 16;
  const u32 r_at = x_at + (lane & 7) * 2 * CHUNK + ((lane & 7) ^ lane >> 3) * 16;

  for (int unit = first_unit; unit < end_unit;) {
    const int tile = unit / chunks, tile_end = min((tile + 1) * chunks, end_unit);
    float acc[NT][4] = {};
    float my_squares[UNITS] = {};
#pragma unroll 1
    for (; unit < tile_end; unit++) {
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        const int row = warp + i * WARPS;
        const uint4 v = NORM ? scaled_by(brought[i], gains, my_squares[i]) : brought[i];
        if (row < ROWS)
          store_shared(x_at + buffer * X_BYTES + row * 2 * CHUNK + (lane ^ row & 7) * 16, v);
      }
      if (unit + 1 < end_unit) bring((unit + 1) % chunks);
      __syncthreads();
#pragma unroll
      for (int step = 0; step < CHUNK / STEP; step++) {
        wait_for_groups<STAGES - 1>();
        __syncwarp();
        multiply_step(acc, w_at + stage * STAGE_BYTES, r_at + buffer * X_BYTES + step * 2 * STEP);
        __syncwarp();
        stream.ask();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      buffer ^= 1;
    }

    if (NORM) {
#pragma unroll
      for (int i = 0; i < UNITS; i++) {
        float s = my_squares[i];
#pragma unroll
        for (int far = 16; far; far /= 2) s += __shfl_xor_sync(0xffffffff, s, far);
        if (lane == 0 && warp + i * WARPS < ROWS) squares[warp + i * WARPS] = s;
      }
    }
    const Meeting meeting = {left_sums, tile, share.block_of(tile * chunks),
                             share.block_of((tile + 1) * chunks - 1), share};
    const bool is_shared = meeting.first != meeting.last;
    if (is_shared && !meeting.leave(acc, squares, counters + tile, is_last)) continue;
    Cells cells = {tile * OUTS, num_rows, num_outs, {}};
    if (RESIDUAL) cells.load(residual, stride_residual);
    if (is_shared) meeting.collect(acc, squares);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float* at = sums + (n * 8 + part * 2) * STRIDE + warp * 16 + group;
      at[0] = acc[n][0];
      at[STRIDE] = acc[n][1];
      at[8] = acc[n][2];
      at[STRIDE + 8] = acc[n][3];
    }
    __syncthreads();
    cells.store(out, sums, squares, bias, hidden, eps);
  }
}
