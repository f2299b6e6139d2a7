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

// Of what the kernel ahead may have written: never through the read-only cache.
__device__ __forceinline__ uint4 load_fresh(const u16* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ u16 load_fresh_one(const u16* at) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return v;
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

// Four matrices of 8 x 8 values, a row from the address of each lane.
__device__ __forceinline__ uint4 load_matrices(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// 16 bytes into shared memory; zeros if they do not exist.
__device__ __forceinline__ void copy_async(u32 to, const u16* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

__device__ __forceinline__ void close_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// This thread's copies of all but the last OPEN groups have landed.
template <int OPEN>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" :: "n"(OPEN) : "memory");
}
