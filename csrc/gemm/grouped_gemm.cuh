// The grouped GEMM template: rows grouped by expert times each expert's matrix, by persistent blocks, with two
// hooks. It knows nothing of communication; a fusion is what its hooks do.
#pragma once

#include "consume_mma.cuh"
#include "consume_wgmma.cuh"
#include "hooks.cuh"
#include "producer.cuh"

namespace tkt {

// outputs[rows of e] = activations[rows of e] · weights[e], bf16 with fp32 sums. `unit` of `num_units` is this
// block (or this cluster) among those that compute. Every thread of the block calls it; when it returns, the
// thread's role is done, which may be before the others'.
template <typename Config, typename Gate, typename Epilogue>
TKT_DEVICE void grouped_gemm(const gemm_globals<Config>& G, const Gate& gate, const Epilogue& epilogue, int unit,
                             int num_units) {
    using geo = geometry<Config>;
    using storage = shared_storage<Config>;
    using layout = gemm_globals_layout;
    static_assert(sizeof(gemm_globals<Config>) == layout::kBytes);
    static_assert(__builtin_offsetof(gemm_globals<Config>, walk) == layout::kWalk);
    static_assert(__builtin_offsetof(gemm_globals<Config>, guard) == layout::kGuard);
    static_assert(__builtin_offsetof(gemm_globals<Config>, raster_rows) == layout::kRasterRows);

    extern __shared__ __align__(1024) char shared_memory[];
    storage& smem = *reinterpret_cast<storage*>(shared_memory);
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
                producer<Config>::run(G, smem, gate, unit, num_units);
            } else {
                begin_roles(smem);
                if (warp == Config::CONSUMER_WARPS + 1 && lane_id() == 0)
                    wgmma_storer<Config>::run(G, smem, epilogue);
                __syncwarp();
            }
        }
    } else {
        if (warp == Config::CONSUMER_WARPS) {
            producer<Config>::run(G, smem, gate, unit, num_units);
        } else {
            begin_roles(smem);
            mma_consumer<Config>::run(G, smem, epilogue);
        }
    }
    // A block of a cluster must not leave while its peer still signals into its shared memory.
    if constexpr (Config::CLUSTER > 1) cluster_sync();
}

}  // namespace tkt
