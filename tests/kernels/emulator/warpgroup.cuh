// The instructions of kernels/cuda/warpgroup.cuh, on a CPU (cuda.h).

#define HALF 128

inline void arrive_after_copies(u32 barrier) {
  wait_for_all_copies();
  arrive_at(barrier);
}

inline u32 swizzled(int row, int piece) { return row * HALF + ((piece ^ (row & 7)) * 16); }

inline void show_to_products() {}

inline u64 matrix_at(u32 at) { return at; }

inline float code_at(u32 matrix, int row, int column) {
  const u32 start = matrix / (8 * HALF) * (8 * HALF), at = matrix % (8 * HALF) + column;
  if (matrix % (8 * HALF) >= HALF) abort();  // columns of the first row
  const unsigned char code = shared_memory[start + swizzled(row, at / 16) + at % 16];
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return NAN;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return code >> 7 ? -size : size;
}

inline void multiply_codes(float* c, u64 a, u64 b, int adds) {
  for (int i = 0; i < 4; i++) {
    const int out = warp() * 16 + lane() / 4 + i / 2 * 8, row = lane() % 4 * 2 + i % 2;
    float sum = adds ? c[i] : 0.f;
    for (int k = 0; k < 32; k++) sum += code_at(a, out, k) * code_at(b, row, k);
    c[i] = sum;
  }
}

// Products of this thread that are made at the last moment: when it waits for them. By groups.
using Products = std::vector<std::function<void()>>;
inline std::vector<Products>& my_products() {
  static std::map<std::pair<int, int>, std::vector<Products>> all;  // of blocks and their threads
  auto& mine = all[{here().index, threadIdx.x}];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

inline void end_of_products() { my_products().emplace_back(); }

// Until all have ended but those of the last `groups` groups that have ended.
inline void wait_for_products_but(int groups) {
  while ((int)my_products().size() > groups + 1) {  // the last one is open
    const Products asked = std::move(my_products().front());
    my_products().erase(my_products().begin());
    for (const auto& product : asked) product();
  }
}

inline void wait_for_products() {
  end_of_products();
  wait_for_products_but(0);
}
