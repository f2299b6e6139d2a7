// As much of CUDA C++ as the kernels of specengine use, on one CPU thread. A CUDA thread is a fiber
// that runs until a barrier or an instruction of its whole warp; blocks run one after another. It shows
// whether indices, swizzles and orders are right, and copies that are read before they have landed
// (they read as NaN until then). It shows nothing about races between warps, or about speed.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
#define __shared__

using std::max;
using std::min;

struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct Place {
  int x;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static Place threadIdx, blockIdx, gridDim;

const int WARP = 32, MOST_WARPS = 32, SHARED_BYTES = 232448;
extern unsigned char shared_memory[SHARED_BYTES] __asm__("shared");

struct Copy {
  unsigned to;
  const void* from;
  bool exists;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool ended = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> body;

inline Fiber& me() { return fibers[threadIdx.x]; }
inline int lane() { return threadIdx.x % WARP; }
inline int warp() { return threadIdx.x / WARP; }

struct Barrier {
  int arrived = 0;
  long passed = 0;

  void meet(int count) {
    const long mine = passed;
    if (++arrived == count) {
      arrived = 0;
      passed++;
    } else {
      while (passed == mine) swapcontext(&me().context, &scheduler);
    }
  }
};

static Barrier of_warp[MOST_WARPS], of_block;

inline void __syncwarp() { of_warp[warp()].meet(WARP); }
inline void __syncthreads() { of_block.meet(fibers.size()); }
inline void __threadfence() {}

inline int atomicAdd(int* at, int value) {
  *at += value;
  return *at - value;
}
template <class T>
inline T __ldcg(const T* at) {
  return *at;
}
inline unsigned long __cvta_generic_to_shared(const void* at) {
  return (const unsigned char*)at - shared_memory;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }

// What every lane of the warp shows, seen by all of them.
template <class T>
struct Board {
  T of[MOST_WARPS][WARP];

  const T* show(T value) {
    of[warp()][lane()] = value;
    __syncwarp();
    return of[warp()];
  }
};

inline float __shfl_xor_sync(unsigned, float value, int distance) {
  static Board<float> board;
  const float theirs = board.show(value)[lane() ^ distance];
  __syncwarp();
  return theirs;
}
