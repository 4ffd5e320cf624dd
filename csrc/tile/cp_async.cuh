// Copies of 16 bytes that each thread asks for itself: from any place in global memory to any place in shared memory,
// past L1. They are ordinary (generic proxy) writes that land late.
#pragma once

#include "base.cuh"

namespace tkt::cp_async {

// L2 fetches whole lines of 128 bytes, which is what a row's part of a stage is.
TKT_DEVICE void copy(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                 : "memory");
}

// One group for everything this thread asked for since the last commit.
TKT_DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// At most PENDING of this thread's groups are still under way; this thread sees what the others wrote.
template <int PENDING>
TKT_DEVICE void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace tkt::cp_async
