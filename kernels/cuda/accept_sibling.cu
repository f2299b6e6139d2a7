// Recursive rejection (kernels/accept/accept_sibling.py): where the path of each request ends, and the token after it.
//
// Compile-time: those of row_cluster.cuh, HAS_NUMBERS, LANE (of coins), ACCEPT, RESIDUAL, SAMPLE (streams).
//
// A cluster a request goes down its tree. What is left of the target stays in registers: a rejected child
// costs one row of the draft, and two meetings. All threads decide everything alike.

#include "row_cluster.cuh"

struct Nodes {
  const long long *tokens, *parents, *depths, *numbers;  // numbers: what coins are keyed by
  int count;

  // The first child of a node behind another one; 0 where there is none.
  __device__ __forceinline__ int child(int parent, int after, int lane) const {
    u32 found = 0;
    for (int n = lane; n < count; n += 32)
      if (n > after && depths[n] > 0 && parents[n] == parent) found = max(found, (u32)(NOWHERE - n));
    found = __reduce_max_sync(ALL, found);
    return found ? NOWHERE - (int)found : 0;
  }
};

// min(1, wanted / draft); of a draft of 0, whether anything is wanted.
__device__ __forceinline__ double chance_of(double wanted, double draft) {
  const double ratio = draft > 0. ? __ddiv_rn(wanted, draft) : (wanted > 0. ? 1. : 0.);
  return ratio < 1. ? ratio : 1.;
}

__device__ __forceinline__ double or_1(double sum) { return sum > 0. ? sum : 1.; }

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_AT_ONCE) accept_sibling(
    const float* targets, const double* totals, const float* drafts, const long long* tokens,
    const long long* parents, const long long* depths, const long long* numbers,
    const long long* roots, const unsigned char* greedy, const long long* seeds,
    const long long* positions, long long* ends, long long* out, int vocab, int num_nodes,
    int stride_target, int stride_request, int stride_node) {
  extern __shared__ __align__(16) unsigned char shared[];
  ClusterThread thread = thread_in_cluster((u64*)shared);
  const int request = blockIdx.y, first = request * num_nodes;
  wait_for_last_kernel();

  const Nodes nodes = {tokens + first, parents + first, depths + first, numbers + first, num_nodes};
  const u64 seed = seeds[request];
  const long long position = positions[request];
  const bool reads_draft = !greedy[request];
  drafts += (u64)request * stride_request;
  double left[PER];
  int end = 0, child;
  all_have_begun();
  do {  // down to a node
    const long long row = roots[request] + end;
    child = nodes.child(end, 0, thread.lane);
    // Where nothing was drafted, weights are those that plain decoding samples from.
    const double total = child ? totals[row] : 1.;
#pragma unroll
    for (int j = 0; j < PER; j++) {
      const int place = thread.place(j);
      const double weight = place < vocab ? targets[row * stride_target + place] : 0.f;
      left[j] = total > 0. ? __ddiv_rn(weight, total) : 0.;
    }
    u32 taken = 0;  // by rejected children
    bool stands = false;
    for (int next = child; next && !stands;) {
      const int token = nodes.tokens[next];
      float draft[PER];
      double told[3] = {0., 0., 0.};  // mass of the draft, and what either says of the token
#pragma unroll
      for (int j = 0; j < PER; j++) {
        const int place = thread.place(j);
        const bool is_read = reads_draft && place < vocab && !(taken >> j & 1);
        draft[j] = is_read ? drafts[(u64)next * stride_node + place] : 0.f;
        told[0] = __dadd_rn(told[0], draft[j]);
        if (place == token) told[1] = left[j], told[2] = draft[j];
      }
      tell<double, 3, 0>(thread, told, nullptr);
      const double mass = or_1(told[0]);
      const long long number = HAS_NUMBERS ? nodes.numbers[next] : next;
      const double coin =
          uniform_of(seed, position + nodes.depths[next] - 1 + number * LANE, ACCEPT);
      stands = coin < chance_of(told[1], __ddiv_rn(told[2], mass));
      if (stands) {
        end = next;
        break;
      }
      double missing = 0.;
#pragma unroll
      for (int j = 0; j < PER; j++) {
        const double rest = __dsub_rn(left[j], __ddiv_rn((double)draft[j], mass));
        missing = __dadd_rn(missing, rest > 0. ? rest : 0.);
      }
      missing = sum_of_all(thread, missing);
#pragma unroll
      for (int j = 0; j < PER; j++) {
        const double rest = __dsub_rn(left[j], __ddiv_rn((double)draft[j], mass));
        if (missing > 0.) left[j] = __ddiv_rn(rest > 0. ? rest : 0., missing);
        if (thread.place(j) == token) taken |= 1u << j;
      }
      next = nodes.child(end, next, thread.lane);
    }
    if (!stands) break;
  } while (true);

  u64 total = 0;
#pragma unroll
  for (int j = 0; j < PER; j++) total += fixed_point(left[j]);
  total = sum_of_all(thread, total);
  const double uniform = uniform_of(seed, position + nodes.depths[end], child ? RESIDUAL : SAMPLE);
  const int token = drawn(thread, uniform, total, [&](int j) { return fixed_point(left[j]); });
  if (token >= 0) out[request] = token;
  if (thread.is_first()) ends[request] = end;
}
