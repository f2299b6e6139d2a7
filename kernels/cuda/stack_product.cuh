// A product of decoder_stack.cu: a block's share of its weights, and rows that come from other blocks.

#include "stack_layout.cuh"

// SHARED_BY: warps that share the depth. OUTS: weight rows a block has. HELD_AT: where they lie in
// shared memory; behind them, where NORM, the gain. BARRIER: the number of its pair of barriers.
template <int DEPTH, int SHARED_BY, int OUTS, int HELD_AT, int BARRIER, bool NORM>
struct Product {
  static const int EIGHTS = TILES(OUTS), CHUNKS = (DEPTH + 31) / 32;
  static const int UNROLL = (CHUNKS + SHARED_BY - 1) / SHARED_BY;
  static const int INPUTS = (SHARED_BY + WARPS - 1) / WARPS;  // shares of the depth that a warp has
  static const bool EXACT = CHUNKS % SHARED_BY == 0;
  static const int GAIN_AT = HELD_AT + 8 * EIGHTS * PITCH(DEPTH);

  static __device__ __forceinline__ u32 full() { return in_shared(BARRIERS_AT + BARRIER * 16); }
  static __device__ __forceinline__ u32 empty() { return full() + 8; }

  // Asks for the weights of a layer. row_at(i): the weight row that is the block's i-th, or less than
  // 0. One lane runs it.
  template <class Rows>
  static __device__ __forceinline__ void fetch(int layer, const u16* matrix, const u16* gain,
                                               Rows row_at) {
    wait_at(empty(), layer & 1 ^ 1);
    int bytes = NORM ? 2 * HIDDEN : 0;
#pragma unroll 1
    for (int i = 0; i < OUTS; i++) bytes += row_at(i) >= 0 ? 2 * DEPTH : 0;
    expect_bytes(full(), bytes);
#pragma unroll 1
    for (int i = 0; i < OUTS; i++)
      if (row_at(i) >= 0)
        copy_bulk(in_shared(HELD_AT + i * PITCH(DEPTH)), matrix + (u64)row_at(i) * DEPTH,
                  2 * DEPTH, full());
    if (NORM) copy_bulk(in_shared(GAIN_AT), gain, 2 * HIDDEN, full());
  }

  static __device__ __forceinline__ int share(int input) { return warp_of() + input * WARPS; }
  static __device__ __forceinline__ int depth_at(int input, int u) {
    return (share(input) + u * SHARED_BY) * 32 + (lane_of() & 3) * 8;
  }
  static __device__ __forceinline__ bool exists(int input, int u) {
    return share(input) < SHARED_BY && (EXACT || depth_at(input, u) < DEPTH);
  }

  static __device__ __forceinline__ uint4 held(bool is_there, int at) {
    return is_there ? load_shared(in_shared(at)) : make_uint4(0, 0, 0, 0);
  }

  // What a warp multiplies: pieces of its shares of the depth, of rows and of weights.
  static const int PIECES = INPUTS * UNROLL, ROW_PIECES = PIECES * HALVES;

  // Strides: of rows, and of eight columns.
  static __device__ __forceinline__ void find(const u16* (&places)[ROW_PIECES], const u16* rows,
                                              int stride, int stride_eight, int num_rows) {
#pragma unroll
    for (int i = 0; i < PIECES; i++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int row = half * 8 + (lane_of() >> 2);
        const bool is_there = row < num_rows && exists(i / UNROLL, i % UNROLL);
        places[i * HALVES + half] =
            is_there ? rows + (u64)row * stride + depth_at(i / UNROLL, i % UNROLL) / 8 * stride_eight
                     : 0;
      }
  }

  // The gain of the norm into the rows, and the squares of the rows into shared memory.
  static __device__ __forceinline__ void scale(uint4 (&x)[ROW_PIECES],
                                               const uint4 (&gain)[NORM ? UNROLL : 1],
                                               float* squares) {
    float of_row[HALVES] = {};
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int half = 0; half < HALVES; half++)
        x[u * HALVES + half] = scaled_by(x[u * HALVES + half], gain[u], of_row[half]);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float s = of_row[half];
      s += __shfl_xor_sync(0xffffffff, s, 1);
      s += __shfl_xor_sync(0xffffffff, s, 2);
      if ((lane_of() & 3) == 0) squares[warp_of() * ROWS + half * 8 + (lane_of() >> 2)] = s;
    }
  }

  // Sums of a share of the depth, of eight outputs.
  static __device__ __forceinline__ void leave(const uint4 (&x)[ROW_PIECES],
                                               const uint4 (&weights)[PIECES], int input,
                                               float* sums) {
    float acc[4] = {};
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const uint4 a = x[(input * UNROLL + u) * HALVES];
      const uint4 b = HALVES == 2 ? x[(input * UNROLL + u) * HALVES + HALVES - 1]
                                  : make_uint4(0, 0, 0, 0);
      const uint4 w = weights[input * UNROLL + u];
      multiply(acc, a.x, b.x, a.y, b.y, w.x, w.y);
      multiply(acc, a.z, b.z, a.w, b.w, w.z, w.w);
    }
    float* at = sums + (lane_of() >> 2) * 8 + (lane_of() & 3) * 2;
    *(float2*)at = make_float2(acc[0], acc[1]);
    if (HALVES == 2) *(float2*)(at + 64) = make_float2(acc[2], acc[3]);
  }

  // Waits for the rows, multiplies, and leaves sums in shared memory, [EIGHTS][SHARED_BY][ROWS][8],
  // and the squares of the rows, [SHARED_BY][ROWS].
  static __device__ __forceinline__ void multiply_rows(int layer, const u16* rows, int stride,
                                                       int stride_eight, int num_rows,
                                                       bool have_come, float* sums,
                                                       float* squares) {
    if (warp_of() >= SHARED_BY) return;
    uint4 x[ROW_PIECES], weights[EIGHTS][PIECES], gain[NORM ? UNROLL : 1];
    const u16* places[ROW_PIECES];
    find(places, rows, stride, stride_eight, num_rows);
    wait_at(full(), layer & 1);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const bool is_there = exists(i / UNROLL, i % UNROLL);
      const int at = 2 * depth_at(i / UNROLL, i % UNROLL);
      if (NORM) gain[i % UNROLL] = held(is_there, GAIN_AT + at);
#pragma unroll
      for (int eight = 0; eight < EIGHTS; eight++)
        weights[eight][i] =
            held(is_there, HELD_AT + (eight * 8 + (lane_of() >> 2)) * PITCH(DEPTH) + at);
    }
    wait_for(x, places, have_come);
    if constexpr (NORM) scale(x, gain, squares);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
      for (int i = 0; i < INPUTS; i++)
        if (share(i) < SHARED_BY)
          leave(x, weights[eight], i, sums + (eight * SHARED_BY + share(i)) * ROWS * 8);
  }

  // All have read their weights: the next layer's may come.
  static __device__ __forceinline__ void release() {
    if (threadIdx.x == 0) arrive_at(empty());
  }

  // Two neighbouring outputs of a row: the sums of all warps, in their order.
  static __device__ __forceinline__ float2 sum_of(const float* sums, int row, int out) {
    const float* at = sums + ((out / 8 * SHARED_BY) * ROWS + row) * 8 + out % 8;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int j = 0; j < SHARED_BY; j++) {
      const float2 v = *(const float2*)(at + j * ROWS * 8);
      sum.x += v.x;
      sum.y += v.y;
    }
    return sum;
  }
};

__device__ __forceinline__ float scale_of(const float* squares, int row, float eps) {
  float s = 0.f;
#pragma unroll
  for (int j = 0; j < WARPS_H; j++) s += squares[j * ROWS + row];
  return rsqrtf(s * (1.f / HIDDEN) + eps);
}

typedef Product<HIDDEN, WARPS_H, OUTS_QKV, QKV_HELD_AT, 0, true> Qkv;
typedef Product<ATTENDED, WARPS_A, OUTS_H, OUT_HELD_AT, 1, false> Out;
typedef Product<HIDDEN, WARPS_H, 2 * OUTS_I, GATES_HELD_AT, 2, true> Gates;
typedef Product<INTERMEDIATE, WARPS_I, OUTS_H, DOWN_HELD_AT, 3, false> Down;
