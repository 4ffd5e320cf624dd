// Sequence words that only this GPU writes and reads: wider than arrival counters, cheaper than words of peers.
#pragma once

#include "signals.cuh"

namespace tkt {

TKT_DEVICE uint64_t look_here(const uint64_t* word) {
    uint64_t seen;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(seen)
                 : "l"(__cvta_generic_to_global(word))
                 : "memory");
    return seen;
}
TKT_DEVICE void announce_here(uint64_t* word, uint64_t sequence) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(sequence)
                 : "memory");
}

}  // namespace tkt
