// What runs the threads of a launch by turns: the same for every kernel, and compiled once.
#include "runtime.h"

alignas(1024) unsigned char shared_memory[SHARED_BYTES];
Place threadIdx, blockIdx, gridDim;
Block blocks[AT_ONCE_MOST];
int slot;
unsigned seed;
long moves;
static void* scheduler[5];
static bool any_left;  // threads that had not ended before this turn
static void (*body)(void**);
static void** arguments;

// With the next thread of the block, or behind the last with what runs the blocks.
static void go_on() {
  std::vector<Fiber>& fibers = here().fibers;
  while (++threadIdx.x < (int)fibers.size()) {
    Fiber& fiber = fibers[threadIdx.x];
    if (fiber.ended) continue;
    any_left = true;
    if (fiber.late_until > here().turns) continue;
    if (std::exchange(fiber.has_begun, true)) __builtin_longjmp(fiber.at, 1);
    setcontext(&fiber.context);
  }
  __builtin_longjmp(scheduler, 1);
}

void yield() {
  if (!__builtin_setjmp(me().at)) go_on();
}

static void run_fiber() {
  body(arguments);
  me().ended = true;
  moves++;
  go_on();
}

static void start(Fiber& fiber) {
  fiber.stack.reset(new char[STACK_BYTES]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&fiber.context, run_fiber, 0);
}

void Barrier::meet(int count) {
  const long mine = passed;
  moves++;
  if (++arrived == count) {
    arrived = 0;
    passed++;
  } else {
    while (passed == mine) yield();
  }
}

void __syncwarp() { here().of_warp[warp()].meet(WARP); }
void __syncthreads() { here().named[0].meet(here().fibers.size()); }

// Of the blocks of a cluster, which begin together.
struct ClusterBarrier {
  int arrived = 0;
  long turns = 0;
  std::map<std::pair<int, int>, long> waited;  // turns that a thread of a block has waited for
};
static std::map<int, ClusterBarrier> of_clusters;

void arrive_in_cluster_of(int blocks_of_one) {
  ClusterBarrier& barrier = of_clusters[here().index / blocks_of_one];
  if (++barrier.arrived < blocks_of_one * (int)here().fibers.size()) return;
  barrier.arrived = 0;
  barrier.turns++;
}

void wait_for_cluster_of(int blocks_of_one) {
  ClusterBarrier& barrier = of_clusters[here().index / blocks_of_one];
  const long mine = ++barrier.waited[{here().index, threadIdx.x}];
  while (barrier.turns < mine) yield();
}

Block& block_of(int index) {
  for (Block& block : blocks)
    if (block.index == index) return block;
  abort();
}

unsigned char* shared_of(int number, int blocks_of_one) {
  const int index = here().index / blocks_of_one * blocks_of_one + number;
  return index == here().index ? shared_memory : block_of(index).shared.data();
}

unsigned long seen_from(Kind kind, unsigned long value, int from) {
  static Board<unsigned long> boards[KINDS];
  const unsigned long theirs = boards[kind].show(value)[from];
  __syncwarp();
  return theirs;
}

unsigned __ballot_sync(unsigned, bool value) {
  static Board<bool> board;
  const bool* of = board.show(value);
  unsigned all = 0;
  for (int i = 0; i < WARP; i++) all |= (unsigned)of[i] << i;
  __syncwarp();
  return all;
}

unsigned __reduce_max_sync(unsigned, unsigned value) {
  static Board<unsigned> board;
  const unsigned* of = board.show(value);
  const unsigned most = *std::max_element(of, of + WARP);
  __syncwarp();
  return most;
}

unsigned __reduce_add_sync(unsigned, unsigned value) {
  static Board<unsigned> board;
  unsigned sum = 0;
  const unsigned* of = board.show(value);
  for (int i = 0; i < WARP; i++) sum += of[i];
  __syncwarp();
  return sum;
}

static unsigned draw(unsigned below) {
  unsigned& drawn = here().drawn;
  drawn = drawn * 1664525u + 1013904223u;
  return (drawn >> 8) % below;
}

// With some seeds much of a kind is late, and with some little: where all is late, nothing falls far behind.
long draw_delay(Delayed kind) {
  if (seed == 0) return 0;
  const unsigned rarity = 2u << (seed * 2654435761u >> (8 + 4 * kind)) % 12;
  return draw(rarity) ? 0 : draw(2u << draw(10));
}

// This thread may be late, or its warp or block: also longer than others need for what they do without it.
void may_be_late() {
  if (seed == 0 || draw(4)) return;
  if (const long delay = draw_delay(THREADS)) {
    const unsigned of = draw(16);
    for (int i = 0; i < (int)here().fibers.size(); i++)
      if (of == 0 || (of < 4 ? i == threadIdx.x : i / WARP == warp()))
        here().fibers[i].late_until = here().turns + delay;
  }
  yield();
}

// Every thread of the block that is here, until it waits or has ended.
static void run_turn() {
  here().turns++;
  deliver();
  any_left = false;
  threadIdx.x = -1;
  if (!__builtin_setjmp(scheduler)) go_on();
}

static void begin(Block& block, int index, int threads, int shared_bytes) {
  block = Block();
  block.index = index;
  block.drawn = 1 + seed * 2654435761u + index * 40503u;
  block.fibers.resize(threads);
  block.shared.assign(shared_bytes, 0xff);
  for (Fiber& fiber : block.fibers) start(fiber);
}

const int IN_A_ROW = 8;  // turns, as a block brings its shared memory along and takes it away

// Every thread of a block, until it has waited a few times; whether any was left.
static bool run_turns(Block& block) {
  any_left = true;
  blockIdx = {block.index % gridDim.x, block.index / gridDim.x};
  memcpy(shared_memory, block.shared.data(), block.shared.size());
  for (int turn = 0; any_left && turn < IN_A_ROW; turn++) run_turn();
  memcpy(block.shared.data(), shared_memory, block.shared.size());
  return any_left;
}

// The order in which blocks begin: those of a cluster one behind the other.
static std::vector<int> by_clusters(const int* order, int count, int cluster_blocks) {
  std::vector<int> clusters, found;
  for (int i = 0; i < count; i++) {
    const int cluster = order[i] / cluster_blocks;
    if (std::count(clusters.begin(), clusters.end(), cluster)) continue;
    clusters.push_back(cluster);
    for (int k = 0; k < cluster_blocks; k++)
      found.push_back(cluster * cluster_blocks + (order[i] + k) % cluster_blocks);
  }
  return found;
}

const long MOST_STILL = 1 << 14;  // turns of every block: longer than anything is late

bool run(Place grid, const int* drawn, int cluster, int threads, int shared_bytes, unsigned given_seed,
         void (*of_thread)(void**), void** given) {
  const int count = grid.x * grid.y;
  const std::vector<int> order = by_clusters(drawn, count, cluster);
  body = of_thread;
  arguments = given;
  gridDim = grid;
  seed = given_seed;
  long moved = moves, still = 0;
  int next = 0, running = 0;
  for (slot = 0; slot < AT_ONCE_MOST && next < count; slot++, running++)
    begin(here(), order[next++], threads, shared_bytes);
  while (running > 0) {
    still = moves == moved ? still + 1 : 0;
    moved = moves;
    if (seed && still * IN_A_ROW > MOST_STILL) break;
    for (slot = 0; slot < AT_ONCE_MOST; slot++) {
      if (here().index < 0 || run_turns(here())) continue;
      if (!here().messages.empty()) abort();  // they would reach no block
      here() = Block();
      if (next < count)
        begin(here(), order[next++], threads, shared_bytes);
      else
        running--;
    }
  }
  for (Block& block : blocks) block = Block();
  return running == 0;
}
