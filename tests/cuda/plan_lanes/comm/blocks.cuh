// The meeting of csrc/comm/blocks.cuh, for coroutines on the CPU.
#pragma once

#include "../tile/spin.cuh"

namespace tkt {

inline void blocks_meet(const spin_guard& guard, uint64_t* come, uint64_t all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (++*come > all) lanes::fail("more blocks came than there are");
        spin_until<wait_role::planner, wait_word::blocks, 32>(
            guard, 0, static_cast<int64_t>(all), [&] { return *come >= all; }, [] { return int64_t{0}; });
    }
    __syncthreads();
}

}  // namespace tkt
