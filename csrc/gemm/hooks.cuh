// The empty hooks of a GEMM that runs alone. A fusion replaces them; the GEMM body stays as it is.
#pragma once

#include "../tile/base.cuh"

namespace tkt {

// Called by one thread before a block's first load of a pad block's rows; returns when they may be read by TMA.
struct no_gate {
    TKT_DEVICE void operator()(int pad_block) const {}
};

// Called by one thread, once for each tile it stored, when the tile's writes are performed; possibly one tile
// late, never after the block ends. Tiles without real rows are not computed and not announced.
struct no_epilogue {
    TKT_DEVICE void operator()(int pad_block, int col_block) const {}
};

// Applied to the fp32 accumulators of a register tile before rounding; never communicates.
struct no_finish {
    template <typename Acc>
    static TKT_DEVICE void apply(Acc& acc) {}
};

}  // namespace tkt
