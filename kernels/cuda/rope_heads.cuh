// This part of rope_attention.cu says what a block is given. It normalises new heads, rotates them and writes
// them to the cache.

#include "few_row.cuh"
#include "shared_sums.cuh"

#define THREADS (32 * WARPS)
#define HEAD 128
#define UNIT 16               // keys; at most as many are new
#define OWN (HEAD / CLUSTER)  // dimensions that a block adds up in the end
#define HEADS ((QUERIES * GROUP + 2 * QUERIES + WARPS - 1) / WARPS)  // new ones, of a warp
#define ALL 0xffffffffu
#define NOTHING __uint_as_float(0xff800000)  // minus infinity

// Strides are such that lanes of a warp meet different banks.
#define STRIDE (2 * HEAD + 16)  // bytes of a head

extern __shared__ __align__(128) unsigned char shared[];

struct Given {
  const u16 *q, *k, *v;
  u16* out;
  const long long* positions;
  const float* cos_sin;
  u16 *k_cache, *v_cache;
  const long long* loc;
  const u16 *q_gain, *k_gain;
  int stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cs, stride_ch;
  int stride_cos_sin;
  float eps;
};

struct Task {
  int block, kv_head, first_token, num_queries, num_rows, prefix;
  const int* table;
  bool has_new;

  __device__ __forceinline__ int units() const { return (prefix + UNIT - 1) / UNIT; }
  __device__ __forceinline__ int my_units() const { return (units() + CLUSTER - 1 - block) / CLUSTER; }
  __device__ __forceinline__ int unit(int i) const { return i * CLUSTER + block; }  // of this block
  __device__ __forceinline__ bool has_keys(int of_block) const {
    return of_block < units() || of_block == CLUSTER - 1;
  }
};

__device__ __forceinline__ int lane_of() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_of() { return threadIdx.x >> 5; }
__device__ __forceinline__ u64 joined(float low, float high) {
  return __float_as_uint(low) | (u64)__float_as_uint(high) << 32;
}

// Multiplies x by gain / its root mean square. A lane has values 2 lane, 2 lane + 1 and those HEAD / 2 behind.
__device__ __forceinline__ void normalise(u32& low, u32& high, u32 low_gain, u32 high_gain, float eps) {
  float squares = squares_of(low) + squares_of(high);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) squares += __shfl_xor_sync(ALL, squares, distance);
  const float scale = rsqrtf(squares * (1.f / HEAD) + eps);
  low = normed(low, scale, low_gain);
  high = normed(high, scale, high_gain);
}

__device__ __forceinline__ void rotate(u32& low, u32& high, float2 cos, float2 sin) {
  const float a0 = widen((u16)low), a1 = widen((u16)(low >> 16));
  const float b0 = widen((u16)high), b1 = widen((u16)(high >> 16));
  low = pack(a0 * cos.x - b0 * sin.x, a1 * cos.y - b1 * sin.y);
  high = pack(b0 * cos.x + a0 * sin.x, b1 * cos.y + a1 * sin.y);
}

// A warp's new heads: every WARPS-th one of the block's queries, row by row, of its new keys and of its new
// values, in this order. What comes before finish() reads nothing that the kernel ahead writes.
struct NewHeads {
  int tokens[HEADS], positions[HEADS];
  int to[HEADS];  // in shared memory; 0 where there is no head
  const u16* from[HEADS];
  float2 cos[HEADS], sin[HEADS];
  u32 q_gain[2], k_gain[2];

  static __device__ __forceinline__ bool is_key(int to) { return to >= NEW_KEYS_AT && to < NEW_VALUES_AT; }
  static __device__ __forceinline__ bool is_value(int to) { return to >= NEW_VALUES_AT; }

  __device__ __forceinline__ void find(const Given& given, const Task& task) {
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      const int number = warp_of() + i * WARPS, key = number - task.num_rows, value = key - task.num_queries;
      int token = 0;
      to[i] = 0;
      from[i] = 0;
      if (key < 0) {
        const int head = task.kv_head * GROUP + number % GROUP;
        token = task.first_token + number / GROUP;
        to[i] = QUERIES_AT + number * STRIDE;
        from[i] = given.q + (u64)token * given.stride_qt + (u64)head * given.stride_qh;
      } else if (task.has_new && value < 0) {
        token = task.first_token + key;
        to[i] = NEW_KEYS_AT + key * STRIDE;
        from[i] = given.k + (u64)token * given.stride_kt + (u64)task.kv_head * given.stride_kh;
      } else if (task.has_new && value < task.num_queries) {
        token = task.first_token + value;
        to[i] = NEW_VALUES_AT + value * STRIDE;
        from[i] = given.v + (u64)token * given.stride_vt + (u64)task.kv_head * given.stride_vh;
      }
      tokens[i] = token;
      positions[i] = to[i] > 0 && !is_value(to[i]) ? (int)given.positions[token] : 0;
      from[i] = computed_now(from[i] + 2 * lane_of());
    }
  }

  __device__ __forceinline__ void load_angles(const Given& given) {
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      if (to[i] == 0 || is_value(to[i])) continue;
      const float* angles = given.cos_sin + (u64)positions[i] * given.stride_cos_sin + 2 * lane_of();
      cos[i] = *(const float2*)angles;
      sin[i] = *(const float2*)(angles + HEAD / 2);
    }
  }

  __device__ __forceinline__ void load_gains(const Given& given) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      q_gain[i] = ((const u32*)given.q_gain)[lane_of() + i * HEAD / 4];
      k_gain[i] = ((const u32*)given.k_gain)[lane_of() + i * HEAD / 4];
    }
  }

  // Writes heads into shared memory, and new keys and values into the cache, too. It is called once.
  __device__ __forceinline__ void finish(const Given& given, const Task& task) const {
    u32 low[HEADS], high[HEADS];
    int slots[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      if (to[i] == 0) continue;
      low[i] = load_fresh_two(from[i]);
      high[i] = load_fresh_two(from[i] + HEAD / 2);
      slots[i] = to[i] >= NEW_KEYS_AT ? (int)given.loc[tokens[i]] : 0;
    }
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
      if (to[i] == 0) continue;
      const bool key = is_key(to[i]);
      if (!is_value(to[i])) {
        const u32 low_gain = key ? k_gain[0] : q_gain[0], high_gain = key ? k_gain[1] : q_gain[1];
        if (NORM) normalise(low[i], high[i], low_gain, high_gain, given.eps);
        rotate(low[i], high[i], cos[i], sin[i]);
      }
      u32* shown = (u32*)(shared + to[i]) + lane_of();
      shown[0] = low[i];
      shown[HEAD / 4] = high[i];
      if (to[i] >= NEW_KEYS_AT) {
        u16* cache = key ? given.k_cache : given.v_cache;
        u32* kept = (u32*)(cache + (u64)slots[i] * given.stride_cs + (u64)task.kv_head * given.stride_ch);
        kept[lane_of()] = low[i];
        kept[lane_of() + HEAD / 4] = high[i];
      }
    }
  }
};
