// Products of four warps together of half precision, whose right operand is in shared memory and whose
// left one there or in registers (wgmma, PTX ISA). The tests replace this file by one for the CPU
// (tests/kernels/emulator).
//
// Compile-time: TYPE (0 bfloat16, 1 float16), MT (tiles of 8 columns: 1, 2, 4, 8 or 16).
//
// A product reads its registers until it has been waited for, and ptxas before CUDA 13.3 gives those of
// its left operand to what comes before the wait (triton-lang/triton, issue 9433): keep() them behind it.

#include "warpgroup.cuh"

#if TYPE == 0
#define VALUES "bf16"
#else
#define VALUES "f16"
#endif

#define FOUR(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 4), FOUR(c, i + 8), FOUR(c, i + 12)

#if MT == 1
#define SHAPE "m64n8k16"
#define SUMS \
  "%0,%1,%2,%3"
#define SUMS_OF(c) FOUR(c, 0)
#define REGISTERS "{%4,%5,%6,%7}, %8, p, 1, 1, 0"
#define AFTER_REGISTERS "%9"
#define PLACES "%4, %5, p, 1, 1, 0, 0"
#define AFTER_PLACES "%6"
#elif MT == 2
#define SHAPE "m64n16k16"
#define SUMS \
  "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS_OF(c) FOUR(c, 0), FOUR(c, 4)
#define REGISTERS "{%8,%9,%10,%11}, %12, p, 1, 1, 0"
#define AFTER_REGISTERS "%13"
#define PLACES "%8, %9, p, 1, 1, 0, 0"
#define AFTER_PLACES "%10"
#elif MT == 4
#define SHAPE "m64n32k16"
#define SUMS \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_OF(c) SIXTEEN(c, 0)
#define REGISTERS "{%16,%17,%18,%19}, %20, p, 1, 1, 0"
#define AFTER_REGISTERS "%21"
#define PLACES "%16, %17, p, 1, 1, 0, 0"
#define AFTER_PLACES "%18"
#elif MT == 8
#define SHAPE "m64n64k16"
#define SUMS \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_OF(c) SIXTEEN(c, 0), SIXTEEN(c, 16)
#define REGISTERS "{%32,%33,%34,%35}, %36, p, 1, 1, 0"
#define AFTER_REGISTERS "%37"
#define PLACES "%32, %33, p, 1, 1, 0, 0"
#define AFTER_PLACES "%34"
#elif MT == 16
#define SHAPE "m64n128k16"
#define SUMS \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS_OF(c) SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
#define REGISTERS "{%64,%65,%66,%67}, %68, p, 1, 1, 0"
#define AFTER_REGISTERS "%69"
#define PLACES "%64, %65, p, 1, 1, 0, 0"
#define AFTER_PLACES "%66"
#endif
#define PRODUCT(left_and_right, flag) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\n" \
  "wgmma.mma_async.sync.aligned." SHAPE ".f32." VALUES "." VALUES " {" SUMS "}, " left_and_right ";\n}"

// That of the columns so many bytes behind, of the same 64 or of as many others. No word overflows.
__device__ __forceinline__ u64 behind(u64 matrix, int bytes) {
  return matrix >> 32 << 32 | ((u32)matrix + bytes / 16);
}

// c = a b^T of 16 columns, plus c if `adds`: a [64, 16], b [8 MT, 16]. Of a and c a warp has 16 rows, in
// fragments as those of multiply(); c of MT of them.
__device__ __forceinline__ void add_product(float (&c)[4 * MT], const u32 (&a)[4], u64 b, int adds) {
  asm volatile(PRODUCT(REGISTERS, AFTER_REGISTERS)
               : SUMS_OF(c)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

// The same with a in shared memory, in rows as those of b. A warp has 16 of its 64 rows.
__device__ __forceinline__ void add_shared_product(float (&c)[4 * MT], u64 a, u64 b, int adds) {
  asm volatile(PRODUCT(PLACES, AFTER_PLACES) : SUMS_OF(c) : "l"(a), "l"(b), "r"(adds));
}

// The products that were asked for are on their way.
__device__ __forceinline__ void end_of_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// What this thread has copied into shared memory and has waited for, for products behind a barrier.
__device__ __forceinline__ void show_copies_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Behind what wrote the registers of the products that follow.
__device__ __forceinline__ void before_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Until all have ended but those in front of the last `groups` calls of end_of_products.
#define wait_for_products_but(groups) \
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(groups) : "memory")

__device__ __forceinline__ void keep(const u32 (&a)[4]) {
  asm volatile("" :: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
__device__ __forceinline__ void keep(float (&c)[4 * MT]) {
#pragma unroll
  for (int i = 0; i < 4 * MT; i++) asm volatile("" : "+f"(c[i]) :: "memory");
}

// Of four warps: how many registers each of their threads has from here on. Some give what others take. Each
// number is a multiple of 8, and all that there are at the start suffice for them.
#define give_registers(registers) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers))
#define take_registers(registers) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers))
