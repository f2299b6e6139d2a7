// What more than one value or thread takes part in, of ptx.cuh and the headers of warpgroups: the same for
// every kernel, and compiled once.
#include <time.h>

#include "runtime.h"

#define MT 1  // of what is declared for one kernel alone
#include "ptx.cuh"
#include "warpgroup_half.cuh"

struct Fragments {
  u32 a[4], b[2];
};

void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  static Board<Fragments> board;
  const Fragments* of = board.show({{a0, a1, a2, a3}, {b0, b1}});
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) {
      const u32 a = of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const u32 b = of[column * 4 + k % 8 / 2].b[k / 8];
      sum += half_of(a, k) * half_of(b, k);
    }
    c[i] += sum;
  }
  __syncwarp();
}

// word: of a matrix whose rows stand at these places.
template <class Word>
static uint4 loaded_matrices(u32 at, Word word) {
  static Board<u32> board;
  if (at % 16) abort();
  const u32* of = board.show(at);
  const uint4 words = {word(of), word(of + 8), word(of + 16), word(of + 24)};
  __syncwarp();
  return words;
}

uint4 load_matrices(u32 at) {
  return loaded_matrices(at, [](const u32* rows) {
    u32 word;
    memcpy(&word, shared_memory + rows[lane() / 4] + lane() % 4 * 4, 4);
    return word;
  });
}

uint4 load_turned_matrices(u32 at) {
  return loaded_matrices(at, [](const u32* rows) {
    u16 halves[2];
    for (int i = 0; i < 2; i++) memcpy(halves + i, shared_memory + rows[lane() % 4 * 2 + i] + lane() / 4 * 2, 2);
    return halves[0] | (u32)halves[1] << 16;
  });
}

u32 turned(u32 v) {
  static Board<u32> board;
  const u32* of = board.show(v);
  u32 found = 0;
  for (int half = 0; half < 2; half++) {
    const u32 pair = of[(lane() % 4 * 2 + half) * 4 + lane() / 8];
    found |= (lane() / 4 % 2 ? pair >> 16 : pair & 0xffff) << 16 * half;
  }
  __syncwarp();
  return found;
}

void prepare_barrier(u32 barrier, int count) {
  here().barriers[barrier] = SharedBarrier();
  here().barriers[barrier].count = count;
}

// Everything lands at the last moment.
static void turn_if_complete(SharedBarrier& barrier) {
  if (barrier.arrived < barrier.count || barrier.open_bytes != 0) return;
  for (const Landing& copy : barrier.landings)
    memcpy(shared_memory + copy.to, copy.from, copy.bytes);
  barrier.landings.clear();
  barrier.arrived = 0;
  barrier.turns++;
  moves++;
}

void arrive_at(u32 at) {
  SharedBarrier& barrier = here().barriers.at(at);
  barrier.arrived++;
  turn_if_complete(barrier);
}

void expect_bytes(u32 at, int bytes) {
  here().barriers.at(at).open_bytes += bytes;
  arrive_at(at);
}

static void land(const Landing& copy, u32 at) {
  SharedBarrier& barrier = here().barriers.at(at);
  barrier.landings.push_back(copy);
  barrier.open_bytes -= copy.bytes;
  turn_if_complete(barrier);
}

static Landing asked(u32 to, const void* from, int bytes) {
  if (bytes <= 0 || bytes % 16 || to % 16 || (unsigned long)from % 16) abort();
  memset(shared_memory + to, 0xff, bytes);
  return {to, from, bytes};
}

void copy_bulk(u32 to, const u16* from, int bytes, u32 at) { land(asked(to, from, bytes), at); }

alignas(16) static const unsigned char outside[16] = {};

void copy_tile(u32 to, const TensorMap* map, int a, int b, int c, int d, u32 barrier) {
  if (to % 1024 || map->box[0] * 2 != HALF) abort();
  Block& block = here();
  if (seed == 0) block.drawn = block.drawn * 1664525u + 1013904223u;
  const bool is_late = block.drawn >> 28 == 0;  // one in sixteen, while those behind it land
  Tile tile = {block.turns + (seed ? draw_delay(TILES) : is_late ? 64 : 0), barrier};
  int row = 0, at[4];
  for (at[3] = d; at[3] < d + map->box[3]; at[3]++)
    for (at[2] = c; at[2] < c + map->box[2]; at[2]++)
      for (at[1] = b; at[1] < b + map->box[1]; at[1]++, row++)
        for (int piece = 0; piece < 8; piece++) {
          at[0] = a + piece * 8;
          bool exists = true;
          long place = 0;
          for (int i = 0; i < 4; i++) {
            exists = exists && at[i] < map->sizes[i];
            place += at[i] * map->strides[i];
          }
          const void* from = exists ? (const void*)(map->at + place) : outside;
          tile.landings.push_back(asked(to + swizzled(row, piece), from, 16));
        }
  block.tiles.push_back(std::move(tile));
}

// Tiles land in any order.
static void land_tiles() {
  Block& block = here();
  for (size_t i = 0; i < block.tiles.size();) {
    if (block.tiles[i].due > block.turns) {
      i++;
      continue;
    }
    const Tile tile = std::move(block.tiles[i]);
    block.tiles.erase(block.tiles.begin() + i);
    for (const Landing& copy : tile.landings) land(copy, tile.barrier);
  }
}

static void send(Message message, int index) {
  Block& block = block_of(index);
  message.due = block.turns + draw_delay(MESSAGES);
  block.messages.push_back(message);
}

void send_to_block_of(int blocks_of_one, const void* at, int block, const void* value, int bytes,
                      u32 barrier) {
  Message message = {0, (u32)__cvta_generic_to_shared(at), barrier, bytes};
  memcpy(message.value, value, bytes);
  send(message, here().index / blocks_of_one * blocks_of_one + block);
}

void deliver() {
  land_tiles();
  std::vector<Message> due, later;
  for (const Message& message : here().messages) (message.due <= here().turns ? due : later).push_back(message);
  here().messages = std::move(later);
  for (const Message& message : due) {
    SharedBarrier& barrier = here().barriers.at(message.barrier);
    memcpy(shared_memory + message.to, message.value, message.bytes);
    barrier.open_bytes -= message.bytes;
    barrier.arrived += message.bytes == 0;
    turn_if_complete(barrier);
  }
}

void wait_at(u32 at, int turn) {
  may_be_late();
  while (here().barriers.at(at).turns % 2 == turn) yield();
}

void meet_among(int name, int threads) {
  may_be_late();
  here().named[name].meet(threads);
}

u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

// Copies of each thread, by groups. Everything lands at the last moment.
struct Copy {
  u32 to;
  const u16* from;
  int bytes;
};
using Group = std::vector<Copy>;
static std::vector<Group>& my_groups() {
  static std::map<std::pair<int, int>, std::vector<Group>> all;  // of blocks and their threads
  auto& mine = all[{here().index, threadIdx.x}];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

void copy_async(u32 to, const u16* from, int bytes) {
  if (bytes < 0 || bytes > 16 || to % 16 || (unsigned long)from % 16) abort();
  memset(shared_memory + to, 0xff, 16);
  my_groups().back().push_back({to, from, bytes});
}

void end_of_copies() { my_groups().emplace_back(); }

void wait_for_copies_but(int groups) {
  auto& mine = my_groups();  // the last one is open
  for (; (int)mine.size() > groups + 1; mine.erase(mine.begin()))
    for (const Copy& copy : mine.front()) {
      memset(shared_memory + copy.to, 0, 16);
      memcpy(shared_memory + copy.to, copy.from, copy.bytes);
    }
}

void wait_for_all_copies() {
  end_of_copies();
  wait_for_copies_but(0);
}

static float code_at(u32 matrix, int row, int column) {
  const u32 start = matrix / (8 * HALF) * (8 * HALF), at = matrix % (8 * HALF) + column;
  if (matrix % (8 * HALF) >= HALF) abort();  // columns of the first row
  const unsigned char code = shared_memory[start + swizzled(row, at / 16) + at % 16];
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return __builtin_nanf("");
  const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return code >> 7 ? -size : size;
}

void multiply_codes(float* c, u64 a, u64 b, int adds) {
  for (int i = 0; i < 4; i++) {
    const int out = warp() * 16 + lane() / 4 + i / 2 * 8, row = lane() % 4 * 2 + i % 2;
    float sum = adds ? c[i] : 0.f;
    for (int k = 0; k < 32; k++) sum += code_at(a, out, k) * code_at(b, row, k);
    c[i] = sum;
  }
}

static std::vector<Products>& my_products() {
  auto& mine = me().products;
  if (mine.empty()) mine.emplace_back();
  return mine;
}

void end_of_products() { my_products().emplace_back(); }

// Until all have ended but those of the last `groups` groups that have ended.
void wait_for_products_but(int groups) {
  while ((int)my_products().size() > groups + 1) {  // the last one is open
    const Products asked = std::move(my_products().front());
    my_products().erase(my_products().begin());
    for (const auto& product : asked) product();
  }
  __syncwarp();  // it is of whole warps: none goes on while a lane still reads
}

void wait_for_products() {
  end_of_products();
  wait_for_products_but(0);
}

struct LeftFragment {
  u32 a[4];
};

// Of half precision; matrix: the place of the first row's first of 16 columns.
static float value_at(u64 matrix, int row, int column) {
  const u32 start = matrix / (8 * HALF) * (8 * HALF), at = matrix % (8 * HALF);
  u16 value;
  memcpy(&value, shared_memory + start + swizzled(row, at / 16 + column / 8) + column % 8 * 2, 2);
  return widen(value);
}

static void make_product(float* c, LeftFragment a, u64 b, int adds, int count) {
  static Board<LeftFragment> board;
  const LeftFragment* of = board.show(a);
  for (int i = 0; i < count; i++) {
    const int row = lane() / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++)
      sum += half_of(of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k) * value_at(b, column, k);
    c[i] = (adds ? c[i] : 0.f) + sum;
  }
  __syncwarp();
}

void add_product_of(int count, float* c, const u32* a, u64 b, int adds) {
  const LeftFragment given = {{a[0], a[1], a[2], a[3]}};
  my_products().back().push_back([=] { make_product(c, given, b, adds, count); });
}

static void make_shared_product(float* c, u64 a, u64 b, int adds, int count) {
  for (int i = 0; i < count; i++) {
    const int row = warp() % 4 * 16 + lane() / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane() % 4 * 2 + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) sum += value_at(a, row, k) * value_at(b, column, k);
    c[i] = (adds ? c[i] : 0.f) + sum;
  }
}

void add_shared_product_of(int count, float* c, u64 a, u64 b, int adds) {
  my_products().back().push_back([=] { make_shared_product(c, a, b, adds, count); });
}

void arrive_in_block_of(int blocks_of_one, u32 at, int block) {
  send({0, 0, at, 0}, here().index / blocks_of_one * blocks_of_one + block);
}
