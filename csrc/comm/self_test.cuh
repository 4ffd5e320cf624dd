// What a gang tries before it trusts its peers' memory: every pair of ranks pushes patterns with bulk stores, reads
// them back with bulk loads, and checks that whoever sees the flag also sees the data; all pairs at once.
#pragma once

#include "signals.cuh"

namespace tkt {

// Where things lie in a rank's symmetric memory; the host mirrors it (tktune/families/cuda/symmetric.py).
struct symmetric_layout {
    static constexpr int kMeeting = 0, kFlags = 1024, kAcknowledged = 2048;  // 8 words each, one a source rank
    static constexpr int kInbox = 4096, kInboxBytes = 16384;                 // one a source rank
    static constexpr int kHeaderBytes = 262144;                              // token rows follow
    static_assert(kInbox + TKT_MAX_WORLD * kInboxBytes <= kHeaderBytes);
};

template <int WORLD>
struct self_test_globals {
    char* memory[WORLD];  // each rank's symmetric memory
    int32_t* errors;      // 2 words: read back wrong, arrived wrong
    uint64_t first;       // sequence numbers are first + 1 …; grows from call to call
    spin_guard guard;
    int32_t rounds;
    int32_t unused;
};

// Block p deals with rank p. Threads: any multiple of 32; shared memory: two inboxes and a semaphore.
template <int WORLD>
TKT_DEVICE void self_test(const self_test_globals<WORLD>& G) {
    using at = symmetric_layout;
    constexpr int kWords = at::kInboxBytes / 4;
    extern __shared__ __align__(1024) char shared_memory[];
    uint32_t* const outgoing = reinterpret_cast<uint32_t*>(shared_memory);
    volatile uint32_t* const returned = reinterpret_cast<volatile uint32_t*>(shared_memory + at::kInboxBytes);
    semaphore& landed = *reinterpret_cast<semaphore*>(shared_memory + 2 * at::kInboxBytes);
    const int me = G.guard.rank, peer = blockIdx.x;
    char* const mine = G.memory[me];
    char* const theirs = G.memory[peer];
    char* const inbox = theirs + at::kInbox + me * at::kInboxBytes;
    const auto word = [](char* memory, int base, int rank) { return reinterpret_cast<uint64_t*>(memory + base) + rank; };
    const auto pattern = [](int from, int to, uint32_t round, uint32_t i) {
        return (i * 2654435761u) ^ (round * 40503u) ^ (from << 28) ^ (to << 24);
    };
    const bool leader = threadIdx.x == 0;
    if (leader) {
        init_semaphore(landed, 1);
        publish_semaphores();
    }
    __syncthreads();

    for (int round = 0; round < G.rounds; ++round) {
        const uint64_t sequence = G.first + round + 1;
        const uint32_t number = static_cast<uint32_t>(sequence);
        for (int i = threadIdx.x; i < kWords; i += blockDim.x) outgoing[i] = pattern(me, peer, number, i);
        fence_async_shared();
        __syncthreads();
        if (leader) {
            await(G.guard, peer, word(mine, at::kAcknowledged, peer), sequence - 1);
            tma::store_bytes(inbox, outgoing, at::kInboxBytes);
            tma::commit();
            tma::store_async_wait<0>();
            announce(word(theirs, at::kFlags, me), sequence);
            tma::expect_bytes(landed, at::kInboxBytes);
            tma::load_bytes(shared_memory + at::kInboxBytes, inbox, at::kInboxBytes, landed);
        }
        __syncthreads();
        wait<wait_role::communicate, wait_word::stage_full>(landed, round & 1, G.guard);
        int wrong = 0;
        for (int i = threadIdx.x; i < kWords; i += blockDim.x) wrong += returned[i] != pattern(me, peer, number, i);
        if (wrong) atomicAdd(G.errors, wrong);

        if (leader) await(G.guard, peer, word(mine, at::kFlags, peer), sequence);
        __syncthreads();
        const volatile uint32_t* arrived =
            reinterpret_cast<const volatile uint32_t*>(mine + at::kInbox + peer * at::kInboxBytes);
        wrong = 0;
        for (int i = threadIdx.x; i < kWords; i += blockDim.x) wrong += arrived[i] != pattern(peer, me, number, i);
        if (wrong) atomicAdd(G.errors + 1, wrong);
        fence_async_shared();  // the next round's load overwrites what was just read
        __syncthreads();
        if (leader) announce(word(theirs, at::kAcknowledged, me), sequence);
    }
}

}  // namespace tkt
