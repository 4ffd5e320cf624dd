// The empty hooks of a GEMM that runs alone. A fusion replaces them; the GEMM body stays as it is.
#pragma once

#include "../tile/rt.cuh"

namespace tkt {

// Called by one thread before a tile's first load, for each pad block that the tile overlaps; returns when those rows
// may be read by TMA (an acquire, then `fence_async`). What opens it must not depend on earlier tiles of this block:
// those may still be computed, by the very warp that waits.
struct no_gate {
    TKT_DEVICE void operator()(int pad_block) const {}
};

// Where rows are indexed, the gate also says which row of `activations` a slot is: `look_up` asks, `row_of` reads the
// answer, so that nothing waits in between; padding gets any row that is there. After the gate's acquire, rows are read
// by ordinary copies, so no proxy fence is needed. `waits` is false where every row is there from the start. A gate that
// has a type `whole_warp` is called by all lanes of one warp, so that each may look at a word of its own.
struct table_gate {
    const int32_t* rows;  // (capacity); -1 on padding
    using entry = int32_t;
    TKT_DEVICE entry look_up(int slot) const { return __ldg(rows + slot); }
    TKT_DEVICE int row_of(entry found) const { return max(found, 0); }
    TKT_DEVICE bool waits() const { return false; }
    TKT_DEVICE void operator()(int pad_block) const {}
};

// Called by one thread of a block, always the same, for each tile and each pad block that the tile overlaps, when the
// tile's writes are performed for this thread: its release at a wider scope publishes them. Possibly one tile late,
// never after the block ends. So a pad block is announced once for each row tile that overlaps it and each column
// block; rows beyond an expert's last piece of 64 are never announced.
struct no_epilogue {
    TKT_DEVICE void operator()(int pad_block, int col_block) const {}
};

// Makes of the fp32 accumulators of a register tile what is rounded and stored; never communicates. kFold columns of the
// accumulators become one of the output (glu.cuh: two); `piece` gives 16 × 8 of those, four values a lane.
struct no_finish : as_they_are {
    static constexpr int kFold = 1;
};

}  // namespace tkt
