// The final reduce: warps add the partial rows of own tokens, in rank order, once the ranks that owe them have said that
// they are there. It waits for the sums of all ranks, which wait for tiles only.
#pragma once

#include "combine.cuh"

namespace tkt {

// By warps that sum, after their jobs. `whole`: ranks whose watermark was seen.
template <typename Globals>
TKT_DEVICE void reduce(const Globals& G) {
    constexpr uint32_t kAll = 0xffffffffu;
    constexpr int kBatch = 4;
    const uint64_t epoch = *G.sequence;
    const int me = G.gemm.guard.rank, vectors = G.gemm.cols / kVectorCols, rank = lane_id();
    const bf16* staging = G.staging[me].data;
    uint32_t whole = 0;
    for (;;) {
        int token = 0;
        if (lane_id() == 0) token = atomicAdd(G.queue + kNextToken, 1);
        token = __shfl_sync(kAll, token, 0);
        if (token >= G.tokens) return;
        const bool owes = rank < Globals::world &&
                          __ldg(G.final_contrib + static_cast<int64_t>(token) * Globals::world + rank);
        const uint32_t owed = __ballot_sync(kAll, owes);
        bool there = true;
        if (owes && !(whole >> rank & 1)) {
            const uint64_t* word = G.watermarks[me] + rank;
            there = spin_until<wait_role::reduce, wait_word::watermark, 64>(
                G.gemm.guard, rank, static_cast<int64_t>(epoch), [&] { return look_at_peers(word) >= epoch; },
                [&] { return static_cast<int64_t>(look_at_peers(word)); });
        }
        if (!__all_sync(kAll, there)) return;  // told to abort
        __syncwarp();
        whole |= owed;
        uint4* to = reinterpret_cast<uint4*>(G.y + static_cast<int64_t>(token) * G.gemm.cols);
        for (int base = lane_id(); base - lane_id() < vectors; base += 32 * kBatch) {
            float total[kBatch][kVectorCols] = {};
#pragma unroll 1
            for (uint32_t left = owed; left; left &= left - 1) {
                const int64_t row = static_cast<int64_t>(__ffs(left) - 1) * G.tokens + token;
                const uint4* from = reinterpret_cast<const uint4*>(staging + row * G.gemm.cols);
                uint4 got[kBatch];
#pragma unroll
                for (int b = 0; b < kBatch; ++b)
                    got[b] = base + 32 * b < vectors ? __ldcg(from + base + 32 * b) : uint4{};
#pragma unroll
                for (int b = 0; b < kBatch; ++b) add_weighted(total[b], 1.0f, got[b]);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b)
                if (base + 32 * b < vectors) to[base + 32 * b] = rounded(total[b]);
        }
    }
}

// Every warp that sums comes here, in blocks whose memory no GEMM uses any more.
template <typename Globals>
TKT_DEVICE void combine(const Globals& G) {
    extern __shared__ __align__(1024) char shared_memory[];
    combine_warp<Globals> warp(G, shared_memory);
    if (G.form == TKT_FORM_PULL) {
        warp.run_pull();
        return;
    }
    if (!warp.run_push()) return;
    if (static_cast<int>(blockIdx.x) >= static_cast<int>(gridDim.x) - G.num_reduce_blocks) reduce(G);
}

}  // namespace tkt
