// The instructions of kernels/cuda/ptx.cuh, on a CPU (cuda.h). bfloat16 alone.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

// As tests/kernels/emulated_cuda.py has it.
struct TensorMap {
  const u16* at;
  int sizes[4];
  long strides[4];
  int box[4];
};

// Of instructions.cpp.
#pragma GCC visibility push(hidden)
void copy_tile(u32 to, const TensorMap* map, int a, int b, int c, int d, u32 barrier);
void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
uint4 load_matrices(u32 at);
uint4 load_turned_matrices(u32 at);
u32 turned(u32 v);
void prepare_barrier(u32 barrier, int count);
void arrive_at(u32 barrier);
void expect_bytes(u32 barrier, int bytes);
void copy_bulk(u32 to, const u16* from, int bytes, u32 barrier);
void wait_at(u32 barrier, int turn);
void meet_among(int name, int threads);
void copy_async(u32 to, const u16* from, int bytes);
void end_of_copies();
void wait_for_copies_but(int groups);
void wait_for_all_copies();
u64 nanoseconds();
void arrive_in_block_of(int blocks_of_one, u32 at, int block);
void send_to_block_of(int blocks_of_one, const void* at, int block, const void* value, int bytes, u32 barrier);
#pragma GCC visibility pop

inline void copy_tile_once(u32 to, const TensorMap* map, int a, int b, int c, int d, u32 barrier) {
  copy_tile(to, map, a, b, c, d, barrier);
}

template <int TO, int FROM>
inline void copy_async_behind(u32 to, const u16* from) {
  copy_async(to + TO, from + FROM / 2, 16);
}

inline void allow_next_kernel() {}
inline void wait_for_last_kernel() {}

inline uint4 load_constant(const u16* at) { return *(const uint4*)at; }
inline uint4 load_constant_now(const u16* at) { return *(const uint4*)at; }
inline uint4 load_fresh(const u16* at) { return *(const uint4*)at; }
inline uint4 load_fresh_if(bool exists, const u16* at) { return exists ? load_fresh(at) : uint4(); }
inline const u16* computed_now(const u16* at) { return at; }
inline u16 load_fresh_one(const u16* at) { return *at; }
inline u32 load_fresh_two(const u16* at) { return *(const u32*)at; }
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
inline u32 byte_in_pair(u32 word, int byte, u32 bits) {
  return (word >> 8 * byte & 0xff) * 0x10001 | bits & 0xff00ff00;
}
inline u32 subtract_pairs(u32 a, u32 b) {
  return pack(widen((u16)a) - widen((u16)b), widen((u16)(a >> 16)) - widen((u16)(b >> 16)));
}
inline u32 add_pairs(u32 a, u32 b) {
  return pack(widen((u16)a) + widen((u16)b), widen((u16)(a >> 16)) + widen((u16)(b >> 16)));
}
inline u32 kept(u32 value) { return value; }
inline float power_of_2(float v) { return exp2f(v); }
inline u32 code_of(float v) {
  const u32 sign = __float_as_uint(v) >> 31 << 7;
  const float size = sign ? -v : v;
  if (v != v) return 0x7f;
  if (!(size < 448.f)) return sign | 0x7e;
  int exponent = 1 - 7;  // of what is smallest with three bits behind the point
  while (size >= ldexpf(2.f, exponent)) exponent++;
  const float units = ldexpf(size, 3 - exponent), whole = floorf(units), rest = units - whole;
  const int code = (int)whole + (rest > 0.5f || (rest == 0.5f && (int)whole % 2));
  return sign | ((exponent + 6) * 8 + code);
}
inline u32 codes_of_four(float a, float b, float c, float d) {
  return code_of(a) | code_of(b) << 8 | code_of(c) << 16 | code_of(d) << 24;
}
inline float reciprocal(float v) { return 1.f / v; }
inline float divided(float a, float b) { return a / b; }

inline float half_of(u32 pair, int k) { return widen((u16)(k % 2 ? pair >> 16 : pair)); }

inline uint4 load_shared(u32 at) {
  uint4 v;
  memcpy(&v, shared_memory + at, 16);
  return v;
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

inline void show_barriers() {}
inline void show_memory_to_copies() {}

inline void prefetch_bulk(const u16* from, int bytes) {
  if (bytes < 0 || bytes % 16 || (unsigned long)from % 16) abort();
}

inline void arrive_in_memory(int* counter) {
  may_be_late();
  ++*counter;
}
inline int seen_in_memory(const int* counter) { return *counter; }
inline void pause() {
  may_be_late();
  yield();
}

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
inline void fail() { abort(); }

#ifdef CLUSTER
inline void arrive_in_cluster() { arrive_in_cluster_of(CLUSTER); }
inline void wait_for_cluster() { wait_for_cluster_of(CLUSTER); }
inline void store_in_block(u64* at, int block, u64 value) {
  memcpy(shared_of(block, CLUSTER) + ((unsigned char*)at - shared_memory), &value, 8);
}
inline void send_to_block(u32* at, int block, u32 value, u32 barrier) {
  send_to_block_of(CLUSTER, at, block, &value, 4, barrier);
}
inline void send_two_to_block(u64* at, int block, u64 value, u32 barrier) {
  if ((unsigned long)at % 8) abort();
  send_to_block_of(CLUSTER, at, block, &value, 8, barrier);
}
inline void send_four_to_block(const float4* at, int block, float4 value, u32 barrier) {
  if ((unsigned long)at % 16) abort();
  send_to_block_of(CLUSTER, at, block, &value, 16, barrier);
}
inline void arrive_in_block(u32 barrier, int block) { arrive_in_block_of(CLUSTER, barrier, block); }
inline void wait_in_cluster_at(u32 barrier, int turn) { wait_at(barrier, turn); }
inline float load_float_of_block(const float* at, int block) {
  float v;
  memcpy(&v, shared_of(block, CLUSTER) + ((unsigned char*)at - shared_memory), 4);
  return v;
}
inline float4 load_four_of_block(const float* at, int block) {
  if ((unsigned long)at % 16) abort();
  return {load_float_of_block(at, block), load_float_of_block(at + 1, block),
          load_float_of_block(at + 2, block), load_float_of_block(at + 3, block)};
}
#endif
