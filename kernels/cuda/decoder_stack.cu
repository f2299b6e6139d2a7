// All decoder layers of a small model for few rows, in one kernel: norms, projections, rotation, KV
// write, attention, feed-forward, residuals.
//
// A small model is bound by the number of its kernels, not by bytes. Here one block a multiprocessor
// goes through all layers, with a share of every product. A warp of its own asks for the weights of
// the next layer, product by product, as soon as this layer has read its own.
//
// Blocks do not meet: what one computes for the others lies in memory, where empty places are all
// ones, which no result is. A block that needs a value reads its place until it has come. So a product
// waits for one trip through L2, and only for blocks whose values it needs. Two sets of places serve
// launches by turns; a launch empties the set of the one before. Within a launch each layer has places
// of its own, so that none is written twice. All blocks must be there at once: two launches that run
// beside each other on one device may wait for ever. Which multiprocessor has which share is the host's
// choice (sm_placement.cuh).
//
// Sums are those of few_row.cu, in the same order: a row has the same bits in both.
//
// Compile-time: TYPE (0 bfloat16, 1 float16), sizes HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, heads of
// 64; WARPS_H, WARPS_A, WARPS_I, warps that share a depth of HIDDEN, of the heads and of INTERMEDIATE;
// OUTS_QKV, OUTS_H, OUTS_I, outputs a block has of each product; SPARE, blocks that have none; HALVES,
// eights of rows; HAS_TREE, HAS_FIRST.

#include "stack_partials.cuh"
#include "sm_placement.cuh"

#define PAIRS_H ((ROWS * OUTS_H / 2 + THREADS - 1) / THREADS)

// What a block has of each product. The last SPARE blocks have none, but the first tasks of attention,
// whose keys come while the others project.
struct Share {
  int qkv, hidden, gates;  // first outputs

  __device__ __forceinline__ Share(int block)
      : qkv(((int)gridDim.x - SPARE - 1 - block) * OUTS_QKV), hidden(block * OUTS_H),
        gates(block * OUTS_I) {}
  __device__ __forceinline__ int qkv_row(int i) const {
    return has_qkv() && qkv + i < QKV_SIZE ? qkv + i : -1;
  }
  __device__ __forceinline__ bool has_qkv() const { return qkv >= 0 && qkv < QKV_SIZE; }
  __device__ __forceinline__ int hidden_row(int i) const {
    return hidden + i < HIDDEN ? hidden + i : -1;
  }
  __device__ __forceinline__ int gate_row(int i) const {
    const int o = gates + i % OUTS_I;
    return o < INTERMEDIATE ? o + i / OUTS_I * INTERMEDIATE : -1;
  }
};

__device__ __forceinline__ void fetch_weights(const Share& mine, const Layer* layers,
                                              int num_layers) {
#pragma unroll 1
  for (int number = 0; number < num_layers; number++) {
    const Layer& layer = layers[number];
    const auto hidden_row = [&](int i) { return mine.hidden_row(i); };
    if (mine.has_qkv())
      Qkv::fetch(number, layer.qkv, layer.input_gain, [&](int i) { return mine.qkv_row(i); });
    if (mine.hidden < HIDDEN) Out::fetch(number, layer.out, 0, hidden_row);
    if (mine.gates < INTERMEDIATE)
      Gates::fetch(number, layer.gate_up, layer.gain, [&](int i) { return mine.gate_row(i); });
    if (mine.hidden < HIDDEN) Down::fetch(number, layer.down, 0, hidden_row);
  }
}

// What all blocks of a launch know. Rows past the requests' own belong to no request: none of them is
// computed, since no block would leave their heads.
struct Launch {
  const u16* x;
  int stride_x;
  u16 *out, *captured;
  int captured_size;  // of the streams behind a layer
  int num_rows;
  float eps;
};

// A layer's place: its number, and the places of its values.
struct Step {
  int number;
  u16* at;
  bool is_last;
};

// Sums of a product, and the squares of its rows. Two by turns: at a barrier of the next product,
// all have read those of the last.
struct Sums {
  int half;

  __device__ __forceinline__ float* sums() const { return (float*)(shared + half * HALF_BYTES); }
  __device__ __forceinline__ float* squares() const {
    return (float*)(shared + half * HALF_BYTES + SUMS_BYTES);
  }
};

// What a block keeps of the residual stream: pairs of values of its columns.
struct Stream {
  u32 pairs[PAIRS_H];

  __device__ __forceinline__ Stream(const Launch& all, int first_out) {
#pragma unroll
    for (int c = 0; c < PAIRS_H; c++) {
      const int i = c * THREADS + threadIdx.x, row = i / (OUTS_H / 2);
      const int column = first_out + i % (OUTS_H / 2) * 2;
      const bool exists = row < all.num_rows && column < HIDDEN;
      pairs[c] = exists ? *(const u32*)(all.x + (u64)row * all.stride_x + column) : 0;
    }
  }

  // stream += product, for all blocks (at); or plainly, to where others read it afterwards.
  template <class Of>
  __device__ __forceinline__ void add(const float* sums, int first_out, int num_rows, u16* at,
                                      u16* out, u16* captured) {
#pragma unroll
    for (int c = 0; c < PAIRS_H; c++) {
      const int i = c * THREADS + threadIdx.x, row = i / (OUTS_H / 2), o = i % (OUTS_H / 2) * 2;
      const int column = first_out + o;
      if (row >= num_rows || column >= HIDDEN) continue;
      const float2 sum = Of::sum_of(sums, row, o);
      const u32 now = pack(rounded(sum.x) + widen((u16)pairs[c]),
                           rounded(sum.y) + widen((u16)(pairs[c] >> 16)));
      pairs[c] = now;
      if (at) settle(at + place_of(column, row, num_rows), now);
      if (out) *(u32*)(out + (u64)row * HIDDEN + column) = now;
      if (captured) *(u32*)(captured + (u64)row * HIDDEN + column) = now;
    }
  }
};

__device__ __forceinline__ void settle_qkv(const Sums& of, u16* at, int first_out, int num_rows,
                                           float eps) {
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * (OUTS_QKV / 2); i += THREADS) {
    const int row = i / (OUTS_QKV / 2), o = i % (OUTS_QKV / 2) * 2;
    if (first_out + o >= QKV_SIZE) continue;
    const float2 sum = Qkv::sum_of(of.sums(), row, o);
    const float by = scale_of(of.squares(), row, eps);
    settle(at + place_of(QKV_AT + first_out + o, row, num_rows), pack(sum.x * by, sum.y * by));
  }
}

__device__ __forceinline__ void settle_gates(const Sums& of, u16* at, int first_out, int num_rows,
                                             float eps) {
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * (OUTS_I / 2); i += THREADS) {
    const int row = i / (OUTS_I / 2), o = i % (OUTS_I / 2) * 2;
    if (first_out + o >= INTERMEDIATE) continue;
    const float2 gate = Gates::sum_of(of.sums(), row, o);
    const float2 up = Gates::sum_of(of.sums(), row, OUTS_I + o);
    const float by = scale_of(of.squares(), row, eps);
    settle(at + place_of(GATES_AT + first_out + o, row, num_rows),
           pack(gated(gate.x * by, up.x * by), gated(gate.y * by, up.y * by)));
  }
}

__device__ __forceinline__ void project(const Launch& all, const Share& mine, const Step& step,
                                        Sums& of) {
  if (!mine.has_qkv()) return;
  const bool is_first = step.number == 0;
  const int rows = all.num_rows;
  Qkv::multiply_rows(step.number, is_first ? all.x : step.at - LAYER_SIZE + STREAM_AT * rows,
                     is_first ? all.stride_x : 8, is_first ? 8 : 8 * rows, rows, is_first,
                     of.sums(), of.squares());
  meet();
  settle_qkv(of, step.at, mine.qkv, rows, all.eps);
  Qkv::release();
  of.half ^= 1;
}

__device__ __forceinline__ void add_heads(const Launch& all, const Share& mine, const Step& step,
                                          Sums& of, Stream& stream) {
  if (mine.hidden >= HIDDEN) return;
  const int rows = all.num_rows;
  Out::multiply_rows(step.number, step.at + HEADS_AT * rows, 8, 8 * rows, rows, false, of.sums(), 0);
  meet();
  stream.add<Out>(of.sums(), mine.hidden, rows, step.at + MIDDLE_AT * rows, 0, 0);
  Out::release();
  of.half ^= 1;
}

__device__ __forceinline__ void open_gates(const Launch& all, const Share& mine, const Step& step,
                                           Sums& of) {
  if (mine.gates >= INTERMEDIATE) return;
  const int rows = all.num_rows;
  Gates::multiply_rows(step.number, step.at + MIDDLE_AT * rows, 8, 8 * rows, rows, false, of.sums(),
                       of.squares());
  meet();
  settle_gates(of, step.at, mine.gates, rows, all.eps);
  Gates::release();
  of.half ^= 1;
}

__device__ __forceinline__ void add_gates(const Launch& all, const Share& mine, const Step& step,
                                          Sums& of, Stream& stream, long long place) {
  if (mine.hidden >= HIDDEN) return;
  const int rows = all.num_rows;
  Down::multiply_rows(step.number, step.at + GATES_AT * rows, 8, 8 * rows, rows, false, of.sums(), 0);
  meet();
  stream.add<Down>(of.sums(), mine.hidden, rows, step.is_last ? 0 : step.at + STREAM_AT * rows,
                   step.is_last ? all.out : 0,
                   place < 0 ? 0 : all.captured + (u64)place * all.captured_size);
  Down::release();
  of.half ^= 1;
}

// Which of the two sets of places this launch uses, and what the launch before has left in the other.
struct Turn {
  int launches, set, old_rows;

  __device__ __forceinline__ Turn(const int* counters)
      : launches(counters[0]), set(launches & 1), old_rows(counters[2 + (set ^ 1)]) {}

  // A layer's places of the other set. The launch that uses them waits for this kernel's end.
  __device__ __forceinline__ void empty(uint4* places) const {
#pragma unroll 1
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < old_rows * (ROW_SIZE / 8);
         i += gridDim.x * THREADS)
      places[i] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  }

  // The last block writes what the next launch will read.
  __device__ __forceinline__ void end(int* counters, int num_rows) const {
    if (threadIdx.x > 0 || atomicAdd(counters + 1, 1) < (int)gridDim.x - 1) return;
    counters[0] = launches + 1;
    counters[1] = 0;
    counters[2 + set] = num_rows;
    counters[2 + (set ^ 1)] = 0;
  }
};

// The pointers of all layers, and barriers, for all warps. -> the block's number.
__device__ __forceinline__ int prepare(const Layer* layers, int num_layers, const SMPlacement& placement) {
  int* number = (int*)(shared + NUMBER_AT);
  if (threadIdx.x == 0) {
    *number = placement.take();
    for (int i = 0; i < 8; i++) prepare_barrier(in_shared(BARRIERS_AT + i * 8), 1);
    show_barriers();
  }
  for (int i = threadIdx.x; i < num_layers * (int)sizeof(Layer) / 16; i += THREADS + 32)
    ((uint4*)(shared + LAYERS_AT))[i] = load_constant((const u16*)layers + i * 8);
  __syncthreads();
  return *number;
}

__device__ __forceinline__ void fetch_angles(const Task& task, const long long* positions,
                                             const float* cos_sin, int stride) {
  float* angles = (float*)(shared + ANGLES_AT);
  for (int i = threadIdx.x; i < task.num_queries * HEAD; i += THREADS)
    angles[i] = cos_sin[(u64)positions[task.first_row + i / HEAD] * stride + i % HEAD];
}

// counters: launches so far, blocks that have left this one, rows that each set of places holds, blocks
// that ever arrived.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decoder_stack(
    const Layer* layers, int num_layers, const u16* x, int stride_x, u16* out, u16* captured,
    u16* sets, float* partials, int* flags, int* counters, const int* numbers, int* taken, int* seen,
    const long long* positions,
    const long long* loc, const long long* rows, const long long* seq_lens,
    const long long* indptr, const int* table, const unsigned char* tree,
    const long long* first_keys, const float* cos_sin, int num_requests, int num_rows,
    int stride_table, int nodes, int stride_cache, int stride_cos_sin, float eps, float scale) {
  const SMPlacement placement = {numbers, taken, seen, counters + 4};
  const int block = prepare(layers, num_layers, placement);
  const Share mine(block);
  const Layer* all_layers = (const Layer*)(shared + LAYERS_AT);
  if (warp_of() == WARPS) {  // it waits for no other warp from here on
    if (lane_of() == 0) fetch_weights(mine, all_layers, num_layers);
    return;
  }
  wait_for_last_kernel();
  const Turn turn(counters);
  const Launch all = {x, stride_x, out, captured, num_rows * HIDDEN,
                      min(num_rows, (int)indptr[num_requests]), eps};
  const Batch batch = {positions, loc, rows, seq_lens, indptr, table, tree, first_keys,
                       num_requests, all.num_rows, stride_table, nodes, stride_cache};
  const u64 set_size = (u64)num_layers * LAYER_SIZE;
  u16* at = sets + turn.set * set_size;
  u16* emptied = sets + (turn.set ^ 1) * set_size;  // of the launch before
  Task task = task_of(batch, gridDim.x - 1 - block);
  if (task.exists) {
    fetch_angles(task, positions, cos_sin, stride_cos_sin);
    fetch_keys(batch, all_layers[0], task, task.begin);
    // Not in each layer: these are loads, one behind the other.
    for (int i = 0; HAS_TREE && i < 2; i++)
      task.tree_keys[i] = tree_keys_of(batch, task, (lane_of() >> 2) + i * 8);
  }
  Stream stream(all, mine.hidden);
  meet();

  Sums sums = {0};
#pragma unroll 1
  for (int number = 0; number < num_layers; number++, at += LAYER_SIZE) {
    const Layer& layer = all_layers[number];
    const Step step = {number, at, number == num_layers - 1};
    project(all, mine, step, sums);
    if (task.exists) {
      const int tag = turn.launches * num_layers + number + 1;
      attend(batch, layer, task, {at, partials, flags, tag, all.num_rows}, scale);
    }
    add_heads(all, mine, step, sums, stream);
    open_gates(all, mine, step, sums);
    add_gates(all, mine, step, sums, stream, layer.capture);
    if (task.exists && !step.is_last) fetch_keys(batch, all_layers[number + 1], task, task.begin);
    turn.empty((uint4*)emptied + number * (LAYER_SIZE / 8));
  }
  allow_next_kernel();
  meet();
  if (threadIdx.x == 32) placement.leave(block, turn.launches);  // while another thread ends the turn
  turn.end(counters, all.num_rows);
}
