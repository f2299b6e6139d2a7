// Of layer_tail_wgmma.cu: what follows the sums of a product, and how blocks meet behind it.

#include "layer_tail_rings.cuh"

// What is fused before and after a product.
struct Around {
  bool norm;            // before it: its sums are scaled
  const u16* residual;  // added after it, or none
  int stride_residual;
  const u16* bias;
  u16* out;
  int width;            // of a row of results
  const u16* next_gain;  // of the norm behind it, or none
  u16* scaled;           // results times that gain
  float* squares;        // [width / 16, ROWS] sums of the squares of results
};

// The slab of this warp in one tile of a product of gates. sums: of all its rows.
__device__ __forceinline__ void finish_gates(const float (&sums)[4 * MT], int slab, int num_rows,
                                             const Around& around, const float* scales) {
  const int lane = threadIdx.x & 31, column = slab * (SLAB / 2) + (lane >> 2);
#pragma unroll
  for (int i = 0; i < 2 * MT; i++) {
    const int row = i / 2 * 8 + (lane & 3) * 2 + i % 2;
    const float scale = scales[row], gate = sums[i / 2 * 4 + i % 2], up = sums[i / 2 * 4 + i % 2 + 2];
    if (row < num_rows) around.out[(u64)row * around.width + column] = narrow(gated(gate * scale, up * scale));
  }
}

// What is added to the sums of this warp's slab in one tile, where it exists.
__device__ __forceinline__ void load_residual(u16 (&added)[4 * MT], int slab, bool exists, int num_rows,
                                              const Around& around) {
  const int lane = threadIdx.x & 31, out = slab * SLAB + (lane >> 2);
  if (!around.residual || !exists) return;
#pragma unroll
  for (int i = 0; i < 4 * MT; i++) {
    const int row = i / 4 * 8 + (lane & 3) * 2 + i % 2;
    const u64 place = (u64)row * around.stride_residual + out + i % 4 / 2 * 8;
    if (row < num_rows) added[i] = load_one_from_l2(around.residual + place);
  }
}

// The slab of this warp in one tile of another product. scales: of each row, where a norm comes before it.
__device__ __forceinline__ void finish_slab(const float (&sums)[4 * MT], const u16 (&added)[4 * MT], int slab,
                                            int num_rows, const Around& around, const float* scales) {
  const int lane = threadIdx.x & 31, out = slab * SLAB + (lane >> 2), first_row = (lane & 3) * 2;
  float bias[2] = {}, gain[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (around.bias) bias[h] = widen(around.bias[out + h * 8]);
    if (around.next_gain) gain[h] = widen(around.next_gain[out + h * 8]);
  }
#pragma unroll
  for (int i = 0; i < 2 * MT; i++) {
    const int row = i / 2 * 8 + first_row + i % 2;
    const float scale = around.norm ? scales[row] : 1.f;
    float squares = 0.f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int value = i / 2 * 4 + h * 2 + i % 2;
      float v = sums[value] * scale + bias[h];
      if (around.residual) v = rounded(v) + widen(added[value]);
      const u16 stored = narrow(v);
      const u64 place = (u64)row * around.width + out + h * 8;
      if (row >= num_rows) continue;
      around.out[place] = stored;
      if (around.next_gain) around.scaled[place] = narrow(widen(stored) * gain[h]);
      squares += widen(stored) * widen(stored);
    }
    if (!around.next_gain) continue;
    squares += __shfl_xor_sync(0xffffffff, squares, 4);
    squares += __shfl_xor_sync(0xffffffff, squares, 8);
    squares += __shfl_xor_sync(0xffffffff, squares, 16);
    if (lane < 4) around.squares[slab * ROWS + row] = squares;
  }
}

// What this block has written so far is seen by blocks that see all arrivals.
__device__ __forceinline__ void arrive_with_results(int* counter) {
  show_memory_to_copies();
  meet_among(1, MULTIPLIERS);
  if (threadIdx.x == 0) arrive_in_memory(counter);
}

// Until all blocks have arrived. A lane runs it: more of them would keep those that arrive waiting.
__device__ __forceinline__ void wait_for_results(const int* counter) {
  while (seen_in_memory(counter) != (int)gridDim.x) pause();
}

// A warp: what each row of a norm is multiplied with. squares: [slabs, ROWS].
__device__ __forceinline__ void find_scales(float* scales, const float* squares, int slabs, int width, float eps,
                                            const Signs& signs) {
  for (int row = threadIdx.x & 31; row < ROWS; row += 32) {
    float sum = 0.f;
#pragma unroll 32
    for (int slab = 0; slab < slabs; slab++) sum += load_float_from_l2(squares + slab * ROWS + row);
    scales[row] = rsqrtf(sum * (1.f / width) + eps);
  }
  __syncwarp();
  if ((threadIdx.x & 31) == 0) arrive_at(signs.scales_are_there());
}
