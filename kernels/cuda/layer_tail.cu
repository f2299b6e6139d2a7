// What a wide decoder layer does for few rows after its attention, and the projection that the next
// layer begins with, in one kernel:
//
//   middle = stream + out_proj(heads)                gates = silu(gate) * up,  of norm(middle)
//   next_stream = middle + down(gates)               qkv = qkv_proj(norm(next_stream)) + bias
//
// Compile-time: TYPE (0 bfloat16, 1 float16), STAGES, HAS_QKV, HAS_BIAS. Of more rows: layer_tail_wgmma.cu.
//
// One block a multiprocessor, and all of them at once: they meet between products. Some warps of each
// do nothing but ask for weights, in the order in which they will be used, as far ahead as the ring in
// shared memory reaches: across the meetings, and before the kernel ahead has ended. So memory is busy
// while blocks meet, fetch rows and add sums. (One warp alone is too slow: a copy takes it 30 ns.)
//
// A tile is 16 weight rows. A stage of the ring is CHUNK values of the depth of one. The other warps
// share the depth of each stage, and keep sums of GROUP tiles, so that rows are fetched once for all of
// them. Rows come from L2 straight into registers. Values of a 16-byte piece go into the matrix unit in
// an order of their own, the same for weights and rows, which the sum does not see.
//
// A row's result depends on the depth alone: not on the grid, or on other rows.

#include "few_row.cuh"
#include "ring.cuh"

#define NT 1                    // tiles of 8 rows
#define WORKERS 8               // warps that multiply
#define THREADS (32 * WORKERS)  // of them
#define PRODUCERS 2             // warps that ask for weights: rows of a stage each
#define SLICE 64                // values of the depth that a worker takes of a stage
#define CHUNK (SLICE * WORKERS)
#define PIECES (SLICE / 32)  // of 16 bytes, a lane and row
#define ROW_BYTES (2 * CHUNK)
#define STAGE_BYTES (16 * ROW_BYTES)
#define ROWS (8 * NT)
#define GROUP 14              // tiles at a time
#define AT_ONCE 7             // whose sums meet at a time
#define STRIDE 20             // floats between rows of sums: separate banks
#define SUMS (ROWS * STRIDE)  // floats of a tile that a warp leaves

enum { OUT, GATE_UP, DOWN, QKV };
#define PRODUCTS (HAS_QKV ? 4 : 3)

struct Matrix {
  const u16* weight;
  int outs, depth;  // rows and columns; multiples of 16 and of 32
  bool gated;       // 8 gate rows and 8 up rows a tile, which lie outs / 2 apart

  // Tiles of this block: blockIdx.x, blockIdx.x + gridDim.x and so on.
  __device__ __forceinline__ int tiles() const {
    return max(0, (outs / 16 - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x);
  }
  __device__ __forceinline__ int tile(int i) const { return blockIdx.x + i * gridDim.x; }
  __device__ __forceinline__ const u16* row(int tile, int i) const {
    const int at = gated ? 8 * tile + (i & 7) + (i >> 3) * (outs / 2) : 16 * tile + i;
    return weight + (u64)at * depth;
  }
};

using Weights = Ring<STAGES, STAGE_BYTES>;

// Asks for this warp's rows of all weights of a product. One lane runs it.
__device__ __forceinline__ void fetch(const Matrix& matrix, Weights& ring) {
  const int tiles = matrix.tiles(), mine = ((threadIdx.x >> 5) - WORKERS) * (16 / PRODUCERS);
  for (int first = 0; first < tiles; first += GROUP)
    for (int k = 0; k < matrix.depth; k += CHUNK) {
      const int bytes = 2 * min(CHUNK, matrix.depth - k);
#pragma unroll 1
      for (int i = first; i < min(first + GROUP, tiles); i++) {
        wait_at(ring.empty(), ring.turn ^ 1);
        expect_bytes(ring.full(), 16 / PRODUCERS * bytes);
#pragma unroll
        for (int row = mine; row < mine + 16 / PRODUCERS; row++)
          copy_bulk(ring.at() + row * ROW_BYTES, matrix.row(matrix.tile(i), row) + k, bytes,
                    ring.full());
        ring.step();
      }
    }
}

// What a product reads beside its weights, and where it leaves its results.
struct Around {
  const u16* x;
  int stride, num_rows;
  const u16* gain;      // of the norm before it, or none
  const u16* residual;  // added after it, or none
  int stride_residual;
  const u16* bias;
  u16* out;
  int width;  // of a row of results
  float eps;
};

// What a lane takes of its rows for one stage: of each eight rows one.
struct Pieces {
  uint4 of[NT][PIECES], gain[PIECES];

  template <bool NORM>
  __device__ __forceinline__ void load(const Around& around, int k, int depth) {
    const int row = (threadIdx.x & 31) >> 2;
    k += (threadIdx.x >> 5) * SLICE + (threadIdx.x & 3) * 8;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const bool exists = k + p * 32 < depth;
      const uint4 none = make_uint4(0, 0, 0, 0);
      if (NORM) gain[p] = exists ? load_constant(around.gain + k + p * 32) : none;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int r = n * 8 + row;
        of[n][p] = exists && r < around.num_rows
                       ? load_from_l2(around.x + (u64)r * around.stride + k + p * 32) : none;
      }
    }
  }

  __device__ __forceinline__ void scale(float squares[NT]) {
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
      for (int n = 0; n < NT; n++) of[n][p] = scaled_by(of[n][p], gain[p], squares[n]);
  }
};

// Two pieces of a weight row. Odd rows take the second first: all rows lie in the same banks.
__device__ __forceinline__ void load_pair(uint4 piece[2], u32 at, bool odd) {
  const uint4 a = load_shared(at + odd * 64), b = load_shared(at + !odd * 64);
  piece[0] = odd ? b : a;
  piece[1] = odd ? a : b;
}

// acc += 16 weight rows x what exists of SLICE values x all rows. at: this lane's first piece.
__device__ __forceinline__ void multiply_stage(float acc[NT][4], u32 at, const Pieces& x, int left) {
  const bool odd = threadIdx.x & 4;
  uint4 low[PIECES], high[PIECES];
  load_pair(low, at, odd);
  load_pair(high, at + 8 * ROW_BYTES, odd);
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    if (p * 32 >= left) break;  // what lies there is of another stage
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const uint4 b = x.of[n][p];
      multiply(acc[n], low[p].x, high[p].x, low[p].y, high[p].y, b.x, b.y);
      multiply(acc[n], low[p].z, high[p].z, low[p].w, high[p].w, b.z, b.w);
    }
  }
}

// The sums of all workers for some tiles, in their order; then what follows the product.
template <bool NORM, bool GATED>
__device__ __forceinline__ void finish(const Around& around, const Matrix& matrix, int first,
                                       int count, const float* sums, const float* squares) {
  const int outs = GATED ? 8 : 16;
  for (int i = threadIdx.x; i < count * outs * around.num_rows; i += THREADS) {
    const int o = i % outs, tile = i / outs % count, r = i / outs / count;
    const float* at = sums + tile * WORKERS * SUMS + r * STRIDE + o;
    float v = 0.f, up = 0.f, of_row = 0.f;
#pragma unroll
    for (int w = 0; w < WORKERS; w++) {
      v += at[w * SUMS];
      if (GATED) up += at[w * SUMS + 8];
      if (NORM) of_row += squares[w * ROWS + r];
    }
    const float scale = NORM ? rsqrtf(of_row * (1.f / matrix.depth) + around.eps) : 1.f;
    const int column = matrix.tile(first + tile) * outs + o;
    v *= scale;
    if (GATED) v = gated(v, up * scale);
    if (around.bias) v += widen(around.bias[column]);
    if (around.residual) {
      const u64 place = (u64)r * around.stride_residual + column;
      v = rounded(v) + widen(load_one_from_l2(around.residual + place));
    }
    around.out[(u64)r * around.width + column] = narrow(v);
  }
}

template <bool NORM, bool GATED>
__device__ __forceinline__ void work(const Matrix& matrix, const Around& around, Weights& ring,
                                     float* sums, float* squares) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, part = lane & 3;
  const u32 mine = row * ROW_BYTES + warp * SLICE * 2 + part * 16;
  const int tiles = matrix.tiles();
  for (int first = 0; first < tiles; first += GROUP) {
    const int count = min(GROUP, tiles - first);
    float acc[GROUP][NT][4] = {}, my_squares[NT] = {};
    Pieces next, second;  // L2 takes longer than two tiles
    next.load<NORM>(around, 0, matrix.depth);
    second.load<NORM>(around, CHUNK, matrix.depth);
#pragma unroll 1
    for (int k = 0; k < matrix.depth; k += CHUNK) {
      Pieces x = next;
      next = second;
      if (k + 2 * CHUNK < matrix.depth) second.load<NORM>(around, k + 2 * CHUNK, matrix.depth);
      if (NORM) x.scale(my_squares);
      const int left = matrix.depth - k - warp * SLICE;
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        if (g >= count) break;
        wait_at(ring.full(), ring.turn);
        multiply_stage(acc[g], ring.at() + mine, x, left);
        __syncwarp();  // after the products: all lanes have what they read
        if (lane == 0) arrive_at(ring.empty());
        ring.step();
      }
    }
    if (NORM) {
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float s = my_squares[n];
        s += __shfl_xor_sync(0xffffffff, s, 1);
        s += __shfl_xor_sync(0xffffffff, s, 2);
        if (part == 0) squares[warp * ROWS + n * 8 + row] = s;
      }
    }
#pragma unroll
    for (int from = 0; from < GROUP; from += AT_ONCE) {
      if (from >= count) break;
#pragma unroll
      for (int g = from; g < from + AT_ONCE; g++) {
        if (g >= GROUP || g >= count) break;
        float* to = sums + ((g - from) * WORKERS + warp) * SUMS + part * 2 * STRIDE + row;
#pragma unroll
        for (int n = 0; n < NT; n++, to += 8 * STRIDE) {
          to[0] = acc[g][n][0];
          to[STRIDE] = acc[g][n][1];
          to[8] = acc[g][n][2];
          to[STRIDE + 8] = acc[g][n][3];
        }
      }
      meet_among(1, THREADS);
      finish<NORM, GATED>(around, matrix, first + from, min(AT_ONCE, count - from), sums, squares);
      meet_among(1, THREADS);
    }
  }
}

// What the blocks have written so far is seen by all of them.
__device__ __forceinline__ void meet_blocks(int* counter) {
  meet_among(1, THREADS);
  if (threadIdx.x == 0) {
    arrive_in_memory(counter);
    while (seen_in_memory(counter) != (int)gridDim.x) pause();
  }
  meet_among(1, THREADS);
}

// The last block to leave makes all counters zero.
__device__ __forceinline__ void leave(int* counters) {
  if (threadIdx.x == 0 && atomicAdd(counters + PRODUCTS, 1) == (int)gridDim.x - 1)
    for (int i = 0; i <= PRODUCTS; i++) counters[i] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * PRODUCERS, 1) layer_tail(
    const u16* heads, const u16* stream, const u16* out_weight, const u16* gain,
    const u16* gate_up_weight, const u16* down_weight, const u16* next_gain, const u16* qkv_weight,
    const u16* qkv_bias, u16* middle, u16* gates, u16* next_stream, u16* qkv, int* counters,
    int num_rows, int heads_size, int hidden, int intermediate, int qkv_size, int stride_heads,
    int stride_stream, float eps) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* sums = (float*)(shared + STAGES * STAGE_BYTES);
  float* squares = sums + AT_ONCE * WORKERS * SUMS;
  Weights ring = {(u32)__cvta_generic_to_shared(shared),
                  (u32)__cvta_generic_to_shared(squares + WORKERS * ROWS), 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      prepare_barrier(ring.barriers + i * 8, PRODUCERS);
      prepare_barrier(ring.barriers + (STAGES + i) * 8, WORKERS);
    }
    show_barriers();
  }
  __syncthreads();

  const Matrix out_proj = {out_weight, hidden, heads_size, false};
  const Matrix gate_up = {gate_up_weight, 2 * intermediate, hidden, true};
  const Matrix down = {down_weight, hidden, intermediate, false};
  const Matrix qkv_proj = {qkv_weight, qkv_size, hidden, false};
  if (threadIdx.x >= THREADS) {
    if (threadIdx.x & 31) return;
    fetch(out_proj, ring);
    fetch(gate_up, ring);
    fetch(down, ring);
    if (HAS_QKV) fetch(qkv_proj, ring);
    allow_next_kernel();
    return;
  }

  wait_for_last_kernel();
  const u16* none = 0;
  work<false, false>(out_proj, {heads, stride_heads, num_rows, none, stream, stride_stream, none,
                                middle, hidden, eps}, ring, sums, squares);
  meet_blocks(counters + OUT);
  work<true, true>(gate_up, {middle, hidden, num_rows, gain, none, 0, none, gates, intermediate,
                              eps},
                   ring, sums, squares);
  meet_blocks(counters + GATE_UP);
  work<false, false>(down, {gates, intermediate, num_rows, none, middle, hidden, none, next_stream,
                            hidden, eps}, ring, sums, squares);
  if (HAS_QKV) {
    meet_blocks(counters + DOWN);
    work<true, false>(qkv_proj, {next_stream, hidden, num_rows, next_gain, none, 0,
                                 HAS_BIAS ? qkv_bias : none, qkv, qkv_size, eps},
                      ring, sums, squares);
  }
  leave(counters);
}
