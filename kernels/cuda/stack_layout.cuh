// What the kernel of all layers (decoder_stack.cu) lays out: sizes, shared memory, arguments.

#include "few_row.cuh"

#define HEAD 64
#define WARPS 12
#define THREADS (32 * WARPS)  // that compute; one warp more asks for weights
#define ROWS 16
#define GROUP (HEADS / KV_HEADS)
#define ATTENDED (HEADS * HEAD)
#define QKV_SIZE (ATTENDED + 2 * KV_HEADS * HEAD)
#define LOWEST __uint_as_float(0xff800000u)  // minus infinity
#define EMPTY 0xffffffffu

// What a row leaves in a layer: its columns. Eight columns of all rows lie together.
#define QKV_AT 0
#define HEADS_AT (QKV_AT + QKV_SIZE)
#define MIDDLE_AT (HEADS_AT + ATTENDED)
#define GATES_AT (MIDDLE_AT + HIDDEN)
#define STREAM_AT (GATES_AT + INTERMEDIATE)
#define ROW_SIZE (STREAM_AT + HIDDEN)
#define LAYER_SIZE (ROWS * ROW_SIZE)

// Attention: keys of a warp, bytes between its keys, and of its share of shared memory.
#define KEYS 32
#define KEY_BYTES 144
#define AREA_BYTES (2 * KEYS * KEY_BYTES)
#define OLD_WARPS (WARPS - 1)  // the last warp has the new keys
#define SWEEP (OLD_WARPS * KEYS)
#define SUM_STRIDE 68
#define SHARE_SIZE (HEAD + 2)  // floats that a row of a share of the keys leaves

// Shared memory, in bytes: sums of a product and squares of its rows, two by turns; angles; areas of
// attention; weights and gains; barriers; the block's number; the pointers of all layers.
#define GREATER(a, b) ((a) > (b) ? (a) : (b))
#define TILES(outs) (((outs) + 7) / 8)
#define JOBS_H GREATER(WARPS_H * TILES(OUTS_QKV), WARPS_H * TILES(2 * OUTS_I))
#define JOBS GREATER(JOBS_H, GREATER(WARPS_A, WARPS_I) * TILES(OUTS_H))
#define SUMS_BYTES (4 * JOBS * ROWS * 8)
#define HALF_BYTES (SUMS_BYTES + 4 * WARPS_H * ROWS)
#define ANGLES_AT (2 * HALF_BYTES)
#define AREAS_AT (ANGLES_AT + 4 * ROWS * HEAD)
// Between weight rows: eight of them in different banks.
#define PITCH(depth) (2 * (depth) + ((depth) % 64 ? 0 : 64))
#define QKV_HELD_AT (AREAS_AT + WARPS * AREA_BYTES)
#define OUT_HELD_AT (QKV_HELD_AT + 8 * TILES(OUTS_QKV) * PITCH(HIDDEN) + 2 * HIDDEN)
#define GATES_HELD_AT (OUT_HELD_AT + 8 * TILES(OUTS_H) * PITCH(ATTENDED))
#define DOWN_HELD_AT (GATES_HELD_AT + 8 * TILES(2 * OUTS_I) * PITCH(HIDDEN) + 2 * HIDDEN)
#define BARRIERS_AT (DOWN_HELD_AT + 8 * TILES(OUTS_H) * PITCH(INTERMEDIATE))
#define NUMBER_AT (BARRIERS_AT + 64)
#define LAYERS_AT (NUMBER_AT + 16)

struct Layer {
  const u16 *input_gain, *qkv, *out, *gain, *gate_up, *down;
  u16 *k_cache, *v_cache;
  long long capture;  // place among the captured streams, or -1
  long long unused;
};

struct Batch {
  const long long *positions, *loc, *rows, *seq_lens, *indptr;
  const int* table;
  const unsigned char* tree;
  const long long* first_keys;
  int num_requests, num_rows, stride_table, nodes, stride_cache;
};

extern __shared__ __align__(128) unsigned char shared[];

__device__ __forceinline__ int lane_of() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_of() { return threadIdx.x >> 5; }
__device__ __forceinline__ u32 in_shared(int at) {
  return (u32)__cvta_generic_to_shared(shared + at);
}
__device__ __forceinline__ void meet() { meet_among(1, THREADS); }

__device__ __forceinline__ u64 place_of(int column, int row, int num_rows) {
  return (column & ~7) * num_rows + row * 8 + (column & 7);
}

__device__ __forceinline__ bool has_come(uint4 v) {
  return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}

// What other blocks compute, all of it asked for at once, until it has come. A place of 0 holds zeros.
template <int N>
__device__ __forceinline__ void wait_for(uint4 (&values)[N], const u16* const (&places)[N],
                                         bool have_come = false) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const u32 none = places[i] ? EMPTY : 0;
    values[i] = make_uint4(none, none, none, none);
  }
  bool missing = true;
  while (missing) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!has_come(values[i])) values[i] = load_settled(places[i]);
    missing = false;
#pragma unroll
    for (int i = 0; i < N; i++) missing |= !has_come(values[i]);
    if (have_come) break;
    if (missing) look_again();
  }
}
