"""Kernels of several GPUs, each of which writes into memory of the others. `pair_sum` adds up what
two have. The communicators of `runner` call them."""
