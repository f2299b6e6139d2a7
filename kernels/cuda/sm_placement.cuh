// Numbers of blocks by the multiprocessors that they run on. Left alone, blocks come to other
// multiprocessors now and then, whenever another kernel ran ahead; where blocks exchange values all
// the time, that makes some launches slower than others (kernels/cuda/sm_placement.py). Behind ptx.cuh.

#define MOST_SMS 1024  // more than a device has multiprocessors

struct SMPlacement {
  const int* numbers;  // [MOST_SMS] by multiprocessor; -1: whatever comes
  int* taken;          // [blocks] 1 while a block has this number
  int* seen;           // [blocks] of blocks whose number was not said, by blockIdx: where they ran
  int* arrived;        // blocks that ever took a number, modulo 2^32

  // By one thread of a block. Where blocks run elsewhere than the host expects (contexts that take
  // turns on a device may move them), none may have the number of another: all would wait for ever.
  // Of the launch before, all have taken theirs: this one's blocks begin when those have said that
  // the next kernel may start.
  __device__ __forceinline__ int take() const {
    const int sm = multiprocessor();
    int number = sm < MOST_SMS ? numbers[sm] : -1;
    if (number < 0) {
      number = blockIdx.x;
      seen[number] = sm;
    }
    while (atomicCAS(taken + number, 0, 1)) number = (number + 1) % gridDim.x;
    atomicAdd(arrived, 1);
    return number;
  }

  // By one thread, when its block is done. Not before all have a number: a block that still looks for one
  // would take this one, and leave another unused. launches: of this kind, before this one.
  __device__ __forceinline__ void leave(int number, int launches) const {
    const u32 all = ((u32)launches + 1) * gridDim.x;
    while ((int)((u32)seen_in_memory(arrived) - all) < 0) look_again();
    tell(taken + number, 0);
  }
};
