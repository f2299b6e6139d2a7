// COUNT tokens of each row of weights, without replacement (kernels/sample/draw_siblings.py).
//
// Compile-time: those of row_cluster.cuh, COUNT.
//
// A cluster a row, which is read once. Every operation is rounded by itself, so that the bits are those of
// draw_siblings_ref.

#include "row_cluster.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_AT_ONCE) draw_siblings(
    const float* weights, const double* uniforms, long long* tokens, int vocab, int stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  ClusterThread thread = thread_in_cluster((u64*)shared);
  const int row = blockIdx.y;
  wait_for_last_kernel();

  float left[PER];
#pragma unroll
  for (int j = 0; j < PER; j++)
    left[j] = thread.place(j) < vocab ? weights[(u64)row * stride + thread.place(j)] : 0.f;
  all_have_begun();
  double scale = UNIT;
  for (int rank = 0; rank < COUNT; rank++) {
    const auto weight_of = [&](int j) {
      return (u64)__double2ll_rz(__dmul_rn((double)left[j], scale));
    };
    u64 total = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) total += weight_of(j);
    total = sum_of_all(thread, total);
    const u64 place = (u64)row * COUNT + rank;
    int token = drawn(thread, uniforms[place], total, weight_of);
    if (token >= 0) tokens[place] = total ? token : -1;

    token = (int)__reduce_max_sync(ALL, token + 1) - 1;  // in the warp whose it is
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) {
      if (thread.place(j) == token) left[j] = 0.f;
      largest = max(largest, __float_as_uint(left[j]));
    }
    // What is left may be tiny; a power of two more is exact.
    const double most = __uint_as_float(largest_of_all(thread, largest)), least = 1. / UNIT;
    scale = __dmul_rn(__ddiv_rn(1., most > least ? most : least), UNIT);
  }
}
