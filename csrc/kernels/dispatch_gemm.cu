// The dispatch_gemm family: token rows are pulled from their ranks while the grouped GEMM of those that arrived
// already runs. One artifact serves every split of the blocks, order of the rows and mode of measuring.
//
//   define        default  values    meaning
//   TKT_WORLD     2        1 .. 8    ranks
//   TKT_ACTIVATIONS 0      0 1       rows are 0 gathered by slot, 1 fetched once a token and loaded by index (wgmma only)
//   TKT_GLU       0        0 1 2     outputs are 0 the GEMM's; silu(gate) · up of packed columns (csrc/gemm/glu.cuh): 1 made
//                                    of the accumulators, 2 made of outputs by the entry below
//   TKT_TRANSPORT 0         0 1       rows are 0 pulled by the rank that wants them, 1 pushed by the rank that has them
//   the GEMM's defines: csrc/kernels/grouped_gemm.cu. The gate lives in the producer, so wgmma roles of up to eight
//   consumer warps share their registers 56 to 224.
//
// Entries, arguments by value:
//   tktune_dispatch_gemm            dispatch_globals or push_globals; grid = SMs in whole clusters, all resident (one block an SM),
//                                   block = 32 × (consumer warps + 4, or + 1 with mma.sync); dynamic shared memory =
//                                   the fact below or more, where row slots need more
//   tktune_dispatch_gemm_meet       meeting; one warp
//   tktune_dispatch_gemm_self_test  self_test_globals; one block a rank
//   tktune_dispatch_gemm_glu        TKT_GLU 2 only: glu_pass_globals; any grid of blocks of whole warps
//   tktune_dispatch_plan            the schedule tables, those of pushes too where rows are pushed: dispatch_plan.cu
#ifndef TKT_WORLD
#define TKT_WORLD 2
#endif
#ifndef TKT_PRODUCER_REGISTERS
#define TKT_PRODUCER_REGISTERS 56
#endif
#ifndef TKT_CONSUMER_REGISTERS
#define TKT_CONSUMER_REGISTERS (TKT_CONSUMER_WARPS <= 8 ? 224 : 152)
#endif
#ifndef TKT_TRANSPORT
#define TKT_TRANSPORT 0
#endif
#define TKT_PLAN_PUSHES TKT_TRANSPORT
#include "../comm/first_task.cuh"
#include "../comm/push.cuh"
#include "../comm/self_test.cuh"
#include "../gemm/build_config.cuh"
#include "../gemm/glu_pass.cuh"
#include "dispatch_plan.cu"

using config = tkt::build_config;
using geo = tkt::geometry<config>;
using pulled = tkt::dispatch_globals<config, TKT_WORLD>;
#if TKT_TRANSPORT == 0
using globals = pulled;
using gate = tkt::dispatch_gate<globals>;
#else
using globals = tkt::push_globals<config, TKT_WORLD>;
using gate = tkt::gate_of_pushed<globals>;
#endif
// Producers that have nothing to do in the GEMM: all but the one that walks and loads and the one that stores. Those of a
// cluster are kept, since its blocks leave together.
constexpr int kBesideWarps =
    TKT_TRANSPORT == 0 && geo::kWgmma && !geo::kIndexed && config::CLUSTER == 1 ? geo::kProducerWarps - 2 : 0;
using everyone = tkt::barrier_registry<config::CONSUMER_WARPS, geo::kProducerWarps>::communicators;

static_assert(1 <= TKT_WORLD && TKT_WORLD <= TKT_MAX_WORLD);
static_assert(__builtin_offsetof(pulled, gathered) == tkt::dispatch_globals_layout::kGathered);
static_assert(__builtin_offsetof(pulled, queue) == tkt::dispatch_globals_layout::kQueue);
static_assert(__builtin_offsetof(pulled, pending) == tkt::dispatch_globals_layout::kPending);
static_assert(__builtin_offsetof(pulled, tokens) == tkt::dispatch_globals_layout::kTokens);
static_assert(__builtin_offsetof(tkt::push_part<TKT_WORLD>, missing) == tkt::push_part_layout::kMissing);
static_assert(__builtin_offsetof(tkt::push_part<TKT_WORLD>, sections) == tkt::push_part_layout::kSections);

// Read by the host from the module: shared memory bytes, threads, bytes of the globals, blocks of a cluster.
extern "C" __device__ int32_t tktune_dispatch_gemm_facts[4] = {
    sizeof(tkt::shared_storage<config>), geo::kThreads, sizeof(globals), config::CLUSTER};
// Ranks, whether communicating blocks join the GEMM, bytes of the other entries' arguments, whether rows are indexed,
// whether they are pushed.
extern "C" __device__ int32_t tktune_dispatch_gemm_world[6] = {
    TKT_WORLD, config::DRAW == tkt::task_draw::dispenser, sizeof(tkt::meeting<TKT_WORLD>),
    sizeof(tkt::self_test_globals<TKT_WORLD>), geo::kIndexed, TKT_TRANSPORT};

// The form of SwiGLU, bytes of its pass's arguments.
extern "C" __device__ int32_t tktune_dispatch_gemm_glu_facts[2] = {TKT_GLU, sizeof(tkt::glu_pass_globals)};

extern "C" __global__ void __launch_bounds__(geo::kThreads, 1)
#if TKT_CLUSTER > 1
    __cluster_dims__(TKT_CLUSTER, 1, 1)
#endif
        tktune_dispatch_gemm(const __grid_constant__ globals G) {
    constexpr bool kJoins = config::DRAW == tkt::task_draw::dispenser;
    const bool communicates = static_cast<int>(blockIdx.x) >= G.num_comp_blocks;
    const bool computes = (G.roles & tkt::kCompute) && (!communicates || (kJoins && (G.roles & tkt::kCommunicate)));

    // A compute block may bring rows too before its first task: without them it would only wait at the gate.
    const bool opens = TKT_TRANSPORT == 0 && !communicates && G.openers > 0;  // until its first tile can begin
    const int draws = communicates || opens ? 0x7fffffff : G.opening;
    if ((G.roles & tkt::kCommunicate) && draws > 0) {
#if TKT_TRANSPORT == 0
        tkt::pad_blocks until{0, 0};
        if (opens)
            until = tkt::first_blocks<config>(G.gemm, blockIdx.x / config::CLUSTER, G.num_comp_blocks / config::CLUSTER);
        tkt::dispatch(G, opens ? G.openers : G.comm_warps, draws, until);
#else
        tkt::push(G, communicates ? static_cast<int>(blockIdx.x) - G.num_comp_blocks : -1, draws);
#endif
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
        tkt::grouped_gemm<config>(G.gemm, gate{G}, tkt::no_epilogue{}, unit,
                                  G.num_comp_blocks / config::CLUSTER);
    // Warps that the GEMM has no role for bring rows meanwhile.
    if constexpr (kBesideWarps > 0) {
        if ((G.roles & tkt::kCommunicate) && !communicates)
            tkt::dispatch_beside(G, tkt::warp_id() - (geo::kProducer + 2), sizeof(tkt::shared_storage<config>));
    }
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

#if TKT_GLU == 2
extern "C" __global__ void __launch_bounds__(256)
    tktune_dispatch_gemm_glu(const __grid_constant__ tkt::glu_pass_globals G) {
    tkt::glu_pass(G);
}
#endif
