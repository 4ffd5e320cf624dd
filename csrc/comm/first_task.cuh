// What a compute block will begin with, for `openers`: a launch word that probes set and the family's space has not. No task is
// drawn to know it: the first one of a block is that of its own number.
#pragma once

#include "dispatch.cuh"

namespace tkt {

// By whole warps. The pad blocks of the first tile of unit `unit` of `num_units`; none where it has no task.
template <typename Config>
TKT_DEVICE pad_blocks first_blocks(const gemm_globals<Config>& G, int unit, int num_units) {
    task_order<Config> order(G, unit, num_units);
    const task t = order.next(Config::CLUSTER > 1 ? cluster_rank() : 0);
    const int first = t.row / G.pad;
    return pad_blocks{first, t.height > 0 ? ceil_div<int>(t.row + t.height, G.pad) - first : 0};
}

}  // namespace tkt
