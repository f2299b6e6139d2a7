// Of mxfp4_experts.cu: which tiles of which experts a block multiplies, and the codes of a warp's tiles in
// that order.

// A block's tiles of all chosen experts', which lie one expert's behind the other's.
struct Share {
  int first, last, tiles;  // tiles: of an expert

  __device__ __forceinline__ int first_expert() const { return first / tiles; }
  __device__ __forceinline__ int experts() const {
    return last > first ? (last - 1) / tiles - first_expert() + 1 : 0;
  }
};

// Those of one of its experts.
struct Part {
  int first, last, rounds, at_once;  // at_once: tiles of a round, of warps

  __device__ __forceinline__ Part(const Share& share, int number) {
    const int before = (share.first_expert() + number) * share.tiles;
    first = max(share.first - before, 0), last = min(share.last - before, share.tiles);
    rounds = (last - first + WARPS - 1) / WARPS;
    at_once = (last - first + rounds - 1) / rounds;
  }
};

// How many experts have rows. A whole warp asks.
__device__ __forceinline__ int count_chosen(const int* counts, int num_experts) {
  int found = 0;
  for (int start = 0; start < num_experts; start += 32) {
    const int expert = start + (threadIdx.x & 31);
    found += __popc(__ballot_sync(0xffffffff, expert < num_experts && counts[expert] > 0));
  }
  return found;
}

// The one behind `number` others that have rows. A whole warp asks.
__device__ __forceinline__ int chosen_expert(const int* counts, int num_experts, int number) {
  const int lane = threadIdx.x & 31;
  int found = 0;
  for (int start = 0; start < num_experts; start += 32) {
    const bool has = start + lane < num_experts && counts[start + lane] > 0;
    const u32 all = __ballot_sync(0xffffffff, has);
    const u32 it = __ballot_sync(0xffffffff, has && __popc(all & ((1u << lane) - 1)) == number);
    if (it) found = start + __popc(it - 1);
    number -= __popc(all);
  }
  return found;
}

// Codes of a warp's tiles, in the order in which they are multiplied.
struct Weights {
  const u32 *words, *factors;
  Share share;
  const int *experts, *counts;  // experts: of this block; counts: of all
  int own, width, chunks;
  int number;                // of the share's experts
  int tile, last, stride;    // the tile to be fetched, that behind the last one
  int rows, count;           // before its pass, and of all
  int left;                  // chunks of the tile
  u32 before, place;         // chunks of 16 rows before the expert, and before what is fetched

  // The first tile of this warp, of this expert or of one behind it.
  __device__ __forceinline__ void enter() {
    const int warp = threadIdx.x >> 5;
    for (; number < own; number++) {
      const Part part(share, number);
      if (warp >= part.at_once) continue;
      const int expert = experts[number];
      before = expert * ((DOWN ? width : 2 * width) / 16) * chunks;
      tile = part.first + warp, last = part.last, stride = part.at_once;
      rows = 0, count = counts[expert];
      break;
    }
    begin();
  }

  __device__ __forceinline__ void begin() {
    left = chunks, place = before + tile * (OUTS / 16) * chunks;
  }

  __device__ __forceinline__ void next_tile() {
    rows += ROWS;
    if (rows >= count) {
      rows = 0, tile += stride;
      if (tile >= last) {
        number++;
        return enter();
      }
    }
    begin();
  }

  // The next chunk's part of 16 rows: of the first product of gate, then of up.
  __device__ __forceinline__ u64 place_of_part(int n) const {
    return place + n * (DOWN ? 1 : width / 16) * chunks;
  }

  // The next chunk, if there is one.
  __device__ __forceinline__ void fetch(u32 to) {
    const int lane = threadIdx.x & 31;
    if (number < own) {
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u64 from = place_of_part(n) * 256 + h * 128 + lane * 4;
          copy_async(to + n * PART_BYTES + h * 512 + lane * 16, (const u16*)(words + from), 16);
        }
      if (lane < 4 * NT) {
        const u64 from = place_of_part(lane / 4) * 16 + lane % 4 * 4;
        copy_async(to + lane / 4 * PART_BYTES + 1024 + lane % 4 * 16, (const u16*)(factors + from), 16);
      }
      place++;
      if (--left == 0) next_tile();
    }
    end_of_copies();
  }
};
