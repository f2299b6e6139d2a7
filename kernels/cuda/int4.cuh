// What the products with weights of 4 bits share.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), NT (tiles of 16 outputs a warp), GROUP (columns of a
// scale, a multiple of 32), SCALE (0 bfloat16, 1 float16, 2 float32), ZERO (0 none: 8; 1 uint8; 2
// float32), GATED.
//
// GATED: rows of gate and then as many rows of up are one weight, and silu(gate) up is stored. A block
// then has STORED rows of gate, and behind them the same rows of up.
//
// The weight is the left operand of the matrix unit: outputs are its rows. Of 16 bytes of codes the low
// halves are 16 columns and the high halves the 16 behind them (IntWeight); a thread takes 4 bytes of
// each row, and the columns that they hold take the places of the fragment that it holds. x takes
// the same places. Codes are put into the mantissa of 128 (1024 in float16), less 128 + zero, which is
// exact; the sum of a group is scaled in float32. A zero that is no whole number is taken from the sum:
// zero times the sum of x.
//
// Every one of them waits for the kernel ahead before it lets the next one start, and reads nothing but weights
// before. So a norm may let it start at once (norm.rms_norm, awaited): the norm has then perhaps not waited for
// the kernel ahead of itself, but nothing else learns of that. What starts behind the product finds the norm
// complete, and with it all that came before, as each kernel waits before it ends. Attention, which reads old
// keys before its own wait, does so no sooner than when only the product of q, k and v still runs. Nothing is
// overwritten too soon either: each kernel writes behind its own wait alone, when all that may still read the
// place has ended.

#include "ptx.cuh"

#define STAGE 128  // columns
#define CHUNKS 4   // of 32 columns, of a stage
#define SCALE_BYTES (SCALE == 2 ? 4 : 2)
#define ZERO_BYTES (ZERO == 2 ? 4 : ZERO)

#if TYPE == 0
#define MAGIC 0x43004300  // twice 128
#define MIDDLE 136.f
#else
#define MAGIC 0x64006400  // twice 1024
#define MIDDLE 1032.f
#endif

// A pair of values, MAGIC + code - less, of 4 bytes b: the low halves of (b0, b2), (b1, b3), then the
// high halves.
__device__ __forceinline__ u32 codes_at(u32 word, int pair, u32 less) {
  const int shift = pair == 0 ? 0 : pair == 1 ? 8 : pair == 2 ? 4 : 12;
  return subtract_pairs(masked_or(word >> shift, 0x000f000f, MAGIC), less);
}

// The pairs of columns that codes_at has, of 4 columns and 4 of those 16 behind.
__device__ __forceinline__ void pairs_of(u32* pairs, uint2 low, uint2 high) {
  pairs[0] = low_halves(low.x, low.y);
  pairs[1] = high_halves(low.x, low.y);
  pairs[2] = low_halves(high.x, high.y);
  pairs[3] = high_halves(high.x, high.y);
}

// A stage of 16 NT rows of codes. from: this lane's row and 16 bytes, at stage 0; to: its place in
// shared memory. outs_left: how many rows there are from its row on (of gate, and of up as many). between:
// rows from a block's last one of gate to its first of up.
__device__ __forceinline__ void fetch_codes(u32 to, const unsigned char* from, int stage,
                                            int columns, int outs_left, int between) {
  const u16* at = (const u16*)(from + stage * (STAGE / 2));
  const bool exists = GROUP % STAGE == 0 || stage * STAGE + (threadIdx.x & 3) * 32 < columns;
#pragma unroll
  for (int e = 0; e < 2 * NT; e++) {
    if (GATED && e == NT) at += (u64)between * (columns / 4);
    copy_async(to + e * 512, at, exists && e % (2 * NT / (1 + GATED)) * 8 < outs_left ? 16 : 0);
    at += 2 * columns;  // 8 rows
  }
}

// As it is in memory.
__device__ __forceinline__ u32 raw_scale(const unsigned char* scales, int place) {
  return SCALE == 2 ? ((const u32*)scales)[place] : ((const u16*)scales)[place];
}

__device__ __forceinline__ u32 raw_zero(const unsigned char* zeros, int place) {
  return ZERO == 0 ? 0 : ZERO == 1 ? zeros[place] : ((const u32*)zeros)[place];
}

__device__ __forceinline__ float scale_of(u32 raw) {
  return SCALE == 2 ? __uint_as_float(raw)
                    : SCALE == 1 ? widen_float16((u16)raw) : __uint_as_float(raw << 16);
}

__device__ __forceinline__ float zero_of(u32 raw) {
  return ZERO == 0 ? 8.f : ZERO == 1 ? (float)raw : __uint_as_float(raw);
}

// silu of a value of half precision, before it is rounded. The operations of Triton's kernel
// (activation_triton.py), so that the bits are the same.
__device__ __forceinline__ float silu(float gate) {
  return divided(gate, 1.f + power_of_2(gate * -1.442695041f));
}

// Two outputs: sums of gate and up, rounded as the product rounds them, become silu(gate) up, of which
// silu is rounded first.
__device__ __forceinline__ u32 gated_pair(float gate, float next_gate, float up, float next_up) {
  const u32 gates = pack(gate, next_gate);
  const u32 acts = pack(silu(widen((u16)gates)), silu(widen((u16)(gates >> 16))));
  return multiply_pairs(acts, pack(up, next_up));
}

// Of an output of a row, in the order that the kernels for few rows share with each other: the sums of SHARES
// warps or ways, apart from each other, of which those of a part are added first, then two neighbouring parts.
template <int SHARES, int COUNT>
__device__ __forceinline__ float sum_of_parts(const float* sums, int apart) {
  float sum = 0.f, of_even = 0.f;
#pragma unroll
  for (int of = 0; of < COUNT; of++) {
    float of_part = 0.f;
#pragma unroll
    for (int w = of * SHARES / COUNT; w < (of + 1) * SHARES / COUNT; w++) of_part += sums[w * apart];
    if (of % 2 == 0 && COUNT > 1)
      of_even = of_part;
    else
      sum += of_even + of_part;
  }
  return sum;
}
