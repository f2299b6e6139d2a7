// What the few-row products share: arithmetic in half precision.

#include "ptx.cuh"

__device__ __forceinline__ u16 narrow(float v) { return (u16)(pack(v, 0.f) & 0xffff); }
__device__ __forceinline__ float rounded(float v) { return widen(narrow(v)); }

// silu(gate) * up with the roundings of the unfused operations.
__device__ __forceinline__ float gated(float gate, float up) {
  gate = rounded(gate);
  return rounded(gate * reciprocal(1.f + __expf(-gate))) * rounded(up);
}

// Of two values.
__device__ __forceinline__ float squares_of(u32 x) {
  const float a = widen((u16)x), b = widen((u16)(x >> 16));
  return a * a + b * b;
}

__device__ __forceinline__ float squares_of(uint4 x) {
  const u32 pairs[4] = {x.x, x.y, x.z, x.w};
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) squares += squares_of(pairs[i]);
  return squares;
}

// x * gain of two values, and the sum of their squares.
__device__ __forceinline__ u32 scaled(u32 x, u32 gain, float& squares) {
  squares += squares_of(x);
  return multiply_pairs(x, gain);
}

__device__ __forceinline__ uint4 scaled_by(uint4 x, uint4 gain, float& squares) {
  return make_uint4(scaled(x.x, gain.x, squares), scaled(x.y, gain.y, squares),
                    scaled(x.z, gain.z, squares), scaled(x.w, gain.w, squares));
}

// x * scale * gain, rounded after each, as a norm by itself rounds.
__device__ __forceinline__ u32 normed(u32 x, float scale, u32 gain) {
  return multiply_pairs(pack(widen((u16)x) * scale, widen((u16)(x >> 16)) * scale), gain);
}

__device__ __forceinline__ uint4 normed_by(uint4 x, float scale, uint4 gain) {
  return make_uint4(normed(x.x, scale, gain.x), normed(x.y, scale, gain.y),
                    normed(x.z, scale, gain.z), normed(x.w, scale, gain.w));
}
