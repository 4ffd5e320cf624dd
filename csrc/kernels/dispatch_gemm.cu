// The dispatch_gemm family: token rows are pulled from their ranks while the grouped GEMM of those that arrived
// already runs. One artifact serves every split of the blocks, order of the rows and mode of measuring.
//
//   define        default  values    meaning
//   TKT_WORLD     2        1 .. 8    ranks
//   TKT_ACTIVATIONS 0      0 1       rows are 0 gathered by slot, 1 fetched once a token and loaded by index (wgmma only)
//   the GEMM's defines: csrc/kernels/grouped_gemm.cu. The gate lives in the producer, so wgmma roles of up to eight
//   consumer warps share their registers 56 to 224.
//
// Entries, arguments by value:
//   tktune_dispatch_gemm            dispatch_globals; grid = SMs in whole clusters, all resident (one block an SM),
//                                   block = 32 × (consumer warps + 4, or + 1 with mma.sync); dynamic shared memory =
//                                   the fact below or more, where row slots need more
//   tktune_dispatch_gemm_meet       meeting; one warp
//   tktune_dispatch_gemm_self_test  self_test_globals; one block a rank
//   tktune_dispatch_plan            the schedule tables: dispatch_plan.cu
#ifndef TKT_WORLD
#define TKT_WORLD 2
#endif
#ifndef TKT_PRODUCER_REGISTERS
#define TKT_PRODUCER_REGISTERS 56
#endif
#ifndef TKT_CONSUMER_REGISTERS
#define TKT_CONSUMER_REGISTERS (TKT_CONSUMER_WARPS <= 8 ? 224 : 152)
#endif
#include "../comm/dispatch.cuh"
#include "../comm/self_test.cuh"
#include "../gemm/build_config.cuh"
#include "dispatch_plan.cu"

using config = tkt::build_config;
using geo = tkt::geometry<config>;
using globals = tkt::dispatch_globals<config, TKT_WORLD>;
using everyone = tkt::barrier_registry<config::CONSUMER_WARPS, geo::kProducerWarps>::communicators;

static_assert(1 <= TKT_WORLD && TKT_WORLD <= TKT_MAX_WORLD);
static_assert(__builtin_offsetof(globals, gathered) == tkt::dispatch_globals_layout::kGathered);
static_assert(__builtin_offsetof(globals, queue) == tkt::dispatch_globals_layout::kQueue);
static_assert(__builtin_offsetof(globals, pending) == tkt::dispatch_globals_layout::kPending);
static_assert(__builtin_offsetof(globals, tokens) == tkt::dispatch_globals_layout::kTokens);

// Read by the host from the module: shared memory bytes, threads, bytes of the globals, blocks of a cluster.
extern "C" __device__ int32_t tktune_dispatch_gemm_facts[4] = {
    sizeof(tkt::shared_storage<config>), geo::kThreads, sizeof(globals), config::CLUSTER};
// Ranks, whether communicating blocks join the GEMM, bytes of the other entries' arguments, whether rows are indexed.
extern "C" __device__ int32_t tktune_dispatch_gemm_world[5] = {
    TKT_WORLD, config::DRAW == tkt::task_draw::dispenser, sizeof(tkt::meeting<TKT_WORLD>),
    sizeof(tkt::self_test_globals<TKT_WORLD>), geo::kIndexed};

extern "C" __global__ void __launch_bounds__(geo::kThreads, 1)
#if TKT_CLUSTER > 1
    __cluster_dims__(TKT_CLUSTER, 1, 1)
#endif
        tktune_dispatch_gemm(const __grid_constant__ globals G) {
    constexpr bool kJoins = config::DRAW == tkt::task_draw::dispenser;
    const bool communicates = static_cast<int>(blockIdx.x) >= G.num_comp_blocks;
    const bool computes = (G.roles & tkt::kCompute) && (!communicates || (kJoins && (G.roles & tkt::kCommunicate)));

    // A compute block may bring rows too before its first task: without them it would only wait at the gate.
    const int draws = communicates ? 0x7fffffff : G.opening;
    if ((G.roles & tkt::kCommunicate) && draws > 0) {
        tkt::dispatch(G, draws);
        everyone::sync();  // all warps have left the row slots, which the GEMM's stages overlay
    }
    // A block that joins draws its first task too, where its warps have long taken their roles.
    const auto unit = [&G] {
        int number = blockIdx.x / config::CLUSTER;
        if (kJoins && static_cast<int>(blockIdx.x) >= G.num_comp_blocks && tkt::warp_id() == geo::kProducer) {
            if (tkt::lane_id() == 0) number = G.num_comp_blocks + atomicAdd(G.gemm.dispenser, 1);
            number = __shfl_sync(0xffffffffu, number, 0);
        }
        return number;
    };
    if (computes)
        tkt::grouped_gemm<config>(G.gemm, tkt::dispatch_gate<globals>{G}, tkt::no_epilogue{}, unit,
                                  G.num_comp_blocks / config::CLUSTER);
    everyone::sync();
    if (tkt::warp_id() == 0) tkt::leave(G);
}

extern "C" __global__ void __launch_bounds__(32, 1)
    tktune_dispatch_gemm_meet(const __grid_constant__ tkt::meeting<TKT_WORLD> M) {
    tkt::device_barrier(M);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    tktune_dispatch_gemm_self_test(const __grid_constant__ tkt::self_test_globals<TKT_WORLD> G) {
    tkt::self_test(G);
}
