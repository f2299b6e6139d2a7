// A token of each row of logits, and the weights that it was chosen by (kernels/sample/sample_rows.py, weigh_rows.py).
//
// Compile-time: those of row_cluster.cuh, HAS_DEPTHS, STREAM (of the uniforms), WEIGHS (weights are left in
// place of the logits).
//
// A cluster a row, which is read once: what top-k and top-p look for is looked for in registers. Every
// operation is rounded by itself, so that the bits are those of sample_rows_ref.

#include "row_cluster.cuh"

#define PIVOTS 3  // that a search tries at once

struct SampleParams {
  float temperature, min_p;
  double top_p;
  int top_k;
  double uniform;
};

// As sample_rows_ref.exp_below_, operation by operation.
__device__ __forceinline__ float exp_below(float x) {
  x = x > -40.f ? x : -40.f;
  const float powers = floorf(__fadd_rn(__fmul_rn(x, 1.4426950408889634f), 0.5f));
  const float rest = __fsub_rn(__fsub_rn(x, __fmul_rn(powers, 0.693359375f)),
                               __fmul_rn(powers, -0.00021219444f));
  float series = (float)(1. / 720.);
  const float factors[] = {(float)(1. / 120.), (float)(1. / 24.), (float)(1. / 6.), 0.5f, 1.f, 1.f};
#pragma unroll
  for (int i = 0; i < 6; i++) series = __fadd_rn(__fmul_rn(series, rest), factors[i]);
  return __fmul_rn(series, __int_as_float(((int)powers + 127) << 23));
}

// Orders as values do, those of -0 and 0 being one; above that of minus infinity, which is 0.
__device__ __forceinline__ u32 ordered(float value) {
  const u32 bits = __float_as_uint(__fadd_rn(value, 0.f)), of_least = 0x007fffffu;
  return (bits >> 31 ? ~bits : bits | 0x80000000u) - of_least;
}

__device__ __forceinline__ float value_of(u32 ordered) {
  const u32 bits = ordered + 0x007fffffu;
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// Weights as float bits, which order as they do; below 0 where there is none.
struct Weights {
  int bits[PER];

  __device__ __forceinline__ float value(int j) const { return __int_as_float(bits[j]); }
  // Of what lies above a pivot.
  __device__ __forceinline__ u64 fixed_above(int j, int pivot) const {
    return bits[j] > pivot ? fixed_point(value(j)) : 0;
  }
};

// The smallest bits such that what lies above them amounts, by number or weight, to less than limit.
template <bool BY_WEIGHT>
__device__ __forceinline__ int threshold(ClusterThread& thread, const Weights& weights, double limit) {
  int low = -1, high = 0x3f800000;  // the best token's
  while (high - low > 1) {
    int pivots[PIVOTS];
    u64 amounts[PIVOTS];      // above each pivot
    u32 peaks[2 * PIVOTS];  // one more than the largest bits up to it; and falling with the smallest above it
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) {
      pivots[i] = low + (int)((long long)(high - low) * (i + 1) / (PIVOTS + 1));
      amounts[i] = peaks[i] = peaks[PIVOTS + i] = 0;
    }
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const int bits = weights.bits[j];
      const u64 amount = BY_WEIGHT ? fixed_point(weights.value(j)) : 1;
#pragma unroll
      for (int i = 0; i < PIVOTS; i++) {
        const bool is_above = bits > pivots[i];
        amounts[i] += is_above ? amount : 0;
        peaks[i] = max(peaks[i], is_above ? 0u : (u32)(bits + 1));
        peaks[PIVOTS + i] = max(peaks[PIVOTS + i], is_above ? (u32)(NOWHERE - bits) : 0u);
      }
    }
    tell<u64, PIVOTS, 2 * PIVOTS>(thread, amounts, peaks);
    int fits = 0;  // the first pivot that does, as all behind it do
#pragma unroll
    for (int i = 0; i < PIVOTS; i++) fits += (double)(long long)amounts[i] >= limit;
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
      if (i == fits) high = max((int)peaks[i] - 1, low + 1);
#pragma unroll
    for (int i = 0; i < PIVOTS; i++)
      if (i == fits - 1) low = min(NOWHERE - (int)peaks[PIVOTS + i], high) - 1;
  }
  return high;
}

// The bits of the least weight that stays.
__device__ __forceinline__ int floor_of(ClusterThread& thread, const Weights& weights,
                                        const SampleParams& params, int vocab) {
  int floor = __float_as_int(params.min_p), pivot = -1;
  u64 beside = 0;  // the weight of those that are equal to the last of top-k
  if (params.top_k < vocab) {
    pivot = threshold<false>(thread, weights, (double)params.top_k);
    floor = max(floor, pivot);
    u64 number = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) number += weights.bits[j] > pivot;
    beside = (params.top_k - sum_of_all(thread, number)) * fixed_point(__int_as_float(pivot));
  }
  if (params.top_p < 1.) {
    u64 total = 0;
#pragma unroll
    for (int j = 0; j < PER; j++) total += weights.fixed_above(j, pivot);
    total = sum_of_all(thread, total) + beside;
    const double limit = __dmul_rn(params.top_p, (double)(long long)total);
    floor = max(floor, threshold<true>(thread, weights, limit));
  }
  return floor;
}

__device__ __forceinline__ SampleParams params_of(const long long* words, int stride, long long position) {
  return {(float)__longlong_as_double(words[0]), (float)__longlong_as_double(words[3 * stride]),
          __longlong_as_double(words[2 * stride]), (int)words[stride],
          uniform_of(words[4 * stride], position + words[5 * stride], STREAM)};
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_AT_ONCE) sample_rows(
    const float* logits, float* weights_out, const long long* words, const long long* slots,
    const long long* starts, const long long* depths, long long* out, int vocab, int nodes,
    int stride_logits, int stride_weights, int stride_slot, int stride_word) {
  extern __shared__ __align__(16) unsigned char shared[];
  ClusterThread thread = thread_in_cluster((u64*)shared);
  const int row = blockIdx.y, request = row / nodes;
  wait_for_last_kernel();

  const float* mine = logits + (u64)row * stride_logits;
  float x[PER];
#pragma unroll
  for (int j = 0; j < PER; j++) x[j] = thread.place(j) < vocab ? mine[thread.place(j)] : 0.f;
  const long long position =
      starts[request] + (HAS_DEPTHS ? depths[row] : (long long)(row % nodes));
  const SampleParams params = params_of(words + slots[request] * stride_slot, stride_word, position);
  u32 best = 0;
#pragma unroll
  for (int j = 0; j < PER; j++)
    if (thread.place(j) < vocab && x[j] == x[j]) best = max(best, ordered(x[j]));
  all_have_begun();
  best = largest_of_all(thread, best);

  float* left = weights_out + (u64)row * stride_weights;
  if (!(params.temperature > 0.f)) {
    u32 first = 0;  // of equals
#pragma unroll
    for (int j = 0; j < PER; j++)
      if (thread.place(j) < vocab && best && x[j] == x[j] && ordered(x[j]) == best)
        first = max(first, (u32)(NOWHERE - thread.place(j)));
    first = largest_of_all(thread, first);
    const int token = first ? NOWHERE - (int)first : 0;
    if (thread.is_first()) out[row] = token;
#pragma unroll
    for (int j = 0; WEIGHS && j < PER; j++)
      if (thread.place(j) < vocab) left[thread.place(j)] = thread.place(j) == token ? 1.f : 0.f;
    return;
  }

  Weights weights;
  const float top = __fdiv_rn(value_of(best), params.temperature);
#pragma unroll
  for (int j = 0; j < PER; j++) {
    const float e = exp_below(__fsub_rn(__fdiv_rn(x[j], params.temperature), top));
    weights.bits[j] = thread.place(j) < vocab ? __float_as_int(e) : -1;
  }
  const int floor = floor_of(thread, weights, params, vocab);
  u64 total = 0;
#pragma unroll
  for (int j = 0; j < PER; j++) total += weights.fixed_above(j, floor - 1);
  total = sum_of_all(thread, total);
  const int token = drawn(thread, params.uniform, total,
                          [&](int j) { return weights.fixed_above(j, floor - 1); });
  if (token >= 0) out[row] = token;
#pragma unroll
  for (int j = 0; WEIGHS && j < PER; j++)
    if (thread.place(j) < vocab)
      left[thread.place(j)] = weights.fixed_above(j, floor - 1) ? weights.value(j) : 0.f;
}
