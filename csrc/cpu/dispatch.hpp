// The dispatch role: pulls the rows this rank wants from their ranks into the gathered buffer and counts arrivals.
// It waits for nothing, so that whoever waits for it is always served. No compute here.
#pragma once

#include "gemm.hpp"

namespace tkt {

constexpr int WAVE_ROWS = 8;  // rows one draw covers; divides every pad

// Waits until every row of a pad block has arrived (padding counts as arrived).
struct dispatch_gate {
    const globals& G;
    const Warp& warp;

    bool operator()(int pad_block) const {
        return wait_word(warp, "arrivals", pad_block, &G.arrivals[pad_block], G.pad);
    }
};

inline void copy_row(const globals& G, int source, int token, int slot) {
    memcpy(G.gathered + int64_t(slot) * G.hidden, G.x[source] + int64_t(token) * G.hidden, size_t(G.hidden) * 2);
}

inline void arrived(const globals& G, int slot, int rows) {
    if (rows) __atomic_fetch_add(&G.arrivals[slot / G.pad], rows, __ATOMIC_RELEASE);
}

inline int next_wave(const globals& G) { return __atomic_fetch_add(&G.dispensers[NEXT_WAVE], 1, __ATOMIC_RELAXED); }

// One pull a slot, in slot order; one arrival count a wave.
inline void pull_by_slot(const globals& G, const Warp& warp) {
    const int slots = G.num_pad_blocks * G.pad;
    for (int first; !warp.launch.stopped() && (first = next_wave(G) * WAVE_ROWS) < slots;) {
        int rows = 0;
        for (int slot = first; slot < first + WAVE_ROWS; ++slot) {
            const int source = G.pull_indices[slot * 2];
            if (source < 0) continue;
            copy_row(G, source, G.pull_indices[slot * 2 + 1], slot);
            ++rows;
        }
        arrived(G, first, rows);
    }
}

// Each token is fetched once and scattered to every local slot that wants it.
inline void pull_by_token(const globals& G, const Warp& warp) {
    const int wave = WAVE_ROWS / G.top_k > 1 ? WAVE_ROWS / G.top_k : 1;
    for (int first; !warp.launch.stopped() && (first = next_wave(G) * wave) < G.num_pull_tokens;) {
        const int last = first + wave < G.num_pull_tokens ? first + wave : G.num_pull_tokens;
        for (int i = first; i < last; ++i) {
            const int source = G.pull_tokens[i * 2], token = G.pull_tokens[i * 2 + 1];
            for (int x = 0; x < G.top_k; ++x) {
                const int slot = G.pull_slots[i * G.top_k + x];
                if (slot < 0) continue;
                copy_row(G, source, token, slot);
                arrived(G, slot, 1);
            }
        }
    }
}

// Every thread of the block pulls until the queue is dry.
inline void dispatch(const globals& G, const Warp& warp) {
    if (G.order == TKT_ORDER_TOKEN)
        pull_by_token(G, warp);
    else
        pull_by_slot(G, warp);
}

}  // namespace tkt
