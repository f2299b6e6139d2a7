// Products of four warps together, of FP8 codes in shared memory (wgmma, PTX ISA). The tests replace
// this file by one for the CPU (tests/kernels/emulator).
//
// Codes lie in rows of 128 bytes; 16 bytes `piece` of row `row` are at swizzled(row, piece).

#define HALF 128  // columns of a row in shared memory

// Arrives once what this thread has asked for (copy_async) has landed.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ u32 swizzled(int row, int piece) {
  return row * HALF + ((piece ^ (row & 7)) * 16);
}

// What other threads have copied into shared memory, and a barrier has shown, for a product.
__device__ __forceinline__ void show_to_products() {
  asm volatile("fence.proxy.async.shared::cta;\nwgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ u64 matrix_at(u32 at) {
  return (u64)1 << 62 | (u64)(8 * HALF >> 4) << 32 | (u64)1 << 16 | (at & 0x3ffff) >> 4;
}

// c (+)= a b^T of 32 columns: a [64, 32], b [8, 32]. Place i of c is a's row
// 16 warp + lane / 4 + i / 2 * 8 and b's row lane % 4 * 2 + i % 2.
__device__ __forceinline__ void multiply_codes(float* c, u64 a, u64 b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, p, 1, 1;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b), "r"(adds));
}

// Until the products that were asked for have ended.
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
