// As much of CUDA C++ as the kernels of specengine use, on one CPU thread. A CUDA thread is a fiber
// that runs until a barrier or an instruction of its whole warp. Some blocks run by turns, as on
// multiprocessors, so that they can wait for each other. It shows whether indices, swizzles and orders
// are right, and copies that are read before they have landed (they read as NaN until then). With a seed
// threads, copies of tiles and what blocks of a cluster send each other are late by drawn times, so that
// warps that wait for each other in vain are found. It shows nothing about speed.
//
// Every kernel's form is compiled with this: what is not of single values is compiled once, with
// runtime.cpp and instructions.cpp, and none of the C++ library's headers is large.
#pragma once
#include <stdlib.h>
#include <string.h>

#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__
#define __grid_constant__

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
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// All that they use of the C library's: its header for C++ takes longer than most kernels.
extern "C" {
float exp2f(float);
float expf(float);
float fabsf(float);
float floorf(float);
float fmaf(float, float, float);
float fmaxf(float, float);
float ldexpf(float, int);
float sqrtf(float);
}

template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

// Of this library alone, and reached without a table.
#pragma GCC visibility push(hidden)
extern Place threadIdx, blockIdx, gridDim;

const int WARP = 32, SHARED_BYTES = 232448, AT_ONCE_MOST = 16;
extern unsigned char shared_memory[SHARED_BYTES] __asm__("shared");
extern int slot;  // of the block that runs

void yield();        // until another turn of this thread
void may_be_late();  // as drawn of a seed
inline int lane() { return threadIdx.x % WARP; }
inline int warp() { return threadIdx.x / WARP; }

void arrive_in_cluster_of(int blocks_of_one);
void wait_for_cluster_of(int blocks_of_one);
unsigned char* shared_of(int block, int blocks_of_one);  // of a block of this one's cluster

void __syncwarp();
void __syncthreads();

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
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline long long __float2ll_rz(float value) { return (long long)value; }
inline long long __double2ll_rz(double value) { return (long long)value; }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// What the lane `from` of this warp gives, each lane giving something. Instructions of one kind meet.
enum Kind { FROM, XOR_OF_4, XOR_OF_8, UP_OF_8, KINDS };
unsigned long seen_from(Kind kind, unsigned long value, int from);

template <class T>
inline T seen_from(Kind kind, T value, int from) {
  unsigned long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = seen_from(kind, bits, from);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int __shfl_sync(unsigned, int value, int from) { return seen_from(FROM, value, from); }

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int distance) {
  return seen_from(sizeof(T) == 4 ? XOR_OF_4 : XOR_OF_8, value, lane() ^ distance);
}

template <class T>
inline T __shfl_up_sync(unsigned, T value, int distance) {
  const T theirs = seen_from(UP_OF_8, value, max(lane() - distance, 0));
  return lane() < distance ? value : theirs;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }

unsigned __ballot_sync(unsigned, bool value);
unsigned __reduce_max_sync(unsigned, unsigned value);
unsigned __reduce_add_sync(unsigned, unsigned value);

// Runs body(arguments) once a thread; false if they stand still, which only a seed finds out. drawn: the
// order in which the blocks begin, a cluster's one behind the other. seed: of what
// is late, and how long; 0: no thread is.
bool run(Place grid, const int* drawn, int cluster, int threads, int shared_bytes, unsigned seed,
         void (*body)(void**), void** arguments);
#pragma GCC visibility pop
