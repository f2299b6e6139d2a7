// This part of rope_attention.cu says where things lie in shared memory. It brings old keys and values there.

#define ROWS (8 * TILES)
#define LEFT_STRIDE (HEAD + 4)  // floats between rows that a warp leaves: separate banks
#define UNIT_BYTES (2 * UNIT * STRIDE)

#define QUERIES_AT 16  // behind the barrier
#define NEW_KEYS_AT (QUERIES_AT + ROWS * STRIDE)
#define NEW_VALUES_AT (NEW_KEYS_AT + QUERIES * STRIDE)
#define UNITS_AT (NEW_VALUES_AT + QUERIES * STRIDE)    // of each warp: keys, values; in the end what it leaves
#define GIVEN_AT (UNITS_AT + WARPS * UNIT_BYTES)       // float [CLUSTER][ROWS][OWN]
#define TOLD_AT (GIVEN_AT + CLUSTER * ROWS * OWN * 4)  // u64 [CLUSTER][ROWS]: peak and sum

#include "rope_heads.cuh"

static_assert(ROWS * (LEFT_STRIDE + 2) * 4 <= UNIT_BYTES, "room for what a warp leaves");

// A warp's units of old keys, one after another. Its keys and its values are a group of copies each, and are
// asked for by turns: once only one younger group is open, the older has landed.
struct Units {
  const u16 *keys_from, *values_from;
  int stride;  // between keys in the cache
  u32 at;
  int count;
  int slot;  // of key lane % UNIT of the unit that is asked for next

  __device__ __forceinline__ u32 keys() const { return at; }
  __device__ __forceinline__ u32 values() const { return at + UNIT * STRIDE; }

  // How many keys come before unit i.
  static __device__ __forceinline__ int before(const Task& task, int i) {
    return task.unit(i * WARPS + warp_of()) * UNIT;
  }

  // Beyond the request's old keys its last one is read again: the weight is 0.
  __device__ __forceinline__ void find(const Task& task, int i) {
    const int key = before(task, i) + lane_of() % UNIT;
    if (i < count) slot = task.table[min(key, task.prefix - 1)];
  }

  __device__ __forceinline__ void ask(bool exists, u32 to, const u16* from) const {
    const int row = lane_of() / 16, piece = lane_of() % 16;
    if (exists)
#pragma unroll
      for (int j = 0; j < UNIT; j += 2) {
        const u64 place = (u64)__shfl_sync(ALL, slot, row + j) * stride + piece * 8;
        copy_async(to + (row + j) * STRIDE + piece * 16, from + place, 16);
      }
    end_of_copies();
  }
  __device__ __forceinline__ void ask_keys(int i) const { ask(i < count, keys(), keys_from); }
  __device__ __forceinline__ void ask_values(int i) const { ask(i < count, values(), values_from); }

  __device__ __forceinline__ void begin(const Task& task, u32 base) {
    at = base + UNITS_AT + warp_of() * UNIT_BYTES;
    count = (task.my_units() - warp_of() + WARPS - 1) / WARPS;
    slot = 0;
    find(task, 0);
    ask_keys(0);
    ask_values(0);
    find(task, 1);
  }

  // Waits until the older of two groups is there, with all lanes' parts of it.
  __device__ __forceinline__ void wait() const {
    wait_for_copies_but(1);
    __syncwarp();
  }
};
