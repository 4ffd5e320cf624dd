// What several warps do together: which 16-row strips each one owns, and collective stores to global memory.
#pragma once

#include "gl.cuh"
#include "mma.cuh"

namespace tkt {

// The one row-strip permutation: of WARPS warps that share a tile, warp `w` owns strip `row_strip<WARPS>(w)`, for
// loads and stores alike. Any permutation works as long as both sides ask here. Four neighbouring strips belong to
// warps of all four sub-partitions, so that a tile of few rows still feeds every tensor core; an interleaved map
// (w / 4 + w % 4 * WARPS / 4) would leave half of them idle.
template <int WARPS>
TKT_DEVICE constexpr int row_strip(int w) {
    return w;
}

template <int WARPS>
struct group {
    static constexpr int kThreads = WARPS * kWarpThreads;

    static TKT_DEVICE int warp() { return warp_id() % WARPS; }

    // A collective store of WARPS register tiles, one strip each, as one (WARPS · ROWS) × COLS tile at `at`.
    template <int ROWS, int COLS>
    static TKT_DEVICE void store(const gl<bf16>& to, const rt_fl<ROWS, COLS>& from, coord at) {
        const int lane = lane_id();
        const int top = at.row + row_strip<WARPS>(warp()) * ROWS + lane / 4;
#pragma unroll
        for (int r = 0; r < ROWS / 16; ++r)
#pragma unroll
            for (int c = 0; c < COLS / 8; ++c) {
                const int row = top + 16 * r, col = at.col + 8 * c + 2 * (lane % 4);
                const float(&v)[4] = from.v[r][c];
                *reinterpret_cast<uint32_t*>(to.at(row, col)) = pack_bf16(v[0], v[1]);
                *reinterpret_cast<uint32_t*>(to.at(row + 8, col)) = pack_bf16(v[2], v[3]);
            }
    }
};

}  // namespace tkt
