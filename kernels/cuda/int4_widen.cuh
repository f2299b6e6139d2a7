// Codes of 4 bits as left operands of products of a warpgroup, in int4_wgmma.cu. Needs its names, and
// int4_stages.cuh.

// What the codes of a row of a stage become.
struct Scaling {
  u32 less;       // MAGIC's value and the zero, twice
  u32 high, low;  // the scale, of two terms, each twice
  float by;
};

// The scales and zeros of a warp's outputs. held: of this warp, [count][16], and their zeros behind them if
// a scale fills a word.
__device__ __forceinline__ void hold_scales(u32* held, const unsigned char* scale, const unsigned char* zero,
                                            int first_out, int num_outs, int groups, int rank, int count,
                                            int stages) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    u32 scales[4][4], zeros[4][4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int group = stage_at(rank, first + t * 8 + (lane & 7), stages) * STAGE / GROUP;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int place = min(first_out + i * 4 + (lane >> 3), num_outs - 1) * groups + group;
        if (first + t * 8 >= count) continue;
        scales[t][i] = raw_scale(scale, place);
        zeros[t][i] = raw_zero(zero, place);
      }
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int turn = first + t * 8 + (lane & 7);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (turn >= count) continue;
        const float less = MIDDLE - 8.f + zero_of(zeros[t][i]);
        u32* at = held + turn * 16 + i * 4 + (lane >> 3);
        const u32 pair = pack(less, less);
        at[0] = SCALE == 2 ? scales[t][i] : scales[t][i] | pair << 16;
        if (SCALE == 2) at[count * 16] = pair;
      }
    }
  }
}

// at: that of its row and stage. to_zeros: words.
__device__ __forceinline__ Scaling scaling_of(const u32* at, int to_zeros) {
  const u32 word = at[0];
  Scaling found;
  found.by = scale_of(word);
  found.less = SCALE == 2 ? at[to_zeros] : high_halves(word, word);
  if (ROUNDED) {
    found.high = pack(found.by, found.by);
    const float rest = found.by - widen((u16)found.high);
    found.low = pack(rest, rest);
  }
  return found;
}

// Two neighbouring codes at bits 0 and 16.
__device__ __forceinline__ u32 pair_of(u32 codes, const Scaling& scaling) {
  const u32 value = subtract_pairs(masked_or(codes, 0x000f000f, MAGIC), scaling.less);
  if (!ROUNDED) return value;
  // Exact but for the last rounding: a code has 5 bits, and of a scale's 11 bits the second term 3.
  if (SCALE == 0 || TYPE == 1) return multiply_pairs(value, scaling.high);
  return multiply_add_pairs(value, scaling.high, multiply_pairs(value, scaling.low));
}

// This lane's codes of a chunk: two of each place of a fragment, 8 rows behind, 8 columns behind. held: where
// those of its first chunk lie.
__device__ __forceinline__ void load_chunk(u32 (&codes)[4], u32 held, int chunk) {
#pragma unroll
  for (int i = 0; i < 4; i++) codes[i] = load_shared_pair((held ^ chunk * 16) + i % 2 * 512 + i / 2 * 8);
}

// The left operands of its two products.
__device__ __forceinline__ void widen_chunk(u32 (&a)[2][4], const u32 (&codes)[4], const Scaling& of_row,
                                            const Scaling& of_eighth) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 pair = apart(codes[i]);
    a[0][i] = pair_of(pair, i % 2 ? of_eighth : of_row);
    a[1][i] = pair_of(pair >> 4, i % 2 ? of_eighth : of_row);
  }
}
