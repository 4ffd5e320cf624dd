// Words that blocks and ranks signal through: adds that release, looks that acquire, and the barrier between ranks.
// A word that a peer writes has one writer and only grows; waits compare with >=.
#pragma once

#include "../tile/tile.cuh"

namespace tkt {

// Within the GPU: arrivals, dispensers, blocks done.
TKT_DEVICE int32_t look(const int32_t* word) {
    int32_t seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(seen)
                 : "l"(__cvta_generic_to_global(word))
                 : "memory");
    return seen;
}
TKT_DEVICE uint64_t look(const uint64_t* word) {
    uint64_t seen;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(seen)
                 : "l"(__cvta_generic_to_global(word))
                 : "memory");
    return seen;
}
TKT_DEVICE void add_release(int32_t* word, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "r"(value)
                 : "memory");
}
// For the last of many, which then acquires by a fence: the others need not.
TKT_DEVICE int32_t fetch_add_release(int32_t* word, int32_t value) {
    int32_t before;
    asm volatile("atom.release.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(word)), "r"(value)
                 : "memory");
    return before;
}
TKT_DEVICE int32_t add_acquire_release(int32_t* word, int32_t value) {
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(word)), "r"(value)
                 : "memory");
    return before;
}

// Bring the line of `address` to L2.
TKT_DEVICE void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

// The semaphore's memory becomes ordinary memory again.
TKT_DEVICE void drop_semaphore(semaphore& sem) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&sem)) : "memory");
}

// Between GPUs: plain stores and loads, no atomics, so that a link without them serves as well.
TKT_DEVICE uint64_t look_at_peers(const uint64_t* word) {
    uint64_t seen;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(seen)
                 : "l"(__cvta_generic_to_global(word))
                 : "memory");
    return seen;
}
// Orders what this thread has seen or done before what it does next, for all GPUs and the host. It takes about 2 us.
TKT_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Behind such a fence as good as `announce`: one fence for many words.
TKT_DEVICE void announce_fenced(uint64_t* word, uint64_t sequence) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(sequence)
                 : "memory");
}

// Everything this thread has seen or done is visible to whoever sees `sequence` there.
TKT_DEVICE void announce(uint64_t* word, uint64_t sequence) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(sequence)
                 : "memory");
}

// Waits until `word`, in this rank's memory, has reached `sequence`. False when the launch was told to abort.
TKT_DEVICE bool await(const spin_guard& guard, int index, const uint64_t* word, uint64_t sequence) {
    return spin_until<wait_role::communicate, wait_word::signal, 64>(
        guard, index, static_cast<int64_t>(sequence), [&] { return look_at_peers(word) >= sequence; },
        [&] { return static_cast<int64_t>(look_at_peers(word)); });
}

// Where all ranks meet. `words[r]` are the barrier words in rank r's symmetric memory: word s is written by rank s
// alone. `sequence` is the number of the last meeting, in this rank's own memory, so that a replayed graph goes on
// counting; the host may raise it between launches, to the same number on every rank.
template <int WORLD>
struct meeting {
    uint64_t* words[WORLD];
    uint64_t* sequence;
    spin_guard guard;
};

// By one whole warp. What any rank did before its meeting is visible to every rank after it.
template <int WORLD>
TKT_DEVICE void device_barrier(const meeting<WORLD>& M) {
    static_assert(WORLD <= kWarpThreads);
    const uint64_t sequence = *M.sequence + 1;
    __syncwarp();
    if (lane_id() < WORLD) {
        announce(M.words[lane_id()] + M.guard.rank, sequence);
        await(M.guard, lane_id(), M.words[M.guard.rank] + lane_id(), sequence);
    }
    __syncwarp();
    if (lane_id() == 0) *M.sequence = sequence;
}

}  // namespace tkt
