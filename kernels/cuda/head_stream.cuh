// What the kernels of the head share: all rows of its weight, streamed past a few rows of a model.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), NT (tiles of 8 rows), CHUNKS (of 32 values, the depth),
// SLICE (chunks of a stage; divides CHUNKS), STAGES (of a warp's ring), WARPS, NORM.
//
// One block a multiprocessor. A warp takes tiles of 16 outputs by turns, each with its whole depth: sums
// stay in one thread, so that a row's result does not depend on NT, on the grid or on other
// rows. Each warp has a ring in shared memory, and asks for weights as far ahead as that reaches: across
// tiles, and at the start before the kernel ahead has ended. Warps do not wait for each other. Rows are in shared
// memory too, where every warp reads them. Values of a 16-byte piece go into the matrix unit in an order of their
// own, the same for weights and rows, which the sum does not see.

#include "few_row.cuh"

#define THREADS (32 * WARPS)
#define ROWS (8 * NT)
#define HIDDEN (32 * CHUNKS)
#define PITCH (64 * (CHUNKS | 1))  // bytes between rows: an odd number of 64s spares banks
#define LANE_PIECES ((HIDDEN / 8 + 31) / 32)  // of 16 bytes, of a row
#define TILE 16  // outputs
#define ROW_BYTES (64 * SLICE)  // of an output in a stage
#define STAGE_BYTES (TILE * ROW_BYTES)
#define PIECES (4 * SLICE)  // of 16 bytes, of an output in a stage
#define COPIES (TILE * PIECES / 32)  // of a lane
#define STREAM_BYTES (ROWS * PITCH + WARPS * STAGES * STAGE_BYTES + 8)  // of shared memory
#define NO_OUTPUT 0x7fffffff

struct Head {
  const u16 *x, *gain, *weight;  // gain: of the norm, where there is one
  int num_rows, num_outs, stride_x;
  float eps;
};

// Of a row and an output; 2 * half + c of the 16 outputs and 8 rows of a tile, as the matrix unit has it.
using Sums = float[NT][2][4];
__device__ __forceinline__ float logit_of(const Sums& sums, int n, int half, int c) {
  return rounded(sums[n][0][half * 2 + c] + sums[n][1][half * 2 + c]);
}

// Orders as values do, those of -0 and 0 being one.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(value + 0.f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Above 1, and prefers the first output among equals.
__device__ __forceinline__ u64 key_of(float value, int output) {
  return (u64)ordered(value) << 31 | (u64)(NO_OUTPUT - output);
}

// The rows into shared memory, all at once. What lies in place of rows that are not there does no harm:
// columns of the matrix unit know nothing of each other, and theirs are not read.
__device__ __forceinline__ void fetch_rows(u32 rows, u32 landed, const u16* x, int num_rows,
                                           int stride_x) {
  if (threadIdx.x == 0) {
    prepare_barrier(landed, 1);
    show_barriers();
    expect_bytes(landed, num_rows * 2 * HIDDEN);
  }
  __syncthreads();
  const int r = threadIdx.x;
  if (r < num_rows) copy_bulk(rows + r * PITCH, x + (u64)r * stride_x, 2 * HIDDEN, landed);
  wait_at(landed, 0);
}

// Each row by a warp. gain: what a lane needs of it, the pieces lane, lane + 32 and so on.
__device__ __forceinline__ void norm_rows(u32 rows, const uint4* gain, int num_rows, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int r = warp; r < num_rows; r += WARPS) {
    float squares = 0.f;
    uint4 of[LANE_PIECES];
#pragma unroll
    for (int i = 0; i < LANE_PIECES; i++) {
      const bool exists = i * 32 + lane < HIDDEN / 8;
      of[i] = exists ? load_shared(rows + r * PITCH + (i * 32 + lane) * 16) : make_uint4(0, 0, 0, 0);
      squares += squares_of(of[i]);
    }
    for (int distance = 16; distance > 0; distance /= 2)
      squares += __shfl_xor_sync(0xffffffff, squares, distance);
    const float scale = rsqrtf(squares * (1.f / HIDDEN) + eps);
#pragma unroll
    for (int i = 0; i < LANE_PIECES; i++)
      if (i * 32 + lane < HIDDEN / 8)
        store_shared(rows + r * PITCH + (i * 32 + lane) * 16, normed_by(of[i], scale, gain[i]));
  }
}

// Every second row of an even number of 64s has its halves of 128 changed, or it would share banks.
__device__ __forceinline__ int swap_of(int row) { return SLICE % 2 ? 0 : (row & 1) * 64; }

// The weights of a warp, stage by stage.
struct Stream {
  const u16* weight;
  u32 ring;
  int num_outs, tiles, tile, slice, stage;

  // A stage more, if there is one.
  __device__ __forceinline__ void ask() {
    const int lane = threadIdx.x & 31;
    if (tile < tiles) {
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const int row = (i * 32 + lane) / PIECES, piece = (i * 32 + lane) % PIECES;
        // Outputs that are not there are the last one again, and come behind it.
        const int o = min(tile * TILE + row, num_outs - 1);
        copy_async(ring + stage * STAGE_BYTES + row * ROW_BYTES + (piece * 16 ^ swap_of(row)),
                   weight + (u64)o * HIDDEN + slice * (32 * SLICE) + piece * 8, 16);
      }
      if (++slice == CHUNKS / SLICE) slice = 0, tile += gridDim.x * WARPS;
      if (++stage == STAGES) stage = 0;
    }
    end_of_copies();
  }
};

// see(sums, tile): of each tile of this warp, in order. shared: STREAM_BYTES of it, which may be used
// again behind the next barrier of the block.
template <class See>
__device__ __forceinline__ void stream_head(unsigned char* shared, const Head& head, See see) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2, part = lane & 3;
  const int tiles = (head.num_outs + TILE - 1) / TILE;
  const u32 rows = (u32)__cvta_generic_to_shared(shared);
  const u32 ring = rows + ROWS * PITCH + warp * STAGES * STAGE_BYTES;
  const u32 landed = rows + ROWS * PITCH + WARPS * STAGES * STAGE_BYTES;
  const u32 row = rows + group * PITCH + part * 16;

  int tile = warp * gridDim.x + blockIdx.x;
  Stream stream = {head.weight, ring, head.num_outs, tiles, tile, 0, 0};
  for (int i = 0; i < STAGES - 1; i++) stream.ask();
  uint4 gains[LANE_PIECES] = {};
#pragma unroll
  for (int i = 0; NORM && i < LANE_PIECES; i++)
    if (i * 32 + lane < HIDDEN / 8) gains[i] = load_constant_now(head.gain + (i * 32 + lane) * 8);
  wait_for_last_kernel();
  allow_next_kernel();  // not sooner: what comes next may read KV that came before without waiting
  fetch_rows(rows, landed, head.x, head.num_rows, head.stride_x);
  if (NORM) norm_rows(rows, gains, head.num_rows, head.eps);
  __syncthreads();

  int stage = 0;
  for (; tile < tiles; tile += gridDim.x * WARPS) {
    Sums sums = {};
    for (int slice = 0; slice < CHUNKS / SLICE; slice++) {
      wait_for_copies_but(STAGES - 2);
      __syncwarp();
      stream.ask();  // into the stage before, which all lanes have read
      const u32 low = ring + stage * STAGE_BYTES + group * ROW_BYTES + part * 16;
      const u32 x_at = row + slice * ROW_BYTES;
#pragma unroll
      for (int c = 0; c < SLICE; c++) {
        const u32 at = low + (c * 64 ^ swap_of(group));
        const uint4 a = load_shared(at), b = load_shared(at + 8 * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint4 v = load_shared(x_at + n * 8 * PITCH + c * 64);
          multiply(sums[n][0], a.x, b.x, a.y, b.y, v.x, v.y);
          multiply(sums[n][1], a.z, b.z, a.w, b.w, v.z, v.w);
        }
      }
      if (++stage == STAGES) stage = 0;
    }
    see(sums, tile);
  }
}
