// Of mxfp4_experts.cu and mxfp4_row.cu: how codes as kernels/linear/mxfp4_words.py lays them out are
// widened, the order of sums, and what becomes of a sum.
//
// Compile-time: DOWN (the second product), CHOSEN (experts a row), BIAS, CLAMPED.

#define TYPE 0
#include "ptx.cuh"

#define CHUNK 128  // columns
#define PAIR 0x81c081c0u
#define FREE (~(0x81c081c0u | 0x081c081cu | 0x70207020u))
#define PART_BYTES (1024 + 64)  // of 16 rows of a chunk: words, factors
#define BACK 1099511627776.f    // 2 ** 40

__device__ __forceinline__ u32 turned(u32 word, int count) {
  return word << count | word >> (32 - count);
}

// Factors of a row's even and odd blocks of a chunk, as bfloat16, from four bytes.
__device__ __forceinline__ u32 even_factors(u32 bytes) { return bytes << 7 & 0x7f807f80u; }
__device__ __forceinline__ u32 odd_factors(u32 bytes) { return bytes >> 1 & 0x7f807f80u; }

// Of so many chunks of columns, those whose products are added by themselves, in their order; the sum of the
// others', which may be none, is added to that.
__device__ __forceinline__ int first_half(int chunks) { return (chunks + 1) / 2; }

// The pairs q = 0 to 3 of an even and an odd block, the chunk's first ones or (later) second ones.
__device__ __forceinline__ void widened(u32* even, u32* odd, u32 first, u32 second, u32 evens, u32 odds,
                                        bool later) {
  const u32 joined = chosen_bits(FREE, first, second << 2);
  even[0] = multiply_pair(first & PAIR, evens, later);
  even[1] = multiply_pair(first << 4 & PAIR, evens, later);
  even[2] = multiply_pair(turned(first, 10) & PAIR, evens, later);
  even[3] = multiply_pair(joined << 6 & PAIR, evens, later);
  odd[0] = multiply_pair(second & PAIR, odds, later);
  odd[1] = multiply_pair(second << 4 & PAIR, odds, later);
  odd[2] = multiply_pair(turned(second, 10) & PAIR, odds, later);
  odd[3] = multiply_pair(turned(joined, 12) & PAIR, odds, later);
}

__device__ __forceinline__ float rounded(float v) { return widen((u16)(pack(v, 0.f) & 0xffff)); }

// The bias of an output of an expert, or of its up.
__device__ __forceinline__ float bias_of(const u16* bias, int expert, int o, int width, int is_up) {
  return BIAS ? widen(bias[(u64)expert * (DOWN ? width : 2 * width) + is_up * width + o]) : 0.f;
}

// Where a slot's outputs lie.
__device__ __forceinline__ u64 place_of(int slot, int num_rows, int width) {
  return (u64)(DOWN ? slot % CHOSEN * num_rows + slot / CHOSEN : slot) * width;
}

// One output of a slot, of its sum: of the first product, with that of its up, the activation; of the
// second one times the slot's weight.
__device__ __forceinline__ void finish(float sum, float up, float bias, float bias_up, float weight,
                                       void* out, u64 at, float alpha, float limit) {
  sum *= BACK;
  if (BIAS) sum += bias;
  if (DOWN) {
    ((float*)out)[at] = sum * weight;
    return;
  }
  up *= BACK;
  if (BIAS) up += bias_up;
  // Rounded as unfused operations round them.
  float gate = rounded(sum);
  up = rounded(up);
  if (CLAMPED) {
    gate = min(gate, limit);
    up = min(max(up, -limit), limit) + 1.f;
  }
  const float activated = gate * reciprocal(1.f + __expf(-(CLAMPED ? alpha : 1.f) * gate));
  ((u16*)out)[at] = (u16)(pack(rounded(activated) * up, 0.f) & 0xffff);
}
