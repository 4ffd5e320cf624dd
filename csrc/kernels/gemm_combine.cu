// The gemm_combine family: expert rows are multiplied, and those that have landed are already summed, weighted, into
// tokens and brought to the tokens' ranks while the GEMM still runs. One artifact serves every split of the blocks,
// form, order of the jobs and mode of measuring.
//
//   define        default  values    meaning
//   TKT_WORLD     2        1 .. 8    ranks
//   the GEMM's defines: csrc/kernels/grouped_gemm.cu. The epilogue lives in the storer, a producer warp, so wgmma roles
//   of up to eight consumer warps share their registers 56 to 224.
//
// Entries, arguments by value:
//   tktune_gemm_combine            combine_globals; grid = SMs in whole clusters, all resident (one block an SM),
//                                  block = 32 × (consumer warps + 4, or + 1 with mma.sync); dynamic shared memory = the
//                                  fact below. 1024 bytes and, for each of the third of the words below, warp_slots + 2
//                                  pieces of 512 · piece_vectors bytes fit the second of them; piece_vectors is at most
//                                  the fourth, half of it for pulls; N is a multiple of 8 · groups, and of
//                                  COL_BLOCK · groups where groups > 1; top_k at most 32
//   tktune_gemm_combine_meet       meeting; one warp, before each launch: all ranks are done with the launch before
//   tktune_gemm_combine_self_test  self_test_globals; one block a rank
//   tktune_dispatch_plan, tktune_combine_plan   the tables: dispatch_plan.cu, combine_plan.cu
#ifndef TKT_WORLD
#define TKT_WORLD 2
#endif
#ifndef TKT_PRODUCER_REGISTERS
#define TKT_PRODUCER_REGISTERS 56
#endif
#ifndef TKT_CONSUMER_REGISTERS
#define TKT_CONSUMER_REGISTERS (TKT_CONSUMER_WARPS <= 8 ? 224 : 152)
#endif
#include "../comm/combine_stream.cuh"
#include "../comm/self_test.cuh"
#include "../gemm/build_config.cuh"
#include "combine_plan.cu"
#include "dispatch_plan.cu"

using config = tkt::build_config;
using geo = tkt::geometry<config>;
using globals = tkt::combine_globals<config, TKT_WORLD>;
using everyone = tkt::barrier_registry<config::CONSUMER_WARPS, geo::kProducerWarps>::communicators;

static_assert(1 <= TKT_WORLD && TKT_WORLD <= TKT_MAX_WORLD);
static_assert(__builtin_offsetof(globals, plan) == tkt::combine_globals_layout::kPlan);
static_assert(__builtin_offsetof(globals, queue) == tkt::combine_globals_layout::kQueue);
static_assert(__builtin_offsetof(globals, roles) == tkt::combine_globals_layout::kRoles);
static_assert(__builtin_offsetof(globals, landed_stride) == tkt::combine_globals_layout::kLandedStride);
static_assert(__builtin_offsetof(globals, rows) == tkt::combine_globals_layout::kRows);

// Read by the host from the module: shared memory bytes, threads, bytes of the globals, blocks of a cluster.
extern "C" __device__ int32_t tktune_gemm_combine_facts[4] = {sizeof(tkt::shared_storage<config>), geo::kThreads,
                                                              sizeof(globals), config::CLUSTER};
// Ranks, bytes that row pieces may take, warps that have them, vectors of a piece; bytes of the other entries' arguments.
extern "C" __device__ int32_t tktune_gemm_combine_world[6] = {
    TKT_WORLD, tkt::combine_memory<config>::kBytes, tkt::combine_memory<config>::kWarps,
    tkt::combine_memory<config>::kVectors, sizeof(tkt::meeting<TKT_WORLD>), sizeof(tkt::self_test_globals<TKT_WORLD>)};

extern "C" __global__ void __launch_bounds__(geo::kThreads, 1)
#if TKT_CLUSTER > 1
    __cluster_dims__(TKT_CLUSTER, 1, 1)
#endif
        tktune_gemm_combine(const __grid_constant__ globals G) {
    // Asked anew where it is needed: consumers have no register for what outlives their main loop.
    const auto computes = [&G] {
        return static_cast<int>(tkt::opaque(blockIdx.x)) < G.num_comp_blocks && (G.roles & TKT_COMPUTE);
    };
    const auto consumes = [] { return tkt::opaque(threadIdx.x) < tkt::combine_memory<config>::kWarps * 32; };
    if (computes()) {
        tkt::grouped_gemm<config>(G.gemm, tkt::no_gate{}, tkt::combine_epilogue<globals>{G},
                                  [] { return static_cast<int>(blockIdx.x) / config::CLUSTER; },
                                  G.num_comp_blocks / config::CLUSTER);
        everyone::sync();  // row pieces overlay the stages and the output slots, which all roles have left
        if constexpr (geo::kWgmma)
            if (consumes()) tkt::give_registers<config::CONSUMER_REGISTERS - 8>();
    } else if constexpr (geo::kWgmma) {
        if (!consumes()) tkt::give_registers<config::PRODUCER_REGISTERS>();
    }
    if (consumes()) {
        // Sums stand right behind this instruction, so that ptxas lets them use what it grants: whether the block
        // multiplied before or not, it grants more than the warp has, and the producers have given as much.
        if constexpr (geo::kWgmma) tkt::take_registers<config::CONSUMER_REGISTERS>();
        const bool from_the_start = static_cast<int>(blockIdx.x) >= G.num_comp_blocks;
        if ((G.roles & TKT_COMMUNICATE) && (from_the_start || computes())) tkt::combine(G);
    }
    everyone::sync();
    if (tkt::warp_id() == 0) tkt::leave_combine(G);
}

extern "C" __global__ void __launch_bounds__(32, 1)
    tktune_gemm_combine_meet(const __grid_constant__ tkt::meeting<TKT_WORLD> M) {
    tkt::device_barrier(M);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    tktune_gemm_combine_self_test(const __grid_constant__ tkt::self_test_globals<TKT_WORLD> G) {
    tkt::self_test(G);
}
