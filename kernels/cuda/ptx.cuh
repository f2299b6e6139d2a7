// Instructions that CUDA C++ has no name for. The tests replace this file by one for the CPU
// (tests/kernels/emulator).
//
// Compile-time: TYPE (0 bfloat16, 1 float16).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

// The next kernel may start; it waits for this one's end before it reads what this one writes.
__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void wait_for_last_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Of what nothing writes while the model runs.
__device__ __forceinline__ uint4 load_constant(const u16* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// The same, in the place where it is called: of the read-only cache ptxas puts loads behind the wait for the last
// kernel if that spares registers, and they are on their way too late.
__device__ __forceinline__ uint4 load_constant_now(const u16* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

// Of what the kernel ahead may have written: never through the read-only cache.
__device__ __forceinline__ uint4 load_fresh(const u16* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

// Zeros where there is nothing.
__device__ __forceinline__ uint4 load_fresh_if(bool exists, const u16* at) {
  uint4 v;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
               "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
               "@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(at), "r"((u32)exists) : "memory");
  return v;
}

// An address that is computed where this is called.
__device__ __forceinline__ const u16* computed_now(const u16* at) {
  asm volatile("" : "+l"(at));
  return at;
}

__device__ __forceinline__ u16 load_fresh_one(const u16* at) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
}

// Two values of half precision.
__device__ __forceinline__ u32 load_fresh_two(const u16* at) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// Four of them.
__device__ __forceinline__ uint2 load_fresh_four(const u16* at) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ float widen_float16(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}

__device__ __forceinline__ float widen(u16 v) {
  float f;
#if TYPE == 0
  f = __uint_as_float(((u32)v) << 16);
#else
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
#endif
  return f;
}

// Two values rounded to half precision.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 v;
#if TYPE == 0
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#endif
  return v;
}

// Products of two pairs, each rounded once.
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 v;
#if TYPE == 0
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#endif
  return v;
}

// Products of a pair of bfloat16 with one value, the low or the high one of b, each rounded once.
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b, bool by_high) {
  u32 v;
  if (by_high)
    asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 twice, {high, high};\nmul.rn.bf16x2 %0, %1, twice;\n}"
        : "=r"(v) : "r"(a), "r"(b));
  else
    asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %2;\n"
        "mov.b32 twice, {low, low};\nmul.rn.bf16x2 %0, %1, twice;\n}"
        : "=r"(v) : "r"(a), "r"(b));
  return v;
}

// a b + c of two pairs, each rounded once.
__device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
  u32 v;
#if TYPE == 0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
#endif
  return v;
}

// v & mask | bits, at once.
__device__ __forceinline__ u32 masked_or(u32 v, u32 mask, u32 bits) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(mask), "r"(bits));
  return r;
}

// Bits of v where the mask has ones, and of other, at once.
__device__ __forceinline__ u32 chosen_bits(u32 mask, u32 v, u32 other) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(v), "r"(other));
  return r;
}

// (low of a, low of b), and (high of a, high of b).
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// The low byte, and the one behind it 16 bits further.
__device__ __forceinline__ u32 apart(u32 bytes) { return __byte_perm(bytes, 0, 0x4140); }

// A byte of a word as the low ones of a pair whose high ones are those of `bits`.
__device__ __forceinline__ u32 byte_in_pair(u32 word, int byte, u32 bits) {
  return __byte_perm(word, bits, 0x7050 | byte << 8 | byte);
}

// Differences of two pairs, each rounded once.
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
  u32 v;
#if TYPE == 0
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#else
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#endif
  return v;
}

// Sums of two pairs, each rounded once.
__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  u32 v;
#if TYPE == 0
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#else
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
#endif
  return v;
}

// The value, which ptxas cannot compute anew where it is used.
__device__ __forceinline__ u32 kept(u32 value) {
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 31, 0xffffffff;" : "+r"(value) : "r"(threadIdx.x & 31));
  return value;
}

// Nearly; of minus infinity 0.
__device__ __forceinline__ float power_of_2(float v) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
  return power;
}

__device__ __forceinline__ float reciprocal(float v) {
  float one_by;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(one_by) : "f"(v));
  return one_by;
}

// Four values rounded to E4M3; beyond 448 they are 448.
__device__ __forceinline__ u32 codes_of_four(float a, float b, float c, float d) {
  u32 v;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(v) : "f"(a), "f"(b), "f"(c), "f"(d));
  return v;
}

// a / b, nearly, as Triton divides.
__device__ __forceinline__ float divided(float a, float b) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

// c += a b: [16, 16] x [16, 8], fragments as PTX lays them out (mma.m16n8k16).
__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if TYPE == 0
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

#define LOADS_MATRICES(name, turn)                                                          \
  __device__ __forceinline__ uint4 name(u32 at) {                                           \
    uint4 v;                                                                                \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" turn ".shared.b16 {%0,%1,%2,%3}, [%4];"    \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");        \
    return v;                                                                               \
  }

// Four matrices of eight rows of 16 bytes, each lane the place of a row: of matrix i lane l gets word
// l % 4 of row l / 4.
LOADS_MATRICES(load_matrices, "")

// The same, of matrix i words of the column l / 4: its values in rows 2 (l % 4) and the next.
LOADS_MATRICES(load_turned_matrices, ".trans")

// Of a matrix of eight rows, of which lane l gives word l % 4 of row l / 4, word l % 4 of column l / 4.
__device__ __forceinline__ u32 turned(u32 v) {
  u32 columns;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(v));
  return columns;
}

__device__ __forceinline__ u32 load_shared_word(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_shared_pair(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Of what other multiprocessors have written while this kernel runs: the first cache would not know.
__device__ __forceinline__ uint4 load_from_l2(const u16* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ u16 load_one_from_l2(const u16* at) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
}

// Barriers in shared memory: they turn when `count` threads have arrived and all bytes that were
// expected have landed.
__device__ __forceinline__ void prepare_barrier(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

// Before the barrier of the block after which they are used.
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and expects so many bytes.
__device__ __forceinline__ void expect_bytes(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Until the barrier's turn `turn` (0, 1, 0...) has ended; that before the first has.
__device__ __forceinline__ void wait_at(u32 barrier, int turn) {
  u32 ended;
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended) : "r"(barrier), "r"(turn) : "memory");
  } while (!ended);
}

// Consecutive bytes, a multiple of 16, into shared memory; the barrier is signalled when they have landed.
__device__ __forceinline__ void copy_bulk(u32 to, const u16* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// How a matrix lies in memory (tensor_map.py); an argument of a kernel (__grid_constant__).
struct __align__(64) TensorMap {
  u64 words[16];
};

// A box of a matrix of four dimensions, from the given place on, the first dimension's first. to: a multiple of
// 1024, where rows of 128 bytes begin, swizzled. The barrier is signalled when they have landed.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int a, int b, int c, int d, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2,%3,%4,%5}], [%6];"
               :: "r"(to), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier) : "memory");
}

// Of what is read once: the second cache lets it go first.
#define LET_GO_FIRST 0x12f0000000000000ull
__device__ __forceinline__ void copy_tile_once(u32 to, const TensorMap* map, int a, int b, int c, int d, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2,%3,%4,%5}], [%6], %7;"
               :: "r"(to), "l"(map), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier), "l"(LET_GO_FIRST) : "memory");
}

// What threads have written to memory, for copies that follow.
__device__ __forceinline__ void show_memory_to_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Consecutive bytes, a multiple of 16, into the second cache.
__device__ __forceinline__ void prefetch_bulk(const u16* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

// A barrier of some warps of the block. name: 1 to 15.
__device__ __forceinline__ void meet_among(int name, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(name), "r"(threads) : "memory");
}

// After what this thread has seen: a thread that sees the arrival sees that too.
__device__ __forceinline__ void arrive_in_memory(int* counter) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}

__device__ __forceinline__ int seen_in_memory(const int* counter) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 32;"); }

// A place that is read until its value has come, word by word.
__device__ __forceinline__ uint4 load_settled(const u16* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void settle(u16* at, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ u64 load_settled_key(const u64* at) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void settle_key(u64* at, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(at), "l"(value) : "memory");
}

// At once: pauses of 20 to 150 ns were level or slower (benchmarks/results, decoder-stack).
__device__ __forceinline__ void look_again() {}

__device__ __forceinline__ float load_float_from_l2(const float* at) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
  return v;
}

// After what the block has written before its last barrier.
__device__ __forceinline__ void tell(int* flag, int value) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.s32 [%0], %1;" :: "l"(flag), "r"(value)
               : "memory");
}

// That this block runs on.
__device__ __forceinline__ int multiprocessor() {
  int v;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
  return v;
}

// 16 bytes into shared memory: the first `bytes` of them, and zeros.
__device__ __forceinline__ void copy_async(u32 to, const u16* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// 16 bytes, so many bytes behind each place.
template <int TO, int FROM>
__device__ __forceinline__ void copy_async_behind(u32 to, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0+%2], [%1+%3], 16;" :: "r"(to), "l"(from), "n"(TO), "n"(FROM)
               : "memory");
}

// Until what this thread has asked for has landed.
__device__ __forceinline__ void wait_for_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// What this thread has asked for since the last call is a group, empty or not.
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all of this thread's groups have landed but the last `groups`.
#define wait_for_copies_but(groups) asm volatile("cp.async.wait_group %0;" :: "n"(groups) : "memory")

// A word at the same place of another block's shared memory, of the same cluster.
__device__ __forceinline__ void store_in_block(u64* at, int block, u64 value) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"((u32)__cvta_generic_to_shared(at)), "r"(block));
  asm volatile("st.shared::cluster.u64 [%0], %1;" :: "r"(there), "l"(value) : "memory");
}

// The same of a word of 32 bits; its four bytes are counted by a barrier of that block.
__device__ __forceinline__ void send_to_block(u32* at, int block, u32 value, u32 barrier) {
  asm volatile("{\n.reg .b32 there, told;\n"
               "mapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 told, %3, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [told];\n}"
               :: "r"((u32)__cvta_generic_to_shared(at)), "r"(value), "r"(block), "r"(barrier) : "memory");
}

// The same of two words.
__device__ __forceinline__ void send_two_to_block(u64* at, int block, u64 value, u32 barrier) {
  asm volatile("{\n.reg .b32 there, told;\n"
               "mapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 told, %3, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [there], %1, [told];\n}"
               :: "r"((u32)__cvta_generic_to_shared(at)), "l"(value), "r"(block), "r"(barrier) : "memory");
}

// From the same place of another block's shared memory, of the same cluster.
__device__ __forceinline__ float load_float_of_block(const float* at, int block) {
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"((u32)__cvta_generic_to_shared(at)), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_four_of_block(const float* at, int block) {
  u32 there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there) : "r"((u32)__cvta_generic_to_shared(at)), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there) : "memory");
  return v;
}

// As send_to_block.
__device__ __forceinline__ void send_four_to_block(const float4* at, int block, float4 v, u32 barrier) {
  asm volatile("{\n.reg .b32 there, told;\n"
               "mapa.shared::cluster.u32 there, %0, %5;\nmapa.shared::cluster.u32 told, %6, %5;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%1,%2,%3,%4}, [told];\n}"
               :: "r"((u32)__cvta_generic_to_shared(at)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(block),
                  "r"(barrier) : "memory");
}

// At the same barrier of another block of the cluster, which then sees what this thread has written before.
__device__ __forceinline__ void arrive_in_block(u32 barrier, int block) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}"
               :: "r"(barrier), "r"(block) : "memory");
}

// As wait_at, where another block arrives.
__device__ __forceinline__ void wait_in_cluster_at(u32 barrier, int turn) {
  u32 ended;
  do {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended) : "r"(barrier), "r"(turn) : "memory");
  } while (!ended);
}

// All threads of the cluster arrive, and wait for each other; each sees what the others wrote before.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ int load_fresh_int(const int* at) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// Two words, each of which arrives whole, into memory that may be another GPU's.
__device__ __forceinline__ void send_words(u64* at, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" :: "l"(at), "l"(first), "l"(second)
               : "memory");
}

// The current words there, which another GPU may write at the same time.
__device__ __forceinline__ void look_at_words(const u64* at, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(first), "=l"(second) : "l"(at)
               : "memory");
}

// After what the block has written before its last barrier, also into the other GPU's memory.
__device__ __forceinline__ void tell_other_gpu(u32* flag, u32 value) {
  asm volatile("fence.acq_rel.sys;\nst.relaxed.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(value)
               : "memory");
}

// What the other GPU wrote before it set this flag is visible after it.
__device__ __forceinline__ u32 told_by_other_gpu(const u32* flag) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  return v;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}

// Ends the kernel; every later call into CUDA fails.
__device__ __forceinline__ void fail() { asm volatile("trap;"); }
