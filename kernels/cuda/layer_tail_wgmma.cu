// What layer_tail.cu computes, for dozens of rows: by products of a warpgroup, in clusters of two blocks.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), MT (tiles of 8 rows: 2 or 4), STAGES (of weights in shared
// memory), HAS_QKV, HAS_BIAS.
//
// Every multiprocessor has one block, and all blocks run at once: they meet between products. A unit is 32
// weight rows. A cluster computes some units of each product; each of its blocks takes half of the depth, so
// that rows are fetched for twice as many outputs. Then each block sends the other one its sums of every second
// unit, and finishes the units in between.
//
// Four warps only copy. Two fetch weights in the order in which they will be used, as far ahead as the ring
// reaches: across the meetings, and before the kernel ahead has ended. One fetches rows, which it may only once
// all blocks have met. (Copies of threads, of 16 bytes each, cannot keep up: a warp asks for 13 GB/s.) One adds
// up the squares that norms need. Of the two warpgroups that multiply, one has the even tiles of 64 weight rows
// and one the odd ones.
//
// What writes a stream writes it times the next norm's gain, too, and the sum of squares of 16 values; the
// product behind the norm is scaled where its sums are.
//
// A row's result depends on the depth alone: not on MT, on the grid, or on other rows.

#include "layer_tail_sums.cuh"

// Goes past a stage of the other warpgroup. Every warp sees every stage fill, and lets go of it: a warp that left
// one out could wait for the turn of a stage whose turn before has not ended, and such a wait ends at once.
__device__ __forceinline__ void pass(Weights& ring, bool first_lane) {
  if (first_lane) wait_at(ring.full(), ring.turn), arrive_at(ring.empty());
  ring.step(1);
}

// acc: sums of COUNT tiles of this warpgroup, `which`, of `tiles` in the block.
template <int COUNT>
__device__ __forceinline__ void multiply_tiles(float (&acc)[MOST_TILES][4 * MT], int which, int tiles, int steps,
                                               Weights ring, Xs xs) {
  const bool first_lane = (threadIdx.x & 31) == 0;
  u32 read = 0, x_read = 0;  // barriers of what the products before the last ones have read
#pragma unroll 1
  for (int k = 0; k < steps; k++, xs.step(1)) {
    wait_at(xs.full(), xs.turn);
    __syncwarp();  // a lane that is late must not miss a turn
    if (COUNT == 0 && first_lane) arrive_at(xs.empty());
    const u64 x = matrix_at(xs.at());
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      if (which == 1) pass(ring, first_lane);
      wait_at(ring.full(), ring.turn);
      const u64 weights = matrix_at(ring.at());
      __syncwarp();  // products are of whole warps
      before_products();
#pragma unroll
      for (int q = 0; q < COLUMNS / 16; q++)
        add_shared_product(acc[j], behind(weights, q / 4 * TILE_HALF + q % 4 * 32),
                           behind(x, q / 4 * X_HALF + q % 4 * 32), k + q > 0);
      end_of_products();
      wait_for_products_but(1);
      if (first_lane && read) arrive_at(read);
      if (first_lane && j == 0 && x_read) arrive_at(x_read);
      read = ring.empty();
      ring.step(1);
      if (which == 0 && 2 * j + 1 < tiles) pass(ring, first_lane);
    }
    if (which == 1 && tiles % 2 == 1) pass(ring, first_lane);
    x_read = xs.empty();
  }
  if (COUNT == 0) return;
  wait_for_products_but(0);
#pragma unroll
  for (int j = 0; j < COUNT; j++) keep(acc[j]);
  if (first_lane && read) arrive_at(read), arrive_at(x_read);
}

// The other block's sums of this block's units are added to its own. sums: where they come. turn: of the group.
// is_last: the other block sends no more, and may have ended.
__device__ __forceinline__ void exchange(float (&acc)[MOST_TILES][4 * MT], int which, int count, float4* sums,
                                         const Signs& signs, int turn, bool is_last) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, rank = rank_in_cluster();
  float4* mine = sums + which * MOST_TILES * MT * 64 + (warp & 1) * 32 + lane;
  if (warp >> 1 != rank) {
    // The other block goes on without a warp that sends nothing: may_send could turn twice before that warp looks,
    // which would then wait for ever. Only a product's last group has such warps, and before the next one they
    // meet warps that have waited.
    if (count == 0) return;
    wait_in_cluster_at(signs.may_send(), turn ^ 1);
#pragma unroll
    for (int j = 0; j < MOST_TILES; j++)
#pragma unroll
      for (int n = 0; n < MT; n++)
        if (j < count)
          send_four_to_block(mine + (j * MT + n) * 64, rank ^ 1,
                             make_float4(acc[j][4 * n], acc[j][4 * n + 1], acc[j][4 * n + 2], acc[j][4 * n + 3]),
                             signs.sums_have_come());
    return;
  }
  wait_in_cluster_at(signs.sums_have_come(), turn);
#pragma unroll
  for (int j = 0; j < MOST_TILES; j++)
#pragma unroll
    for (int n = 0; n < MT; n++)
      if (j < count) {
        const float4 other = mine[(j * MT + n) * 64];
        acc[j][4 * n] += other.x, acc[j][4 * n + 1] += other.y;
        acc[j][4 * n + 2] += other.z, acc[j][4 * n + 3] += other.w;
      }
  __syncwarp();
  if (lane == 0 && !is_last) arrive_in_block(signs.may_send(), rank ^ 1);
}

struct Multiplier {
  Weights ring;
  Xs xs;
  Signs signs;
  float4* sums;
  const float* scales;
  int num_rows, groups, norms;
};

// is_last: of the kernel's products.
__device__ __forceinline__ void work(const Matrix& matrix, const Around& around, Multiplier& at, bool is_last) {
  const int which = threadIdx.x / 128, warp = threadIdx.x >> 5 & 3, steps = matrix.steps(), end = matrix.end();
  for (int first = matrix.begin(); first < end; first += GROUP) {
    const int tiles = tiles_from(first, end), count = (tiles + 1 - which) / 2;
    if (threadIdx.x == rank_in_cluster() * 64)  // which waits for those of a group before it expects the next
      expect_bytes(at.signs.sums_have_come(), tiles * UNIT * ROWS * 4);
    float acc[MOST_TILES][4 * MT] = {};
    if (count == 0) multiply_tiles<0>(acc, which, tiles, steps, at.ring, at.xs);
    if (count == 1) multiply_tiles<1>(acc, which, tiles, steps, at.ring, at.xs);
    if (count == 2) multiply_tiles<2>(acc, which, tiles, steps, at.ring, at.xs);
    if (count == 3) multiply_tiles<3>(acc, which, tiles, steps, at.ring, at.xs);
    if (count == 4) multiply_tiles<4>(acc, which, tiles, steps, at.ring, at.xs);
    at.ring.step(steps * tiles);
    at.xs.step(steps);
    const bool finishes = warp >> 1 == rank_in_cluster();
    const int first_unit = first + 2 * which + (warp >> 1);
    u16 added[4 * MT];  // on its way while sums are
    load_residual(added, first_unit * 2 + (warp & 1), finishes && count > 0 && first_unit < end, at.num_rows, around);
    exchange(acc, which, count, at.sums, at.signs, at.groups++ & 1,
             is_last && first + GROUP >= end);
    if (around.norm) wait_at(at.signs.scales_are_there(), at.norms & 1);
    if (!finishes) continue;
#pragma unroll
    for (int j = 0; j < MOST_TILES; j++) {
      const int unit = first_unit + 4 * j, slab = unit * 2 + (warp & 1);
      if (j >= count || unit >= end) continue;
      if (matrix.gated) {
        finish_gates(acc[j], slab, at.num_rows, around, at.scales);
        continue;
      }
      if (j > 0) load_residual(added, slab, true, at.num_rows, around);
      finish_slab(acc[j], added, slab, at.num_rows, around, at.scales);
    }
  }
  at.norms += around.norm;
}

// The last block to leave makes all counters zero.
__device__ __forceinline__ void leave(int* counters) {
  if (threadIdx.x == 0 && atomicAdd(counters + PRODUCTS, 1) == (int)gridDim.x - 1)
    for (int i = 0; i <= PRODUCTS; i++) counters[i] = 0;
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) layer_tail_wgmma(
    const __grid_constant__ TensorMap heads, const u16* stream, const __grid_constant__ TensorMap out_weight,
    const u16* gain, const __grid_constant__ TensorMap gate_up_weight,
    const __grid_constant__ TensorMap down_weight, const u16* next_gain,
    const __grid_constant__ TensorMap qkv_weight, const u16* qkv_bias, u16* middle, u16* gates,
    u16* next_stream, u16* qkv, u16* scaled, float* squares, const __grid_constant__ TensorMap scaled_rows,
    const __grid_constant__ TensorMap gate_rows, int* counters, int num_rows, int heads_size, int hidden,
    int intermediate, int qkv_size, int stride_stream, float eps) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = threadIdx.x >> 5;
  const u32 base = (u32)__cvta_generic_to_shared(shared), barriers = base + BARRIERS_AT;
  Weights ring = {base, barriers, 0, 0};
  Xs xs = {base + X_AT, barriers + 16 * STAGES, 0, 0};
  const Signs signs = {barriers + 16 * (STAGES + X_STAGES)};
  float* scales = (float*)(shared + SCALES_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      prepare_barrier(ring.barriers + i * 8, FETCHERS);
      prepare_barrier(ring.barriers + (STAGES + i) * 8, MULTIPLIERS / 32);
    }
    for (int i = 0; i < X_STAGES; i++) {
      prepare_barrier(xs.barriers + i * 8, 1);
      prepare_barrier(xs.barriers + (X_STAGES + i) * 8, MULTIPLIERS / 32);
    }
    prepare_barrier(signs.sums_have_come(), 1);
    prepare_barrier(signs.may_send(), MULTIPLIERS / 64);
    prepare_barrier(signs.scales_are_there(), 1);
    show_barriers();
  }
  arrive_in_cluster();
  wait_for_cluster();  // both blocks' barriers are initialised

  const Matrix out_proj = {&out_weight, hidden, heads_size, false};
  const Matrix gate_up = {&gate_up_weight, 2 * intermediate, hidden, true};
  const Matrix down = {&down_weight, hidden, intermediate, false};
  const Matrix qkv_proj = {&qkv_weight, qkv_size, hidden, false};
  if (warp >= MULTIPLIERS / 32) {
    give_registers(TO_COPY);
    if (warp < MULTIPLIERS / 32 + FETCHERS) {
      if (threadIdx.x & 31) return;
      fetch(out_proj, ring);
      fetch(gate_up, ring);
      fetch(down, ring);
      if (HAS_QKV) fetch(qkv_proj, ring);
      allow_next_kernel();
    } else if (warp == MULTIPLIERS / 32 + FETCHERS) {
      if ((threadIdx.x & 31) == 0) {
        wait_for_last_kernel();
        fetch_rows(out_proj, &heads, xs);
        for (int product = GATE_UP; product < PRODUCTS; product++) {
          wait_for_results(counters + product - 1);
          show_memory_to_copies();
          fetch_rows(product == GATE_UP ? gate_up : product == DOWN ? down : qkv_proj,
                     product == DOWN ? &gate_rows : &scaled_rows, xs);
        }
      }
      __syncwarp();
    } else {
      wait_for_last_kernel();  // whose kernel ahead counted in the same places
      for (int product = OUT; product + 1 < PRODUCTS; product += DOWN) {
        if ((threadIdx.x & 31) == 0) wait_for_results(counters + product);
        __syncwarp();
        find_scales(scales, squares, hidden / SLAB, hidden, eps, signs);
      }
    }
    if (warp >= MULTIPLIERS / 32 + FETCHERS) meet_among(2, MULTIPLIERS + 64);
    return;
  }

  take_registers(TO_MULTIPLY);
  wait_for_last_kernel();
  Multiplier at = {ring, xs, signs, (float4*)(shared + SUMS_AT), scales, num_rows, 0, 0};
  const u16* none = 0;
#pragma unroll 1
  for (int product = 0; product < PRODUCTS; product++) {
    Matrix matrix = out_proj;
    Around around = {false, stream, stride_stream, none, middle, hidden, gain, scaled, squares};
    if (product == GATE_UP) {
      matrix = gate_up;
      around = {true, none, 0, none, gates, intermediate, none, 0, 0};
    } else if (product == DOWN) {
      matrix = down;
      around = {false, middle, hidden, none, next_stream, hidden, HAS_QKV ? next_gain : none, scaled, squares};
    } else if (product == QKV) {
      matrix = qkv_proj;
      around = {true, none, 0, HAS_BIAS ? qkv_bias : none, qkv, qkv_size, none, 0, 0};
    }
    work(matrix, around, at, product + 1 == PRODUCTS);
    if (product + 1 < PRODUCTS) arrive_with_results(counters + product);
  }
  meet_among(2, MULTIPLIERS + 64);  // no warp of this block looks at the counters any more
  leave(counters);
}
