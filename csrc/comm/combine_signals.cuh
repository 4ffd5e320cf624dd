// Words that only this GPU writes and reads: sequence words, wider than arrival counters, cheaper than words of peers;
// and numbers that are drawn.
#pragma once

#include "signals.cuh"

namespace tkt {

TKT_DEVICE void announce_here(uint64_t* word, uint64_t sequence) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(sequence)
                 : "memory");
}

// The next number of `word`. Not an addition: the compiler shuffles that one's answer to the lanes at once, and so waits
// for it where it is asked for.
TKT_DEVICE int32_t draw(int32_t* word) {
    int32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(word))
                 : "memory");
    return before;
}

}  // namespace tkt
