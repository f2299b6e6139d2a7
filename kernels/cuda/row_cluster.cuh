// A row of values in the registers of a cluster of blocks, and what these tell each other of it.
//
// Compile-time: CLUSTER (blocks), WARPS (of a block), PER (values of a lane).
//
// A warp has SPAN values that lie together, and a lane every 32nd of them, so that loads are whole lines;
// places rise with blocks, then with warps. Warps leave sums and maxima in shared memory, blocks write
// theirs into the shared memory of all of the cluster, and each adds up for itself: one barrier, and no
// trip through the second-level cache.

#include "ptx.cuh"

#define THREADS (32 * WARPS)
#define BLOCKS_AT_ONCE (WARPS > 8 ? 1 : 2)  // on a multiprocessor, for which registers must do
#define SPAN (32 * PER)
#define MOST_TOLD 9  // numbers at once
#define ALL 0xffffffffu
#define UNIT 8796093022208.  // 2^43, of which weights are whole numbers where they are added up
#define NOWHERE 0x7fffffff

// In shared memory. Of both halves the one that is late is still read.
#define OF_WARPS 0                                  // u64 [2][MOST_TOLD][WARPS]
#define MAIL (2 * MOST_TOLD * WARPS)                // u64 [2][MOST_TOLD][CLUSTER]
#define LAID_OUT (MAIL + 2 * MOST_TOLD * CLUSTER)  // u64 [SPAN], of the values of one warp

struct ClusterThread {
  u64* shared;
  int block, warp, lane, turn;

  __device__ __forceinline__ int first() const { return (block * WARPS + warp) * SPAN; }
  __device__ __forceinline__ int place(int j) const { return first() + 32 * j + lane; }
  __device__ __forceinline__ bool is_first() const { return first() + lane == 0; }
  __device__ __forceinline__ u64* of_warps(int n) const {
    return shared + OF_WARPS + (turn * MOST_TOLD + n) * WARPS;
  }
  __device__ __forceinline__ u64* mail(int n) const {
    return shared + MAIL + (turn * MOST_TOLD + n) * CLUSTER;
  }
};

// Every block must have begun before another writes into its shared memory: `all_have_begun` comes
// before the first `tell`.
__device__ __forceinline__ ClusterThread thread_in_cluster(u64* shared) {
  arrive_in_cluster();
  return {shared, (int)(blockIdx.x % CLUSTER), (int)(threadIdx.x >> 5), (int)(threadIdx.x & 31), 0};
}

__device__ __forceinline__ void all_have_begun() { wait_for_cluster(); }

// Below 2^63, in the three parts that the hardware adds up.
__device__ __forceinline__ u64 sum_of_warp(u64 value) {
  const u32 part = (1u << 21) - 1;
  return (u64)__reduce_add_sync(ALL, (u32)value & part) +
         ((u64)__reduce_add_sync(ALL, (u32)(value >> 21) & part) << 21) +
         ((u64)__reduce_add_sync(ALL, (u32)(value >> 42)) << 42);
}

// In the same order every time.
__device__ __forceinline__ double sum_of_warp(double value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
    value = __dadd_rn(value, __shfl_xor_sync(ALL, value, distance));
  return value;
}

__device__ __forceinline__ u64 bits_of(u64 value) { return value; }
__device__ __forceinline__ u64 bits_of(double value) { return __double_as_longlong(value); }
__device__ __forceinline__ void set_bits(u64& value, u64 bits) { value = bits; }
__device__ __forceinline__ void set_bits(double& value, u64 bits) { value = __longlong_as_double(bits); }

// Sums, and maxima, of all threads of the cluster; each thread gets them. What blocks and warps sent still lies
// in mail() and of_warps(), until it is sent again.
template <class T, int SUMS, int PEAKS>
__device__ __forceinline__ void tell(ClusterThread& thread, T* sums, u32* peaks) {
  thread.turn ^= 1;
#pragma unroll
  for (int n = 0; n < SUMS; n++) {
    const T mine = sum_of_warp(sums[n]);
    if (thread.lane == 0) thread.of_warps(n)[thread.warp] = bits_of(mine);
  }
#pragma unroll
  for (int n = 0; n < PEAKS; n++) {
    const u32 mine = __reduce_max_sync(ALL, peaks[n]);
    if (thread.lane == 0) thread.of_warps(SUMS + n)[thread.warp] = mine;
  }
  __syncthreads();
  for (int n = thread.warp; n < SUMS + PEAKS; n += WARPS) {
    u64 mine = thread.lane < WARPS ? thread.of_warps(n)[thread.lane] : 0;
    if (n < SUMS) {
      T part;
      set_bits(part, mine);
      mine = bits_of(sum_of_warp(part));
    } else {
      mine = __reduce_max_sync(ALL, (u32)mine);
    }
    if (thread.lane < CLUSTER) store_in_block(thread.mail(n) + thread.block, thread.lane, mine);
  }
  arrive_in_cluster();
  wait_for_cluster();
#pragma unroll
  for (int n = 0; n < SUMS; n++) {
    T part;
    set_bits(part, thread.lane < CLUSTER ? thread.mail(n)[thread.lane] : 0);
    sums[n] = sum_of_warp(part);
  }
#pragma unroll
  for (int n = 0; n < PEAKS; n++)
    peaks[n] = __reduce_max_sync(ALL, (u32)thread.mail(SUMS + n)[thread.lane % CLUSTER]);
}

template <class T>
__device__ __forceinline__ T sum_of_all(ClusterThread& thread, T mine) {
  tell<T, 1, 0>(thread, &mine, nullptr);
  return mine;
}

__device__ __forceinline__ u32 largest_of_all(ClusterThread& thread, u32 mine) {
  tell<u64, 0, 1>(thread, nullptr, &mine);
  return mine;
}

// As sample_rows_ref.fixed has it.
__device__ __forceinline__ u64 fixed_point(float weight) {
  return (u64)__float2ll_rz(__fmul_rn(weight, (float)UNIT));
}
__device__ __forceinline__ u64 fixed_point(double weight) {
  return weight > 0. ? (u64)__double2ll_rz(__dmul_rn(weight, UNIT)) : 0;  // nor of what is no number
}

// As sample_rows_ref.invert_cdf: the first place up to which the weights exceed a share of their sum, which
// was sent last. Known to one lane of the cluster; all others get -1. weight_of(j): that of a lane's value.
template <class Weight>
__device__ __forceinline__ int drawn(const ClusterThread& thread, double uniform, u64 total, Weight weight_of) {
  if (total == 0) return thread.is_first() ? 0 : -1;
  const u64 target = min((u64)__double2ll_rz(__dmul_rn(uniform, (double)(long long)total)), total - 1);
  u64 before = 0;
  for (int block = 0; block < thread.block; block++) before += thread.mail(0)[block];
  for (int warp = 0; warp < thread.warp; warp++) before += thread.of_warps(0)[warp];
  if (before > target || before + thread.of_warps(0)[thread.warp] <= target) return -1;
  u64* laid_out = thread.shared + LAID_OUT;  // of one warp alone: no other warp comes here
#pragma unroll
  for (int j = 0; j < PER; j++) laid_out[32 * j + thread.lane] = weight_of(j);
  __syncwarp();
  u64 mine = 0;
  for (int j = 0; j < PER; j++) mine += laid_out[thread.lane * PER + j];
  u64 upto = mine;
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 theirs = __shfl_up_sync(ALL, upto, distance);
    if (thread.lane >= distance) upto += theirs;
  }
  before += upto - mine;
  if (before > target || before + mine <= target) return -1;
  int j = 0;
  while ((before += laid_out[thread.lane * PER + j]) <= target && j < PER - 1) j++;
  return thread.first() + thread.lane * PER + j;
}

__device__ __forceinline__ u64 mixed(u64 x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// As keyed_uniform.
__device__ __forceinline__ double uniform_of(u64 seed, u64 position, int stream) {
  const u64 golden = 0x9e3779b97f4a7c15ull;
  const u64 hashed = mixed(mixed(seed + golden * (stream + 1)) + position * golden);
  return (double)(hashed >> 11) * (1. / 9007199254740992.);
}
