// The instructions of kernels/cuda/ptx.cuh, on a CPU (cuda.h). bfloat16 alone.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

inline void allow_next_kernel() {}
inline void wait_for_last_kernel() {}

inline uint4 load_constant(const u16* at) { return *(const uint4*)at; }
inline uint4 load_constant_now(const u16* at) { return *(const uint4*)at; }
inline uint4 load_fresh(const u16* at) { return *(const uint4*)at; }
inline u16 load_fresh_one(const u16* at) { return *at; }

inline uint2 load_fresh_four(const u16* at) { return *(const uint2*)at; }

inline float widen_float16(u16 v) {
  const int exponent = v >> 10 & 31, mantissa = v & 1023;
  const float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return v >> 15 ? -size : size;
}
inline float widen(u16 v) { return __uint_as_float((u32)v << 16); }

inline u32 narrowed(float v) {
  u32 bits;
  memcpy(&bits, &v, 4);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return narrowed(low) | narrowed(high) << 16; }

inline u32 multiply_pairs(u32 a, u32 b) {
  return pack(widen((u16)a) * widen((u16)b), widen((u16)(a >> 16)) * widen((u16)(b >> 16)));
}
inline u32 multiply_pair(u32 a, u32 b, bool by_high) {
  const u32 one = by_high ? b >> 16 : b & 0xffff;
  return multiply_pairs(a, one | one << 16);
}
inline u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
  return pack(fmaf(widen((u16)a), widen((u16)b), widen((u16)c)),
              fmaf(widen((u16)(a >> 16)), widen((u16)(b >> 16)), widen((u16)(c >> 16))));
}
inline u32 apart(u32 bytes) { return bytes & 0xff | (bytes & 0xff00) << 8; }
inline u32 masked_or(u32 v, u32 mask, u32 bits) { return v & mask | bits; }
inline u32 chosen_bits(u32 mask, u32 v, u32 other) { return v & mask | other & ~mask; }
inline u32 low_halves(u32 a, u32 b) { return a & 0xffff | b << 16; }
inline u32 high_halves(u32 a, u32 b) { return a >> 16 | b & 0xffff0000; }
inline u32 subtract_pairs(u32 a, u32 b) {
  return pack(widen((u16)a) - widen((u16)b), widen((u16)(a >> 16)) - widen((u16)(b >> 16)));
}
inline u32 kept(u32 value) { return value; }
inline float power_of_2(float v) { return exp2f(v); }
inline float reciprocal(float v) { return 1.f / v; }

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

inline uint4 load_shared(u32 at) {
  uint4 v;
  memcpy(&v, shared_memory + at, 16);
  return v;
}
inline uint4 load_matrices(u32 at) {
  static Board<u32> board;
  if (at % 16) abort();
  const u32* of = board.show(at);
  u32 words[4];
  for (int i = 0; i < 4; i++)
    memcpy(words + i, shared_memory + of[i * 8 + lane() / 4] + lane() % 4 * 4, 4);
  __syncwarp();
  return {words[0], words[1], words[2], words[3]};
}
inline u32 load_shared_word(u32 at) {
  u32 v;
  memcpy(&v, shared_memory + at, 4);
  return v;
}
inline u32 load_shared_pair(u32 at) {
  u16 v;
  memcpy(&v, shared_memory + at, 2);
  return v;
}
inline void store_shared(u32 at, uint4 v) { memcpy(shared_memory + at, &v, 16); }
inline uint4 load_from_l2(const u16* at) { return *(const uint4*)at; }
inline u16 load_one_from_l2(const u16* at) { return *at; }

inline void prepare_barrier(u32 barrier, int count) {
  here().barriers[barrier] = SharedBarrier();
  here().barriers[barrier].count = count;
}
inline void show_barriers() {}

// Everything lands at the last moment.
inline void turn_if_complete(SharedBarrier& barrier) {
  if (barrier.arrived < barrier.count || barrier.open_bytes != 0) return;
  for (const Landing& copy : barrier.landings)
    memcpy(shared_memory + copy.to, copy.from, copy.bytes);
  barrier.landings.clear();
  barrier.arrived = 0;
  barrier.turns++;
}

inline void arrive_at(u32 at) {
  SharedBarrier& barrier = here().barriers.at(at);
  barrier.arrived++;
  turn_if_complete(barrier);
}

inline void expect_bytes(u32 at, int bytes) {
  here().barriers.at(at).open_bytes += bytes;
  arrive_at(at);
}

inline void copy_bulk(u32 to, const u16* from, int bytes, u32 at) {
  if (bytes <= 0 || bytes % 16 || to % 16 || (unsigned long)from % 16) abort();
  SharedBarrier& barrier = here().barriers.at(at);
  memset(shared_memory + to, 0xff, bytes);
  barrier.landings.push_back({to, from, bytes});
  barrier.open_bytes -= bytes;
  turn_if_complete(barrier);
}

inline void prefetch_bulk(const u16* from, int bytes) {
  if (bytes < 0 || bytes % 16 || (unsigned long)from % 16) abort();
}

inline void wait_at(u32 at, int turn) {
  while (here().barriers.at(at).turns % 2 == turn) yield();
}

inline void meet_among(int name, int threads) { here().named[name].meet(threads); }

inline void arrive_in_memory(int* counter) { ++*counter; }
inline int seen_in_memory(const int* counter) { return *counter; }
inline void pause() { yield(); }

inline uint4 load_settled(const u16* at) { return *(const uint4*)at; }
inline void settle(u16* at, u32 value) { *(u32*)at = value; }
inline u64 load_settled_key(const u64* at) { return *at; }
inline void settle_key(u64* at, u64 value) { *at = value; }
inline void look_again() { yield(); }
inline float load_float_from_l2(const float* at) { return *at; }
// The block of the last one comes late.
inline int multiprocessor() {
  for (int i = 0; i < 200 && slot == AT_ONCE_MOST - 1; i++) yield();
  return slot;
}
inline void tell(int* flag, int value) { *flag = value; }

inline int load_fresh_int(const int* at) { return *at; }
// Another launch, of another thread and library, may be at the same words.
inline void send_words(u64* at, u64 first, u64 second) {
  __atomic_store_n(at, first, __ATOMIC_RELAXED);
  __atomic_store_n(at + 1, second, __ATOMIC_RELAXED);
}
inline void look_at_words(const u64* at, u64& first, u64& second) {
  first = __atomic_load_n(at, __ATOMIC_RELAXED);
  second = __atomic_load_n(at + 1, __ATOMIC_RELAXED);
}
inline void tell_other_gpu(u32* flag, u32 value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
inline u32 told_by_other_gpu(const u32* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}
inline void fail() { abort(); }

// Copies of each thread, by groups. Everything lands at the last moment.
struct Copy {
  u32 to;
  const u16* from;
  int bytes;
};
using Group = std::vector<Copy>;
inline std::vector<Group>& my_groups() {
  static std::map<std::pair<int, int>, std::vector<Group>> all;  // of blocks and their threads
  auto& mine = all[{here().index, threadIdx.x}];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
inline void copy_async(u32 to, const u16* from, int bytes) {
  if (bytes < 0 || bytes > 16 || to % 16 || (unsigned long)from % 16) abort();
  memset(shared_memory + to, 0xff, 16);
  my_groups().back().push_back({to, from, bytes});
}
inline void end_of_copies() { my_groups().emplace_back(); }
inline void wait_for_copies_but(int groups) {
  auto& mine = my_groups();  // the last one is open
  for (; (int)mine.size() > groups + 1; mine.erase(mine.begin()))
    for (const Copy& copy : mine.front()) {
      memset(shared_memory + copy.to, 0, 16);
      memcpy(shared_memory + copy.to, copy.from, copy.bytes);
    }
}
inline void wait_for_all_copies() {
  end_of_copies();
  wait_for_copies_but(0);
}

#ifdef CLUSTER
inline void arrive_in_cluster() { arrive_in_cluster_of(CLUSTER); }
inline void wait_for_cluster() { wait_for_cluster_of(CLUSTER); }
inline void store_in_block(u64* at, int block, u64 value) {
  const int index = here().index / CLUSTER * CLUSTER + block;
  memcpy(shared_of(index) + ((unsigned char*)at - shared_memory), &value, 8);
}
inline float load_float_of_block(const float* at, int block) {
  const int index = here().index / CLUSTER * CLUSTER + block;
  float v;
  memcpy(&v, shared_of(index) + ((unsigned char*)at - shared_memory), 4);
  return v;
}
inline float4 load_four_of_block(const float* at, int block) {
  if ((unsigned long)at % 16) abort();
  return {load_float_of_block(at, block), load_float_of_block(at + 1, block),
          load_float_of_block(at + 2, block), load_float_of_block(at + 3, block)};
}
#endif
