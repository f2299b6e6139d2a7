// Blocks that share sums: CLUSTER of them, as a cluster where there are several. Needs ptx.cuh.

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Waits for all threads of these blocks; each sees what the others wrote before.
__device__ __forceinline__ void meet_sharers() {
#if CLUSTER > 1
  arrive_in_cluster();
  wait_for_cluster();
#else
  __syncthreads();
#endif
}
