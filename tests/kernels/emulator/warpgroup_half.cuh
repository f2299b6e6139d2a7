// The products of kernels/cuda/warpgroup_half.cuh, on a CPU (cuda.h): made where they are waited for, of
// what then stands in shared memory. bfloat16 alone.

#include "warpgroup.cuh"

inline u64 behind(u64 matrix, int bytes) {
  if (matrix % (8 * HALF) + bytes % (8 * HALF) >= HALF) abort();  // columns of the first row
  return matrix + bytes;
}
inline void show_copies_to_products() {}
inline void before_products() {}
inline void wait_for_all_products() { wait_for_products_but(0); }
inline void give_registers(int) {}
inline void take_registers(int) {}
inline void keep(const u32 (&)[4]) {}
inline void keep(float (&)[4 * MT]) {}

struct LeftFragment {
  u32 a[4];
};

inline void make_product(float* c, LeftFragment a, u64 b, int adds) {
  static Board<LeftFragment> board;
  const LeftFragment* of = board.show(a);
  const u32 start = b / (8 * HALF) * (8 * HALF), at = b % (8 * HALF);
  for (int i = 0; i < 4 * MT; i++) {
    const int row = lane() / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      u16 value;
      memcpy(&value, shared_memory + start + swizzled(column, at / 16 + k / 8) + k % 8 * 2, 2);
      sum += half_of(of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k) * widen(value);
    }
    c[i] = (adds ? c[i] : 0.f) + sum;
  }
  __syncwarp();
}

inline void add_product(float (&c)[4 * MT], const u32 (&a)[4], u64 b, int adds) {
  const LeftFragment given = {{a[0], a[1], a[2], a[3]}};
  float* sums = c;
  my_products().back().push_back([=] { make_product(sums, given, b, adds); });
}
