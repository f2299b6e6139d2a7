// The products of kernels/cuda/warpgroup_half.cuh, on a CPU (cuda.h): made where they are waited for, of
// what then stands in shared memory. bfloat16 alone.

#include "warpgroup.cuh"

inline u64 behind(u64 matrix, int bytes) {
  if (matrix % (8 * HALF) + bytes % (8 * HALF) >= HALF) abort();  // columns of the first row
  return matrix + bytes;
}
inline void show_copies_to_products() {}
inline void before_products() {}
inline void give_registers(int) {}
inline void take_registers(int) {}
inline void keep(const u32 (&)[4]) {}
inline void keep(float (&)[4 * MT]) {}

inline void add_product(float (&c)[4 * MT], const u32 (&a)[4], u64 b, int adds) {
  add_product_of(4 * MT, c, a, b, adds);
}

// Of instructions.cpp.
#pragma GCC visibility push(hidden)
void add_shared_product_of(int count, float* c, u64 a, u64 b, int adds);
#pragma GCC visibility pop
inline void add_shared_product(float (&c)[4 * MT], u64 a, u64 b, int adds) {
  add_shared_product_of(4 * MT, c, a, b, adds);
}
