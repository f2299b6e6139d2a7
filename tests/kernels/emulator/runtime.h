// What runs the threads of a launch, as runtime.cpp and instructions.cpp see it.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cuda.h"

#pragma GCC visibility push(hidden)
const int MOST_WARPS = 32;
const int STACK_BYTES = 1 << 16;

// Products of warpgroups that a thread has asked for, which are made when it waits for them.
using Products = std::vector<std::function<void()>>;

// Begins by its context, and goes on by jumps: a context takes a call of the kernel each way. Jumps are
// the compiler's, which keep three words; those of the C library unwind what they leave.
struct Fiber {
  ucontext_t context;
  void* at[5];
  std::unique_ptr<char[]> stack;
  std::vector<Products> products;  // by groups
  long late_until = 0;  // turn of its block in which it goes on
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

// A tile on its way. due: in turns of the block.
struct Tile {
  long due;
  unsigned barrier;
  std::vector<Landing> landings;
};

// From another block of the cluster: bytes into shared memory that a barrier is told of, or an arrival at it.
struct Message {
  long due;  // in turns of the block that gets it
  unsigned to, barrier;
  int bytes;  // 0: an arrival
  unsigned char value[16];
};

struct Block {
  int index = -1;
  long turns = 0;
  unsigned drawn = 1;
  std::vector<Message> messages;
  std::vector<Tile> tiles;
  std::vector<Fiber> fibers;
  std::vector<unsigned char> shared;
  Barrier of_warp[MOST_WARPS], named[NAMES];
  std::map<unsigned, SharedBarrier> barriers;
};

extern Block blocks[AT_ONCE_MOST];
extern unsigned seed;  // of what is late; 0: no thread is
extern long moves;     // what any thread has done but to wait

enum Delayed { THREADS, MESSAGES, TILES };
long draw_delay(Delayed kind);  // turns: mostly none, at times many
void deliver();                 // what is due to the block that runs

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
