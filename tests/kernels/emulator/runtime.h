// What runs the threads of a launch, as runtime.cpp and instructions.cpp see it.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cuda.h"

#pragma GCC visibility push(hidden)
const int MOST_WARPS = 32;
const int STACK_BYTES = 1 << 16;

// Begins by its context, and goes on by jumps: a context takes a call of the kernel each way. Jumps are
// the compiler's, which keep three words; those of the C library unwind what they leave.
struct Fiber {
  ucontext_t context;
  void* at[5];
  std::unique_ptr<char[]> stack;
  bool has_begun = false, ended = false;
};

struct Barrier {
  int arrived = 0;
  long passed = 0;

  void meet(int count);
};

struct Landing {
  unsigned to;
  const void* from;
  int bytes;
};

// A barrier in shared memory (mbarrier).
struct SharedBarrier {
  int count = 0, arrived = 0;
  long open_bytes = 0, turns = 0;
  std::vector<Landing> landings;
};

const int NAMES = 16;

struct Block {
  int index = -1;
  std::vector<Fiber> fibers;
  std::vector<unsigned char> shared;
  Barrier of_warp[MOST_WARPS], named[NAMES];
  std::map<unsigned, SharedBarrier> barriers;
};

extern Block blocks[AT_ONCE_MOST];

Block& block_of(int index);  // one that runs
inline Block& here() { return blocks[slot]; }
inline Fiber& me() { return here().fibers[threadIdx.x]; }

// What every lane of the warp shows, seen by all of them.
template <class T>
struct Board {
  T of[AT_ONCE_MOST][MOST_WARPS][WARP];

  const T* show(T value) {
    of[slot][warp()][lane()] = value;
    __syncwarp();
    return of[slot][warp()];
  }
};

#pragma GCC visibility pop
