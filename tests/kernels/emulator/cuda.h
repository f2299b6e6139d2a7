// As much of CUDA C++ as the kernels of specengine use, on one CPU thread. A CUDA thread is a fiber
// that runs until a barrier or an instruction of its whole warp. Some blocks run by turns, as on
// multiprocessors, so that they can wait for each other. It shows whether indices, swizzles and orders
// are right, and copies that are read before they have landed (they read as NaN until then). It shows
// nothing about races between warps, or about speed.
#pragma once
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__

using std::max;
using std::min;

struct uint4 {
  unsigned x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct float4 {
  float x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Place {
  int x, y;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// Of this library alone, and reached without a table.
#pragma GCC visibility push(hidden)
extern Place threadIdx, blockIdx, gridDim;

const int WARP = 32, MOST_WARPS = 32, SHARED_BYTES = 232448;
extern unsigned char shared_memory[SHARED_BYTES] __asm__("shared");

const int STACK_BYTES = 1 << 16;

// Begins by its context, and goes on by jumps: a context takes a call of the kernel each way. Jumps are
// the compiler's, which keep three words; those of the C library unwind what they leave.
struct Fiber {
  ucontext_t context;
  void* at[5];
  std::unique_ptr<char[]> stack;
  bool has_begun = false, ended = false;
};

struct Barrier {
  int arrived = 0;
  long passed = 0;

  void meet(int count);
};

struct Landing {
  unsigned to;
  const void* from;
  int bytes;
};

// A barrier in shared memory (mbarrier).
struct SharedBarrier {
  int count = 0, arrived = 0;
  long open_bytes = 0, turns = 0;
  std::vector<Landing> landings;
};

const int AT_ONCE_MOST = 8, NAMES = 16;

struct Block {
  int index = -1;
  std::vector<Fiber> fibers;
  std::vector<unsigned char> shared;
  Barrier of_warp[MOST_WARPS], named[NAMES];
  std::map<unsigned, SharedBarrier> barriers;
};

extern Block blocks[AT_ONCE_MOST];
extern int slot;  // of the block that runs

inline Block& here() { return blocks[slot]; }
inline Fiber& me() { return here().fibers[threadIdx.x]; }
void go_on();  // with the next thread of the block, or behind the last with what runs the blocks
inline void yield() {
  if (!__builtin_setjmp(me().at)) go_on();
}
inline int lane() { return threadIdx.x % WARP; }
inline int warp() { return threadIdx.x / WARP; }

inline void Barrier::meet(int count) {
  const long mine = passed;
  if (++arrived == count) {
    arrived = 0;
    passed++;
  } else {
    while (passed == mine) yield();
  }
}

// Of the blocks of a cluster, which begin together.
struct ClusterBarrier {
  int arrived = 0;
  long turns = 0;
  std::map<std::pair<int, int>, long> waited;  // turns that a thread of a block has waited for
};
extern std::map<int, ClusterBarrier> of_clusters;
inline void arrive_in_cluster_of(int blocks_of_one) {
  ClusterBarrier& barrier = of_clusters[here().index / blocks_of_one];
  if (++barrier.arrived < blocks_of_one * (int)here().fibers.size()) return;
  barrier.arrived = 0;
  barrier.turns++;
}
inline void wait_for_cluster_of(int blocks_of_one) {
  ClusterBarrier& barrier = of_clusters[here().index / blocks_of_one];
  const long mine = ++barrier.waited[{here().index, threadIdx.x}];
  while (barrier.turns < mine) yield();
}
inline unsigned char* shared_of(int index) {
  if (index == here().index) return shared_memory;
  for (Block& block : blocks)
    if (block.index == index) return block.shared.data();
  abort();
}

inline void __syncwarp() { here().of_warp[warp()].meet(WARP); }
inline void __syncthreads() { here().named[0].meet(here().fibers.size()); }

inline int atomicAdd(int* at, int value) {
  *at += value;
  return *at - value;
}
inline int atomicCAS(int* at, int expected, int value) {
  const int found = *at;
  if (found == expected) *at = value;
  return found;
}
inline unsigned long __cvta_generic_to_shared(const void* at) {
  return (const unsigned char*)at - shared_memory;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline double __longlong_as_double(long long bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
inline long long __double_as_longlong(double value) {
  long long bits;
  memcpy(&bits, &value, 8);
  return bits;
}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline long long __float2ll_rz(float value) { return (long long)value; }
inline long long __double2ll_rz(double value) { return (long long)value; }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }

// What every lane of the warp shows, seen by all of them.
template <class T>
struct Board {
  T of[AT_ONCE_MOST][MOST_WARPS][WARP];

  const T* show(T value) {
    of[slot][warp()][lane()] = value;
    __syncwarp();
    return of[slot][warp()];
  }
};

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline int __shfl_sync(unsigned, int value, int from) {
  static Board<int> board;
  const int theirs = board.show(value)[from];
  __syncwarp();
  return theirs;
}

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int distance) {
  static Board<T> board;
  const T theirs = board.show(value)[lane() ^ distance];
  __syncwarp();
  return theirs;
}

template <class T>
inline T __shfl_up_sync(unsigned, T value, int distance) {
  static Board<T> board;
  const T theirs = board.show(value)[max(lane() - distance, 0)];
  __syncwarp();
  return lane() < distance ? value : theirs;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }

inline unsigned __ballot_sync(unsigned, bool value) {
  static Board<bool> board;
  const bool* of = board.show(value);
  unsigned all = 0;
  for (int i = 0; i < WARP; i++) all |= (unsigned)of[i] << i;
  __syncwarp();
  return all;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  static Board<unsigned> board;
  const unsigned* of = board.show(value);
  const unsigned most = *std::max_element(of, of + WARP);
  __syncwarp();
  return most;
}

inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  static Board<unsigned> board;
  unsigned sum = 0;
  const unsigned* of = board.show(value);
  for (int i = 0; i < WARP; i++) sum += of[i];
  __syncwarp();
  return sum;
}

// Runs body once a thread. drawn: the order in which the blocks begin, a cluster's one behind the
// other.
void run(Place grid, const int* drawn, int cluster, int threads, int shared_bytes,
         std::function<void()> body);
#pragma GCC visibility pop
