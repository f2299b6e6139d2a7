// Stages of int4_wgmma.cu: which a block takes, and how they come into shared memory. Needs its names.

// A way's stages follow each other, WAYS apart; then those of the next way.
struct Walk {
  int way, stage;

  __device__ __forceinline__ bool ends_way(int stages) const { return stage + WAYS >= stages; }
  __device__ __forceinline__ void step(int stages) {
    const bool ends = ends_way(stages);
    way += ends;
    stage = ends ? way : stage + WAYS;
  }
};

// How many stages a block has.
__device__ __forceinline__ int stages_of(int rank, int stages) {
  int count = 0;
#pragma unroll
  for (int way = 0; way < MINE; way++) count += (stages - rank * MINE - way + WAYS - 1) / WAYS;
  return count;
}

// Which one the block takes `turn` stages after its first.
__device__ __forceinline__ int stage_at(int rank, int turn, int stages) {
  int found = stages - 1;
#pragma unroll
  for (int way = rank * MINE; way < rank * MINE + MINE; way++) {
    const int of_way = (stages - way + WAYS - 1) / WAYS;
    if (turn >= 0 && turn < of_way) found = way + turn * WAYS;
    turn -= of_way;
  }
  return found;
}

// A stage of codes: a lane has 16 bytes of some rows. Pieces of a row change places by its number,
// so that lanes of all rows read different banks.
__device__ __forceinline__ void copy_codes(u32 to, const unsigned char* from, int columns, int outs_left,
                                           int between) {
#pragma unroll
  for (int o = 0; o < OUTS; o += COPIERS / 4) {
    if (GATED && o == STORED) from += (u64)between * (columns / 2);
    if (o % STORED < outs_left) copy_async(to + o * 64, (const u16*)from, 16);
    from += COPIERS / 8 * columns;
  }
}

// A stage of x: a lane has 16 bytes of each 32 columns of some rows. What lies where rows do not
// exist reaches sums of those rows alone.
__device__ __forceinline__ void copy_rows(u32 to, u32 to_odd, const u16* from, int row, int rows_left,
                                          int stride_x) {
#pragma unroll
  for (int r = 0; r < ROWS; r += COPIERS / 4) {
    if (r < rows_left && (ROWS % (COPIERS / 4) == 0 || row < ROWS)) {
      copy_async(to + r * HALF, from, 16);
      copy_async(to_odd + r * HALF, from + 32, 16);
      copy_async(to + X_HALF + r * HALF, from + 64, 16);
      copy_async(to_odd + X_HALF + r * HALF, from + 96, 16);
    }
    from += COPIERS / 4 * stride_x;
  }
}

// What the warps do that copy.
__device__ __forceinline__ void copy_stages(u32 base, const u16* x, const unsigned char* codes, int rank,
                                            int count, int rows_left, int outs_left, int between,
                                            int columns, int stride_x) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x - SHARERS) >> 5, piece = lane & 3;
  const int stages = columns / STAGE, out = warp * 8 + (lane >> 2);
  const int row = warp * 8 + (lane >> 2 & 1) * 4 + (lane >> 3);  // eight lanes write to all banks
  const u32 to = base + CODES_AT + out * 64 + (piece ^ (out >> 1 & 3)) * 16;
  const u32 to_x = base + swizzled(row, piece), to_odd = base + swizzled(row, piece + 4);
  codes += (u64)out * (columns / 2) + piece * 16;
  x += (u64)row * stride_x + piece * 8;
  Walk ahead = {rank * MINE, rank * MINE}, walk = ahead;
#pragma unroll 1
  for (int slot = 0; slot < min(EARLY, count); slot++) {
    copy_codes(to + slot * CODE_SLOT, codes + ahead.stage * (STAGE / 2), columns, outs_left - out, between);
    ahead.step(stages);
  }
  wait_for_last_kernel();
  allow_next_kernel();  // in this order (int4.cuh)
  int slot = 0, turns = 1;  // a slot is empty for the first time when it has been read once
#pragma unroll 1
  for (int turn = 0; turn < count; turn++) {
    if (turn >= SLOTS) wait_at(READ(slot), turns & 1);
    if (turn >= EARLY)
      copy_codes(to + slot * CODE_SLOT, codes + walk.stage * (STAGE / 2), columns, outs_left - out, between);
    copy_rows(to_x + slot * X_SLOT, to_odd + slot * X_SLOT, x + walk.stage * STAGE, row, rows_left - row,
              stride_x);
    arrive_after_copies(LANDED(slot));
    walk.step(stages);
    slot++;
    if (slot == SLOTS) slot = 0, turns++;
  }
}

// What the warp behind them does.
__device__ __forceinline__ void show_stages(u32 base, int count) {
  int slot = 0, turns = 0;
#pragma unroll 1
  for (int turn = 0; turn < count; turn++) {
    wait_at(LANDED(slot), turns & 1);
    show_copies_to_products();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_at(SHOWN(slot));
    slot++;
    if (slot == SLOTS) slot = 0, turns++;
  }
}
