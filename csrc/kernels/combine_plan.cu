// Combine tables over a schedule that was built on the device: what a launch of gemm_combine reads of its routing.
// Every gemm_combine artifact contains this entry.
//
// Entry, argument by value:
//   tktune_combine_plan   combine_plan_globals; 1 .. 32 blocks, all resident, as many on every rank; block = the fact
//                         below; dynamic shared memory = 4 × combine_plan_shared_words
#include "../comm/combine_plan.cuh"

// Read by the host from the module: most shared memory bytes (0: what a problem needs), threads, bytes of the globals,
// blocks of a cluster.
extern "C" __device__ int32_t tktune_combine_plan_facts[4] = {0, tkt::kCombinePlanThreads,
                                                              sizeof(tkt::combine_plan_globals), 1};

extern "C" __global__ void __launch_bounds__(tkt::kCombinePlanThreads, 1)
    tktune_combine_plan(const __grid_constant__ tkt::combine_plan_globals G) {
    extern __shared__ __align__(16) int32_t plan_memory[];
    tkt::combine_planner(G, plan_memory).run();
}
