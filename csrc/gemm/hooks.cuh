// The empty hooks of a GEMM that runs alone. A fusion replaces them; the GEMM body stays as it is.
#pragma once

#include "../tile/base.cuh"

namespace tkt {

// Called by one thread before a tile's first load, for each pad block that the tile overlaps; returns when those rows
// may be read by TMA (an acquire, then `fence_async`).
struct no_gate {
    TKT_DEVICE void operator()(int pad_block) const {}
};

// Called by one thread, for each tile it stored and each pad block that the tile overlaps, when the tile's writes
// are performed; possibly one tile late, never after the block ends. So a pad block is announced once for each row
// tile that overlaps it and each column block; rows beyond an expert's last piece of 64 are never announced.
struct no_epilogue {
    TKT_DEVICE void operator()(int pad_block, int col_block) const {}
};

// Applied to the fp32 accumulators of a register tile before rounding; never communicates.
struct no_finish {
    template <typename Acc>
    static TKT_DEVICE void apply(Acc& acc) {}
};

}  // namespace tkt
