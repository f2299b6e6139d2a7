// The instructions of kernels/cuda/ptx.cuh, on a CPU (cuda.h). bfloat16 alone.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

inline void allow_next_kernel() {}
inline void wait_for_last_kernel() {}

inline uint4 load_constant(const u16* at) { return *(const uint4*)at; }
inline uint4 load_fresh(const u16* at) { return *(const uint4*)at; }
inline u16 load_fresh_one(const u16* at) { return *at; }

inline float widen(u16 v) { return __uint_as_float((u32)v << 16); }

inline u32 narrowed(float v) {
  u32 bits;
  memcpy(&bits, &v, 4);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return narrowed(low) | narrowed(high) << 16; }

struct Fragments {
  u32 a[4], b[2];
};

inline float half_of(u32 pair, int k) { return widen((u16)(k % 2 ? pair >> 16 : pair)); }

inline void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  static Board<Fragments> board;
  const Fragments* of = board.show({{a0, a1, a2, a3}, {b0, b1}});
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      const u32 a = of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const u32 b = of[column * 4 + k % 8 / 2].b[k / 8];
      sum += half_of(a, k) * half_of(b, k);
    }
    c[i] += sum;
  }
  __syncwarp();
}

inline uint4 load_matrices(u32 at) {
  static Board<u32> board;
  const u32* of = board.show(at);
  u32 v[4];
  for (int i = 0; i < 4; i++) memcpy(&v[i], shared_memory + of[i * 8 + lane() / 4] + lane() % 4 * 4, 4);
  __syncwarp();
  return {v[0], v[1], v[2], v[3]};
}

inline void store_shared(u32 at, uint4 v) { memcpy(shared_memory + at, &v, 16); }

inline void copy_async(u32 to, const u16* from, bool exists) {
  memset(shared_memory + to, 0xff, 16);
  me().open.push_back({to, from, exists});
}

inline void close_group() {
  me().groups.push_back(me().open);
  me().open.clear();
}

template <int OPEN>
inline void wait_for_groups() {
  auto& groups = me().groups;
  for (; (int)groups.size() > OPEN; groups.pop_front())
    for (const Copy& copy : groups.front()) {
      if (copy.exists)
        memcpy(shared_memory + copy.to, copy.from, 16);
      else
        memset(shared_memory + copy.to, 0, 16);
    }
}
