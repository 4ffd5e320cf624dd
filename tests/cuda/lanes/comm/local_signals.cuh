// Words of one GPU, of csrc/comm/signals.cuh, for lanes on the CPU.
#pragma once

#include "../gemm/grouped_gemm.cuh"

namespace tkt {

inline void (*on_arrival)(int32_t* word) = nullptr;

inline int32_t look(const int32_t* word) { return *word; }
inline void add_release(int32_t* word, int32_t value) {
    lanes::yield();
    *word += value;
    on_arrival(word);
}
inline int32_t add_acquire_release(int32_t* word, int32_t value) { return atomicAdd(word, value); }
inline void prefetch(const void*) {}

}  // namespace tkt
