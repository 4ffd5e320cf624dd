// The smallest dispatch: a rank says that its rows are ready, waits until its peer's are, fetches them, says that it has
// read them, and waits until its own were read. And the ways in which a rank can misbehave in it.
#include "comm/signals.cuh"

namespace {

enum behaviour : int32_t { kGood, kSilent, kStale, kKeepsReading, kTraps, kWild };

struct globals {
    const volatile int32_t* peer_rows;  // in the peer's memory
    int32_t* gathered;                  // own
    uint64_t* words;                    // own; written by the peer: its rows are ready, it has read ours
    uint64_t* peer_words;
    uint64_t sequence;
    tkt::spin_guard guard;
    int32_t count;
    int32_t behaves;
};

}  // namespace

extern "C" __device__ int32_t tktune_bad_dispatch_facts[4] = {0, 128, sizeof(globals), 1};

extern "C" __global__ void __launch_bounds__(128, 1) tktune_bad_dispatch(const __grid_constant__ globals G) {
    __shared__ bool goes_on;
    if (G.behaves == kSilent) return;  // it has nothing to say, and takes nothing
    if (G.behaves == kTraps) __trap();
    const int peer = 1 - G.guard.rank;
    const auto meet = [&](int word, uint64_t sequence) {
        __syncthreads();
        if (threadIdx.x == 0) {
            tkt::announce(G.peer_words + word, sequence);
            goes_on = tkt::await(G.guard, 10 * peer + word, G.words + word, G.sequence);
        }
        __syncthreads();
        return goes_on;
    };
    if (!meet(0, G.sequence - (G.behaves == kStale))) return;
    const int64_t beyond = G.behaves == kWild ? int64_t{1} << 44 : 0;
    for (int i = threadIdx.x; i < G.count; i += blockDim.x) G.gathered[i] = G.peer_rows[i + beyond];
    if (G.behaves == kKeepsReading) {  // until the launch is aborted, or its time is up
        const uint32_t start = tkt::kilo_nanoseconds();
        while (tkt::kilo_nanoseconds() - start < G.guard.limit_kilo_ns && !(G.guard.abort_word && *G.guard.abort_word))
            for (int i = threadIdx.x; i < G.count; i += blockDim.x) G.gathered[i] = G.peer_rows[i];
    }
    meet(1, G.sequence);
}
