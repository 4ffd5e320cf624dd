// Where all blocks of one launch meet, in a launch whose blocks are all resident. The word only grows, by the grid in
// every launch, so that replays go on counting.
#pragma once

#include "signals.cuh"

namespace tkt {

TKT_DEVICE uint64_t add_acquire_release(uint64_t* word, uint64_t value) {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(word)), "l"(value)
                 : "memory");
    return before;
}

// By every thread of every block; `all` is what `come` reads when every block of this launch has come. What any thread
// wrote before is visible to all of them after, through L2 (`__ldcg`). Goes on without the others only when the launch
// was told to abort.
TKT_DEVICE void blocks_meet(const spin_guard& guard, uint64_t* come, uint64_t all) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        add_acquire_release(come, 1);
        spin_until<wait_role::planner, wait_word::blocks, 32>(
            guard, 0, static_cast<int64_t>(all), [&] { return look(come) >= all; },
            [&] { return static_cast<int64_t>(look(come)); });
    }
    __syncthreads();
}

}  // namespace tkt
