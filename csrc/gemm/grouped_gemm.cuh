// The grouped GEMM template: rows grouped by expert times each expert's matrix, by persistent blocks, with two
// hooks. It knows nothing of communication; a fusion is what its hooks do.
#pragma once

#include "consume_mma.cuh"
#include "consume_wgmma.cuh"
#include "hooks.cuh"
#include "indexed.cuh"
#include "producer.cuh"

namespace tkt {

template <typename Unit>
TKT_DEVICE int number_of(const Unit& unit) {
    if constexpr (requires { unit(); })
        return unit();
    else
        return unit;
}

// outputs[rows of e] = activations[rows of e] · weights[e], bf16 with fp32 sums. `unit` of `num_units` is this
// block (or this cluster) among those that compute: a number, or what gives it to the warp that walks and so to no
// other role. Every thread of the block calls it; when it returns, the
// thread's role is done, which may be before the others'.
template <typename Config, typename Gate, typename Epilogue, typename Unit>
TKT_DEVICE void grouped_gemm(const gemm_globals<Config>& G, const Gate& gate, const Epilogue& epilogue, const Unit& unit,
                             int num_units) {
    using geo = geometry<Config>;
    using storage = shared_storage<Config>;
    using layout = gemm_globals_layout;
    static_assert(sizeof(gemm_globals<Config>) == layout::kBytes);
    static_assert(__builtin_offsetof(gemm_globals<Config>, walk) == layout::kWalk);
    static_assert(__builtin_offsetof(gemm_globals<Config>, guard) == layout::kGuard);
    static_assert(__builtin_offsetof(gemm_globals<Config>, raster_rows) == layout::kRasterRows);

    extern __shared__ __align__(1024) char shared_memory[];
    // The address of shared memory depends on the block's place in a cluster; where registers are few the compiler
    // would make it anew in the middle of the main loop.
    const uint32_t start = shared_address(shared_memory);
    storage& smem = *reinterpret_cast<storage*>(geo::kWgmma ? shared_memory
                                                            : __cvta_shared_to_generic(opaque(start)));
    const int warp = warp_id();

    if constexpr (geo::kWgmma) {
        // The consumers' branch comes first: ptxas then lets it use what setmaxnreg grants, else it may spill.
        if (warp < Config::CONSUMER_WARPS) {
            take_registers<Config::CONSUMER_REGISTERS>();
            begin_roles(smem);
            wgmma_consumer<Config>::run(G, smem, warp / 4);
        } else {
            give_registers<Config::PRODUCER_REGISTERS>();
            if (warp == Config::CONSUMER_WARPS) {
                if constexpr (geo::kIndexed)
                    indexed_walker<Config>::run(G, smem, number_of(unit), num_units);
                else
                    producer<Config>::run(G, smem, gate, number_of(unit), num_units);
            } else if (geo::kIndexed && warp >= geo::kThreads / kWarpThreads - geo::kLoaderWarps) {
                const int part = warp - (geo::kThreads / kWarpThreads - geo::kLoaderWarps);
                if constexpr (geo::kIndexed) indexed_loader<Config, Gate>(G, smem, gate, part).run();
            } else {
                begin_roles(smem);
                if (warp == Config::CONSUMER_WARPS + 1 && lane_id() == 0)
                    wgmma_storer<Config>::run(G, smem, epilogue);
                __syncwarp();
            }
        }
    } else if constexpr (geo::kFedByConsumer) {
        begin_roles(smem);
        mma_consumer<Config>::run_and_feed(G, smem, gate, epilogue, number_of(unit), num_units);
    } else {
        if (warp == Config::CONSUMER_WARPS) {
            producer<Config>::run(G, smem, gate, number_of(unit), num_units);
        } else {
            begin_roles(smem);
            mma_consumer<Config>::run(G, smem, epilogue);
        }
    }
    // A block of a cluster must not leave while its peer still signals into its shared memory.
    if constexpr (Config::CLUSTER > 1) cluster_sync();
}

}  // namespace tkt
