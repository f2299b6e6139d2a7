// Numbers of blocks by the multiprocessors that they run on. Left alone, blocks come to other
// multiprocessors now and then, whenever another kernel ran ahead; where blocks exchange values all
// the time, that makes some launches slower than others (kernels/seats.py). Behind ptx.cuh.

#define SEATS 1024  // more than a device has multiprocessors

struct Seats {
  const int* numbers;  // [SEATS] by multiprocessor; -1: whatever comes
  int* taken;          // [blocks] 1 while a block has this number
  int* seen;           // [blocks] of blocks whose number was not said, by blockIdx: where they ran

  // By one thread of a block. Where blocks run elsewhere than the host expects (contexts that take
  // turns on a device may move them), none may have the number of another: all would wait for ever.
  __device__ __forceinline__ int take() const {
    const int seat = multiprocessor();
    int number = seat < SEATS ? numbers[seat] : -1;
    if (number < 0) {
      number = blockIdx.x;
      seen[number] = seat;
    }
    while (atomicCAS(taken + number, 0, 1)) number = (number + 1) % gridDim.x;
    return number;
  }

  // By the thread that took it, when its block is done.
  __device__ __forceinline__ void leave(int number) const { tell(taken + number, 0); }
};
