// Runs KERNEL of the file SOURCE, with arguments given as cuLaunchKernel takes them.
#include "cuda.h"
#include SOURCE

template <class... Types, size_t... I>
void call(void (*kernel)(Types...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<Types>*)arguments[I]...);
}

template <class... Types>
void call(void (*kernel)(Types...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Types...>{});
}

void of_thread(void** arguments) { call(KERNEL, arguments); }

#ifndef CLUSTER
#define CLUSTER 1
#endif

// drawn: the order in which the blocks begin.
extern "C" bool launch(int columns, int rows, const int* drawn, int threads, int shared_bytes, unsigned seed,
                       void** arguments) {
  return run({columns, rows}, drawn, CLUSTER, threads, shared_bytes, seed, of_thread, arguments);
}
