// What the combine roles share: the epilogue that announces landed rows, weighted sums in registers, and the tail of a
// launch. Nobody here waits.
#pragma once

#include "combine_config.cuh"
#include "combine_signals.cuh"

namespace tkt {

// Hook 2. Whoever completes the last tile of a run of columns of a pad block is elected to announce it, and among those
// whoever completes the last block announces the whole run. Each tile's stores are performed before it is counted, and
// all counts happen before the announcement.
template <typename Globals>
struct combine_epilogue {
    using config = typename Globals::config;
    using geo = geometry<config>;
    const Globals& G;

    // Row tiles that overlap a pad block: an expert's pieces are dealt evenly over its tiles.
    TKT_DEVICE int row_tiles(int pad_block) const {
        const int2 expert = __ldg(G.experts + __ldg(G.block_expert + pad_block));
        const int pieces = ceil_div(expert.y, geo::kPieceRows);
        const int begin = (pad_block * G.gemm.pad - expert.x) / geo::kPieceRows;
        const int end = min(begin + G.gemm.pad / geo::kPieceRows, pieces);
        const typename task_order<config>::tiling t(pieces);
        return tile_of(t, end - 1) - tile_of(t, begin) + 1;
    }
    static TKT_DEVICE int tile_of(const typename task_order<config>::tiling& t, int piece) {
        const int tall_pieces = t.tall * (t.low_pieces + 1);
        return piece < tall_pieces ? piece / (t.low_pieces + 1) : t.tall + (piece - tall_pieces) / t.low_pieces;
    }

    TKT_DEVICE void operator()(int pad_block, int col_block) const {
        if (!(G.roles & TKT_GATED)) return;
        const int tiles = ceil_div<int>(G.gemm.cols, config::COL_BLOCK) / G.groups, group = col_block / tiles;
        const int word = pad_block * G.groups + group;
        if (add_acquire_release(G.finished + word, 1) != row_tiles(pad_block) * tiles - 1) return;
        const uint64_t epoch = *G.sequence;
        const int me = G.gemm.guard.rank;
        if (G.form == TKT_FORM_PULL) {
            fence_system();
#pragma unroll 1
            for (int r = 0; r < Globals::world; ++r) announce_fenced(G.landed_word(r, me, pad_block, group), epoch);
            return;
        }
        announce_here(G.landed_word(me, me, pad_block, group), epoch);
        const int blocks = __ldg(G.plan + kCombinePlanBlocks);
        if (add_acquire_release(G.finished + blocks * G.groups + group, 1) == blocks - 1)
            announce_here(G.whole_word(me, me, group), epoch);
    }
};

// Eight products more; each one exact or rounded with its addition, in the order of the calls.
TKT_DEVICE void add_weighted(float (&sum)[kVectorCols], float weight, uint4 row) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}
TKT_DEVICE uint4 rounded(const float (&sum)[kVectorCols]) {
    return {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
            pack_bf16(sum[6], sum[7])};
}

// The tail of a launch, by one warp of each block after all of the block's work: the last block out leaves every word
// as this launch found it. Landed words and watermarks stay: they only grow.
template <typename Globals>
TKT_DEVICE void leave_combine(const Globals& G) {
    bool last = false;
    if (lane_id() == 0)
        last = add_acquire_release(G.queue + kCombineBlocksDone, 1) == static_cast<int32_t>(gridDim.x) - 1;
    if (!__shfl_sync(0xffffffffu, last, 0)) return;
    const int words = (__ldg(G.plan + kCombinePlanBlocks) + 1) * G.groups;
    for (int word = lane_id(); word < words; word += kWarpThreads) G.finished[word] = 0;
    for (int word = lane_id(); word < kCombineQueueWords; word += kWarpThreads) G.queue[word] = 0;
}

}  // namespace tkt
