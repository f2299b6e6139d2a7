// The sum of what two GPUs have: out = rounded(own + other), or stream + rounded(own + other).
//
// Compile-time: TYPE (0 bfloat16), WIDE (1: float32, and TYPE does not count), STREAM, BARE (0: words; else
// bare, and how many chunks a thread has).
//
// Both ranks launch it with the same number of chunks, of 16 bytes, and the same BARE. A block writes its
// chunks into the other GPU's mailbox, then waits for the chunks of its number to come from there. Blocks
// begin in the order of their numbers: of those that have not ended, the first runs on both GPUs, has sent,
// and ends.
//
// Words: a thread has one chunk. It writes it as four words of 8 bytes, each 4 bytes of the chunk and the
// turn's number, and looks into its own mailbox until the four words there bear that number. A word arrives
// whole, so that the number says that the bytes beside it are those of this turn: nothing has to be ordered
// by a fence, and a number takes one way over the link. Each turn of a block writes all of its words, also
// those beyond the last chunk: of a slot, all words bear the number of two turns ago until those of this
// turn come.
//
// Bare: half the bytes, for more ways over the link. Threads write chunks as they are. Behind the block's
// barrier one thread writes the turn's number to the block's flag, after a fence of the system: it orders
// what the barrier has shown to that thread, hence all of the block's chunks, before the flag. Over there
// one thread looks, with loads that acquire, until the flag bears the number; the chunks are read behind
// another barrier, past the first cache. Data may look like any word: an area has words or bare chunks,
// never both, and a block counts the turns of each form for itself. Which bytes are a block's depends on
// BARE: a mailbox serves one BARE above 0.
//
// A block counts its own turns, in memory, so that replays of a graph go on counting.
//
// Two slots are enough, and no rank waits at the end. Take a form, and the turns that a block has in it.
// Both ranks count them alike, since they make the same launches. Of turn n, the block overwrites over there
// what it sent in turn n - 2, and nothing else. It began after the kernel of its turn n - 1 here had ended
// (kernels of a stream wait for those ahead, griddepcontrol.wait), which had seen the words or the flag of
// turn n - 1 from there. These were sent by a kernel that began after turn n - 2 over there had ended: what
// came in it is read, and no flag is looked for any more. Launches in between, of the other form or without
// this block, write elsewhere. This takes one stream a rank, or streams that wait for each other.
//
// The next kernel may be started at the very beginning: it is, once all blocks of this one run, so that its
// blocks, which wait for the end of these, take no room that these need.

#include "few_row.cuh"

#define THREADS 128
#define MOST_BLOCKS 2048 // of a slot
#define LOOKS 16384      // between two at the clock: about 10 ms
#define FLAG 4           // words from flag to flag

#if BARE
#define CHUNKS BARE                                // of a thread
#define SLOT (MOST_BLOCKS * (THREADS * 2 + FLAG))  // words: chunks, and flags behind them
#else
#define CHUNKS 1
#define SLOT (MOST_BLOCKS * THREADS * 4)
#endif

__device__ __forceinline__ int chunk_of_thread(int i) {
  return (blockIdx.x * CHUNKS + i) * THREADS + threadIdx.x;
}

__device__ __forceinline__ u64 word(u32 bytes, u32 turn) { return (u64)turn << 32 | bytes; }

// For the other rank.
struct Patience {
  int seconds, gives_up;
  u32 looks;
  u64 since;

  // After a look in vain: whether to look again. At the end it fails where it may not give up.
  __device__ __forceinline__ bool lasts() {
    look_again();
    if (++looks % LOOKS) return true;
    const u64 now = nanoseconds();
    if (!since) since = now;
    if (now - since < (u64)seconds * 1000000000) return true;
    if (!gives_up) fail();
    return false;
  }
};

#if BARE

__device__ __forceinline__ void send(u64* slot, const uint4 (&x)[CHUNKS], int chunks, u32) {
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    if (chunk_of_thread(i) < chunks)
      send_words(slot + chunk_of_thread(i) * 2, word(x[i].x, x[i].y), word(x[i].z, x[i].w));
}

__device__ __forceinline__ u32* flag_of_block(u64* slot) {
  return (u32*)(slot + MOST_BLOCKS * THREADS * 2 + blockIdx.x * FLAG);
}

// By one thread, behind the barrier after the block's last chunk.
__device__ __forceinline__ void end_of_sending(u64* slot, u32 turn) {
  tell_other_gpu(flag_of_block(slot), turn);
}

__device__ __forceinline__ void receive(u64* slot, uint4 (&y)[CHUNKS], int chunks, u32 turn,
                                        Patience patience) {
  if (threadIdx.x == 0)
    while (told_by_other_gpu(flag_of_block(slot)) != turn && patience.lasts()) {}
  __syncthreads();
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    u64 a = 0, b = 0;
    if (chunk_of_thread(i) < chunks) look_at_words(slot + chunk_of_thread(i) * 2, a, b);
    y[i] = make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
  }
}

#else

__device__ __forceinline__ u32 words_of_thread() { return blockIdx.x * THREADS * 4 + threadIdx.x * 2; }

__device__ __forceinline__ void send(u64* slot, const uint4 (&x)[CHUNKS], int, u32 turn) {
  u64* at = slot + words_of_thread();
  send_words(at, word(x[0].x, turn), word(x[0].y, turn));
  send_words(at + THREADS * 2, word(x[0].z, turn), word(x[0].w, turn));
}

__device__ __forceinline__ void end_of_sending(u64*, u32) {}

__device__ __forceinline__ void receive(u64* slot, uint4 (&y)[CHUNKS], int, u32 turn, Patience patience) {
  const u64* at = slot + words_of_thread();
  u64 a, b, c, d;
  do {
    look_at_words(at, a, b);
    look_at_words(at + THREADS * 2, c, d);
    if ((u32)(a >> 32) == turn && (u32)(b >> 32) == turn && (u32)(c >> 32) == turn &&
        (u32)(d >> 32) == turn)
      break;
  } while (patience.lasts());
  y[0] = make_uint4((u32)a, (u32)b, (u32)c, (u32)d);
}

#endif

__device__ __forceinline__ u32 sum(u32 a, u32 b) {
  if (WIDE) return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
  return pack(__fadd_rn(widen((u16)a), widen((u16)b)),
              __fadd_rn(widen((u16)(a >> 16)), widen((u16)(b >> 16))));
}

__device__ __forceinline__ uint4 sum(uint4 a, uint4 b) {
  return make_uint4(sum(a.x, b.x), sum(a.y, b.y), sum(a.z, b.z), sum(a.w, b.w));
}

// mailbox, theirs: the area of this form, here and over there; turns: those of this form.
// seconds: that the other rank is waited for. gives_up: whether the kernel ends then, and has written any
// sum; else it fails, which every later call into CUDA says.
extern "C" __global__ void __launch_bounds__(THREADS) pair_sum(
    const u16* own, const u16* stream, u16* out, u64* mailbox, u64* theirs, int* turns, int chunks,
    int seconds, int gives_up) {
  allow_next_kernel();
  wait_for_last_kernel();
  const u32 turn = (u32)load_fresh_int(turns + blockIdx.x) + 1;
  uint4 x[CHUNKS], before[CHUNKS], y[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    x[i] = make_uint4(0, 0, 0, 0);
    if (chunk_of_thread(i) < chunks) x[i] = load_fresh(own + (u64)chunk_of_thread(i) * 8);
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; i++)
    if (STREAM && chunk_of_thread(i) < chunks)
      before[i] = load_fresh(stream + (u64)chunk_of_thread(i) * 8);

  const u32 slot = (turn & 1) * SLOT;
  send(theirs + slot, x, chunks, turn);
  __syncthreads();  // all threads have the count, and have sent
  if (threadIdx.x == 0) {
    end_of_sending(theirs + slot, turn);
    turns[blockIdx.x] = (int)turn;
  }
  receive(mailbox + slot, y, chunks, turn, Patience{seconds, gives_up, 0, 0});
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    if (chunk_of_thread(i) >= chunks) return;
    const uint4 both = sum(x[i], y[i]);
    *(uint4*)(out + (u64)chunk_of_thread(i) * 8) = STREAM ? sum(before[i], both) : both;
  }
}
