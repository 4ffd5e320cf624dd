// What measures a link: blocks that copy rows between memories in the ways that kernels do, and two ranks that echo each
// other's signals, with bounded waits.
#pragma once

#include "probe_bulk.cuh"

namespace tkt {

constexpr int kProbeThreads = 512;
constexpr int kProbeMostUnroll = 8;  // 16-byte loads of a thread in flight

struct echo_globals {
    const uint64_t* mine;  // in this rank's memory, written by the partner alone
    uint64_t* theirs;      // in the partner's memory, written by this rank alone
    uint64_t* sequence;    // the last number of the last echo; the same on both ranks
    spin_guard guard;
    int32_t rounds;
    int32_t opens;         // one of the two announces first
};

// 16 bytes a thread at a time, UNROLL of them in flight at any time: a thread asks for its next piece as soon as it has
// stored one. (Asking for UNROLL and storing UNROLL in turn leaves the link empty for half of each trip.)
template <int UNROLL>
TKT_DEVICE void probe_plain(const probe_globals& G) {
    const uint4* const from = reinterpret_cast<const uint4*>(G.from);
    uint4* const to = reinterpret_cast<uint4*>(G.to);
    const int step = gridDim.x * kProbeThreads;
    int piece = blockIdx.x * kProbeThreads + threadIdx.x;
    if (piece + (UNROLL - 1) * step < G.items) {
        uint4 held[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) held[u] = from[(piece + u * step) & G.from_mask];
        for (; piece + (2 * UNROLL - 1) * step < G.items; piece += UNROLL * step) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                to[(piece + u * step) & G.to_mask] = held[u];
                held[u] = from[(piece + (UNROLL + u) * step) & G.from_mask];
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) to[(piece + u * step) & G.to_mask] = held[u];
        piece += UNROLL * step;
    }
    for (; piece < G.items; piece += step) to[piece & G.to_mask] = from[piece & G.from_mask];
}

// By one thread: `rounds` trips to the partner and back, each with the store and the load that kernels signal with.
TKT_DEVICE void echo(const echo_globals& E) {
    const uint64_t first = *E.sequence;
    for (int round = 1; round <= E.rounds; ++round) {
        if (E.opens) announce(E.theirs, first + round);
        if (!await(E.guard, round, E.mine, first + round)) break;
        if (!E.opens) announce(E.theirs, first + round);
    }
    *E.sequence = first + E.rounds;
}

}  // namespace tkt
