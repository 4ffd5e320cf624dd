// The pull form: warps of the token's rank sum its rows wherever they are. It waits for tiles of all ranks, which wait
// for nothing.
#pragma once

#include "combine.cuh"

namespace tkt {

template <typename Globals>
struct combine_pull {
    using config = typename Globals::config;
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr int kBatch = geometry<config>::kThreads <= 384 ? 4 : 2;  // vectors of a row and lane under way

    // `width` columns of an own token. Lane x holds the token's x-th row; `slot` is -1 beyond, and where nobody has it.
    struct job {
        int token, group, slot, owner;
        float weight;
    };

    const Globals& G;
    const uint64_t epoch;
    const int me, width;
    int ahead = 0;  // first lane: the next job, drawn while the one before it is summed

    TKT_DEVICE explicit combine_pull(const Globals& G)
        : G(G), epoch(*G.sequence), me(G.gemm.guard.rank), width(G.gemm.cols / G.groups) {}

    TKT_DEVICE void draw_ahead() {
        if (lane_id() == 0) ahead = draw(G.queue + kNextJob);
    }

    // False when no job is left.
    TKT_DEVICE bool take(job& j) {
        const int place = __shfl_sync(kAll, ahead, 0);
        if (place >= __ldg(G.plan + kCombinePlanJobs)) return false;
        draw_ahead();
        const int entry = __ldg(G.jobs + place), x = lane_id();
        j = {entry / G.groups, entry % G.groups, -1, me, 0.0f};
        if (x < G.top_k) {
            const int64_t at = static_cast<int64_t>(j.token) * G.top_k + x;
            j.slot = __ldg(G.slots + at);
            j.owner = __ldg(G.owners + at);
            j.weight = __ldg(G.topk_weights + static_cast<int64_t>(me) * G.tokens * G.top_k + at);
        }
        return true;
    }

    // Every lane waits for the block of its own row; after it, all lanes may read all of them. False on an abort.
    TKT_DEVICE bool wait_landed(const job& j) const {
        bool there = true;
        if ((G.roles & TKT_GATED) && j.slot >= 0) {
            const uint64_t* word = G.landed_word(me, j.owner, j.slot / G.gemm.pad, j.group);
            there = spin_until<wait_role::combine, wait_word::landed, 64>(
                G.gemm.guard, static_cast<int>(word - G.landed[me]), static_cast<int64_t>(epoch),
                [&] { return look_at_peers(word) >= epoch; },
                [&] { return static_cast<int64_t>(look_at_peers(word)); });
        }
        there = __all_sync(kAll, there);
        __syncwarp();
        return there;
    }

    // Adds the rows of the lanes in `mask`, in their order; vectors base + 32 · b + lane of the job's columns.
    TKT_DEVICE void add_rows(const job& j, uint32_t mask, int owner, int base, float (&sum)[kBatch][kVectorCols]) const {
        const bf16* rows = G.rows[owner].data + j.group * width;
        const int vectors = width / kVectorCols;
#pragma unroll 2
        for (uint32_t left = mask; left; left &= left - 1) {
            const int x = __ffs(left) - 1;
            const int64_t row = __shfl_sync(kAll, j.slot, x);
            const float weight = __shfl_sync(kAll, j.weight, x);
            const uint4* from = reinterpret_cast<const uint4*>(rows + row * G.gemm.cols) + base + lane_id();
            uint4 got[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b)  // through L2: the rows were written during this launch
                got[b] = base + 32 * b + lane_id() < vectors ? __ldcg(from + 32 * b) : uint4{};
#pragma unroll
            for (int b = 0; b < kBatch; ++b) add_weighted(sum[b], weight, got[b]);
        }
    }

    // Partial sums are rounded rank by rank as a push would round them, so that both forms give the same bits.
    TKT_DEVICE void run() {
        const int vectors = width / kVectorCols;
        draw_ahead();
        job j;
        while (take(j)) {
            if (!wait_landed(j)) return;
            uint4* to = reinterpret_cast<uint4*>(G.y + static_cast<int64_t>(j.token) * G.gemm.cols + j.group * width) +
                        lane_id();
            for (int base = 0; base < vectors; base += 32 * kBatch) {
                float total[kBatch][kVectorCols] = {};
#pragma unroll 1
                for (int owner = 0; owner < Globals::world; ++owner) {
                    const uint32_t mask = __ballot_sync(kAll, j.slot >= 0 && j.owner == owner);
                    if (!mask) continue;
                    float sum[kBatch][kVectorCols] = {};
                    add_rows(j, mask, owner, base, sum);
#pragma unroll
                    for (int b = 0; b < kBatch; ++b) add_weighted(total[b], 1.0f, rounded(sum[b]));
                }
#pragma unroll
                for (int b = 0; b < kBatch; ++b)
                    if (base + 32 * b + lane_id() < vectors) to[32 * b + base] = rounded(total[b]);
            }
        }
    }
};

}  // namespace tkt
