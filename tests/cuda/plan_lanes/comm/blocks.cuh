// The meeting of csrc/comm/blocks.cuh, for coroutines on the CPU.
#pragma once

#include "../tile/spin.cuh"

namespace tkt {

inline void blocks_meet(const spin_guard&, uint64_t* come, uint64_t all) {
    __syncthreads();
    if (threadIdx.x == 0) {
        if (++*come > all) lanes::fail("more blocks came than there are");
        while (*come < all) lanes::yield();
    }
    __syncthreads();
}

}  // namespace tkt
