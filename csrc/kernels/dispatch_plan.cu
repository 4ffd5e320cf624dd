// Schedule tables from expert ids: what a dispatch reads of its routing, built on the device and exchanged through
// symmetric memory. Every dispatch_gemm artifact contains this entry; alone it is a small one for every family.
//
//   define            default  values  meaning
//   TKT_PLAN_PUSHES   0        0 1     1: also builds the tables of ranks that push, where the globals have a place for them
//
// Entry, argument by value:
//   tktune_dispatch_plan   plan_globals; 1 .. 32 blocks, all resident, as many on every rank; block = the fact below;
//                          dynamic shared memory = 4 × plan_shared_words(world, local experts), at most the fact below
#ifndef TKT_PLAN_PUSHES
#define TKT_PLAN_PUSHES 0
#endif
#if TKT_PLAN_PUSHES
#include "../comm/push_plan.cuh"
#else
#include "../comm/plan.cuh"
#endif

// Read by the host from the module: most shared memory bytes, threads, bytes of the globals, blocks of a cluster.
extern "C" __device__ int32_t tktune_dispatch_plan_facts[4] = {
    4 * tkt::plan_shared_words(TKT_MAX_WORLD, tkt::kPlanMostExperts), tkt::kPlanThreads, sizeof(tkt::plan_globals), 1};

extern "C" __device__ int32_t tktune_dispatch_plan_pushes[1] = {TKT_PLAN_PUSHES};

extern "C" __global__ void __launch_bounds__(tkt::kPlanThreads, 1)
    tktune_dispatch_plan(const __grid_constant__ tkt::plan_globals G) {
    extern __shared__ __align__(16) int32_t plan_memory[];
#if TKT_PLAN_PUSHES
    tkt::push_plan_builder(G, plan_memory).run();
#else
    tkt::plan_builder(G, plan_memory).run();
#endif
}
