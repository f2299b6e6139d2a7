// Runs KERNEL of the file SOURCE, with arguments given as cuLaunchKernel takes them.
#include "cuda.h"
#include SOURCE

template <class... Types, size_t... I>
void call(void (*kernel)(Types...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<Types>*)arguments[I]...);
}

template <class... Types>
std::function<void()> bound(void (*kernel)(Types...), void** arguments) {
  return [=] { call(kernel, arguments, std::index_sequence_for<Types...>{}); };
}

static void run_fiber() {
  body();
  me().ended = true;
  swapcontext(&me().context, &scheduler);
}

static void start(Fiber& fiber) {
  fiber.stack.resize(1 << 16);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&fiber.context, run_fiber, 0);
}

static void run_block(int threads) {
  fibers.clear();
  fibers.resize(threads);
  memset(shared_memory, 0xff, SHARED_BYTES);
  for (Fiber& fiber : fibers) start(fiber);
  for (bool any = true; any;) {
    any = false;
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {
      if (me().ended) continue;
      any = true;
      swapcontext(&scheduler, &me().context);
    }
  }
}

// order: in which the blocks run.
extern "C" void launch(int blocks, const int* order, int threads, void** arguments) {
  body = bound(KERNEL, arguments);
  gridDim.x = blocks;
  for (int i = 0; i < blocks; i++) {
    blockIdx.x = order[i];
    run_block(threads);
  }
}
