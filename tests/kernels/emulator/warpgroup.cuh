// The instructions of kernels/cuda/warpgroup.cuh, on a CPU (cuda.h).

#define HALF 128

inline void arrive_after_copies(u32 barrier) {
  wait_for_all_copies();
  arrive_at(barrier);
}

inline u32 swizzled(int row, int piece) { return row * HALF + ((piece ^ (row & 7)) * 16); }

inline void show_to_products() {}

inline u64 matrix_at(u32 at) { return at; }

// Of instructions.cpp.
#pragma GCC visibility push(hidden)
void multiply_codes(float* c, u64 a, u64 b, int adds);
void end_of_products();
void wait_for_products_but(int groups);
void wait_for_products();
void add_product_of(int count, float* c, const u32* a, u64 b, int adds);
#pragma GCC visibility pop
