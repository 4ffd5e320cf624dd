// Stands in for csrc/comm/combine_signals.cuh and signals.cuh: every access is a point where others may run.
#pragma once

#include "../gemm/grouped_gemm.cuh"

namespace tkt {

inline int32_t add_acquire_release(int32_t* word, int32_t value) {
    lanes::now->fenced_words = false;  // what this has seen needs a fence before peers are told of it
    lanes::yield();
    const int32_t before = *word;
    *word += value;
    return before;
}
inline int32_t draw(int32_t* word) {
    lanes::yield();
    return (*word)++;
}
inline uint64_t look_at_peers(const uint64_t* word) {
    lanes::yield();
    return *word;
}
inline uint64_t look(const uint64_t* word) { return look_at_peers(word); }
inline void announce(uint64_t* word, uint64_t sequence) {
    lanes::yield();
    if (*word >= sequence) lanes::fail("a word was announced twice");
    *word = sequence;
}
inline void announce_here(uint64_t* word, uint64_t sequence) { announce(word, sequence); }
inline void fence_system() { lanes::now->fenced_words = true; }
inline void announce_fenced(uint64_t* word, uint64_t sequence) {
    if (!lanes::now->fenced_words) lanes::fail("a peer's word was written without a fence");
    announce(word, sequence);
}

template <wait_role ROLE, wait_word WORD, int PAUSE, typename Ready, typename Seen>
bool spin_until(const spin_guard&, int, int64_t, Ready ready, Seen) {
    while (!ready()) lanes::yield();
    return true;
}

}  // namespace tkt
