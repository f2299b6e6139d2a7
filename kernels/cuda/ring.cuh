// A ring of stages in shared memory. Needs ptx.cuh.

// Where it lies: COUNT stages of BYTES. Each has a barrier that says that it is full, its copies have landed,
// and one that says that it is empty, all have read it.
template <int COUNT, int BYTES>
struct Ring {
  u32 stages, barriers;
  int stage, turn;

  __device__ __forceinline__ u32 at() const { return stages + stage * BYTES; }
  __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty() const { return barriers + (COUNT + stage) * 8; }
  __device__ __forceinline__ void step() {
    if (++stage == COUNT) stage = 0, turn ^= 1;
  }
  __device__ __forceinline__ void step(int by) {
    stage += by;
    while (stage >= COUNT) stage -= COUNT, turn ^= 1;
  }
};
