// The sum of what two GPUs have: out = rounded(own + other), or stream + rounded(own + other).
//
// Compile-time: TYPE (0 bfloat16), WIDE (1: float32, and TYPE does not count), STREAM.
//
// Both ranks launch it with the same number of chunks. A thread has a chunk of 16 bytes. It writes it into
// the other GPU's mailbox as four words of 8 bytes, each 4 bytes of the chunk and the turn's number, and
// looks into its own mailbox until the four words there bear that number. A word arrives whole, so that the
// number says that the bytes beside it are those of this turn: nothing has to be ordered by a fence, and a
// number takes one way over the link.
//
// A block counts its own turns, in memory, so that replays of a graph go on counting. Each turn of a block
// writes all of its words, also those beyond the last chunk: of a slot, which every second turn takes, all
// words bear the number of two turns ago until those of this turn come.
//
// Two slots are enough, and no rank waits at the end. A block of turn n of this rank overwrites, over there,
// the words of turn n - 2. It began after the kernel of its turn n - 1 here had ended (kernels of a stream
// wait for those ahead, griddepcontrol.wait), which had seen the words of turn n - 1 from there. These were
// sent by a kernel that began after turn n - 2 over there had ended: the words are read. This takes one
// stream a rank, or streams that wait for each other.
//
// The next kernel may be started at the very beginning: it is, once all blocks of this one run, so that its
// blocks, which wait for the end of these, take no room that these need.

#include "few_row.cuh"

#define THREADS 128
#define MOST_BLOCKS 2048 // and 2 slots of so many blocks are a mailbox
#define LOOKS 16384      // between two at the clock: about 10 ms

__device__ __forceinline__ u64 word(u32 bytes, u32 turn) { return (u64)turn << 32 | bytes; }

__device__ __forceinline__ u32 sum(u32 a, u32 b) {
  if (WIDE) return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
  return pack(__fadd_rn(widen((u16)a), widen((u16)b)),
              __fadd_rn(widen((u16)(a >> 16)), widen((u16)(b >> 16))));
}

// seconds: that the other rank is waited for. gives_up: whether the kernel ends then, and has written any
// sum; else it fails, which every later call into CUDA says.
extern "C" __global__ void __launch_bounds__(THREADS) pair_sum(
    const u16* own, const u16* stream, u16* out, const u64* mailbox, u64* theirs, int* turns, int chunks,
    int seconds, int gives_up) {
  allow_next_kernel();
  const int chunk = blockIdx.x * THREADS + threadIdx.x;
  const bool exists = chunk < chunks;
  wait_for_last_kernel();
  uint4 x = make_uint4(0, 0, 0, 0), before = x;
  const u32 turn = (u32)load_fresh_int(turns + blockIdx.x) + 1;
  if (exists) x = load_fresh(own + (u64)chunk * 8);
  if (STREAM && exists) before = load_fresh(stream + (u64)chunk * 8);

  const u32 at = ((turn & 1) * MOST_BLOCKS + blockIdx.x) * THREADS * 4 + threadIdx.x * 2;
  send_words(theirs + at, word(x.x, turn), word(x.y, turn));
  send_words(theirs + at + THREADS * 2, word(x.z, turn), word(x.w, turn));
  __syncthreads();  // all threads have the count
  if (threadIdx.x == 0) turns[blockIdx.x] = (int)turn;

  u64 a, b, c, d, since = 0;
  for (u32 looks = 1;; looks++) {
    look_at_words(mailbox + at, a, b);
    look_at_words(mailbox + at + THREADS * 2, c, d);
    if ((u32)(a >> 32) == turn && (u32)(b >> 32) == turn && (u32)(c >> 32) == turn &&
        (u32)(d >> 32) == turn)
      break;
    look_again();
    if (looks % LOOKS) continue;
    const u64 now = nanoseconds();
    if (!since) since = now;
    if (now - since < (u64)seconds * 1000000000) continue;
    if (gives_up) break;
    fail();
  }
  if (!exists) return;
  uint4 y = make_uint4(sum(x.x, (u32)a), sum(x.y, (u32)b), sum(x.z, (u32)c), sum(x.w, (u32)d));
  if (STREAM)
    y = make_uint4(sum(before.x, y.x), sum(before.y, y.y), sum(before.z, y.z), sum(before.w, y.w));
  *(uint4*)(out + (u64)chunk * 8) = y;
}
