// Of layer_tail_wgmma.cu: what of a product is a block's, and the rings through which weights and rows come.

#include "few_row.cuh"
#include "ring.cuh"
#include "shared_sums.cuh"
#include "warpgroup_half.cuh"

#define MULTIPLIERS 256  // threads
#define THREADS (MULTIPLIERS + 128)
#define FETCHERS 2    // warps that fetch weights: each has one unit of a tile
#define COLUMNS 128   // of a stage
#define UNIT 32       // weight rows
#define SLAB 16       // weight rows of a warp
#define UNIT_HALF (UNIT * HALF)  // bytes of 64 columns of a unit,
#define TILE_HALF (2 * UNIT_HALF)  // and of a tile
#define STAGE_BYTES (2 * TILE_HALF)
#define ROWS (8 * MT)
#define X_HALF (ROWS * HALF)
#define X_BYTES (2 * X_HALF)
#define X_STAGES 4
#define SUMS_BYTES (8192 * MT)  // that the other block sends
#define MOST_TILES 4  // of a warpgroup at a time: 8 of a block
#define GROUP (2 * 2 * MOST_TILES)  // units at a time

// Registers of a thread: of those that copy, and of the others.
#define TO_COPY 56
#define TO_MULTIPLY 224

// Shared memory: the rings of weights and of rows, sums of the other block, barriers, and scales of the rows.
#define X_AT (STAGES * STAGE_BYTES)
#define SUMS_AT (X_AT + X_STAGES * X_BYTES)
#define BARRIERS_AT (SUMS_AT + SUMS_BYTES)
#define SCALES_AT (BARRIERS_AT + 8 * (2 * STAGES + 2 * X_STAGES + 3))

enum { OUT, GATE_UP, DOWN, QKV };
#define PRODUCTS (HAS_QKV ? 4 : 3)

__device__ __forceinline__ int rank_in_cluster() { return blockIdx.x & 1; }

struct Matrix {
  const TensorMap* weight;  // [slab, 2, 8, depth]: of gates, 8 gate rows and 8 up rows a slab
  int outs, depth;          // rows and columns; multiples of 32 and of 128
  bool gated;

  // Units of this cluster: begin() up to end().
  __device__ __forceinline__ int share(int cluster) const {
    return cluster * (outs / UNIT) / ((int)gridDim.x / 2);
  }
  __device__ __forceinline__ int begin() const { return share(blockIdx.x / 2); }
  __device__ __forceinline__ int end() const { return share(blockIdx.x / 2 + 1); }
  // Stages of a tile that this block takes, every second one: so both read what lies together in memory.
  __device__ __forceinline__ int steps() const { return (depth / COLUMNS + 1 - rank_in_cluster()) / 2; }
  __device__ __forceinline__ int column(int step) const { return (2 * step + rank_in_cluster()) * COLUMNS; }
};

// Tiles of a group that begins with a unit.
__device__ __forceinline__ int tiles_from(int first, int end) { return (min(GROUP, end - first) + 1) / 2; }

using Weights = Ring<STAGES, STAGE_BYTES>;
using Xs = Ring<X_STAGES, X_BYTES>;

// Barriers that belong to no ring.
struct Signs {
  u32 barriers;

  __device__ __forceinline__ u32 sums_have_come() const { return barriers; }
  __device__ __forceinline__ u32 may_send() const { return barriers + 8; }  // the other block has read the last ones
  __device__ __forceinline__ u32 scales_are_there() const { return barriers + 16; }
};

// Asks for all weights of a product that this block needs. A lane of each warp of FETCHERS runs it.
__device__ __forceinline__ void fetch(const Matrix& matrix, Weights& ring) {
  const int mine = threadIdx.x >> 5 & 1, steps = matrix.steps(), end = matrix.end();
  for (int first = matrix.begin(); first < end; first += GROUP) {
    const int tiles = tiles_from(first, end);
    for (int k = 0; k < steps; k++)
#pragma unroll 1
      for (int t = 0; t < tiles; t++, ring.step(1)) {
        const int unit = first + 2 * t + mine, column = matrix.column(k);
        wait_at(ring.empty(), ring.turn ^ 1);
        if (unit >= end) {
          arrive_at(ring.full());
          continue;
        }
        expect_bytes(ring.full(), 2 * UNIT_HALF);
#pragma unroll
        for (int half = 0; half < 2; half++)
          copy_tile_once(ring.at() + half * TILE_HALF + mine * UNIT_HALF, matrix.weight, column + half * 64, 0, 0,
                    unit * (UNIT / SLAB), ring.full());
      }
  }
}

// Asks for the rows that a product takes, for each group of units anew. A lane runs it. x: [1, 1, rows, depth].
__device__ __forceinline__ void fetch_rows(const Matrix& matrix, const TensorMap* x, Xs& ring) {
  const int steps = matrix.steps();
  for (int first = matrix.begin(); first < matrix.end(); first += GROUP)
#pragma unroll 1
    for (int k = 0; k < steps; k++, ring.step(1)) {
      wait_at(ring.empty(), ring.turn ^ 1);
      expect_bytes(ring.full(), X_BYTES);
#pragma unroll
      for (int half = 0; half < 2; half++)
        copy_tile(ring.at() + half * X_HALF, x, matrix.column(k) + half * 64, 0, 0, 0, ring.full());
    }
}
