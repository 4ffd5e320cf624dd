// mbarrier semaphores in shared memory: what TMA loads complete on and what frees a pipeline slot.
#pragma once

#include "spin.cuh"

namespace tkt {

struct semaphore {
    uint64_t word;
};

TKT_DEVICE void init_semaphore(semaphore& sem, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&sem)), "r"(arrivals) : "memory");
}

// Makes freshly initialised semaphores visible to the async proxy and to the other block of a cluster.
TKT_DEVICE void publish_semaphores() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

TKT_DEVICE bool try_wait(const semaphore& sem, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(&sem)), "r"(phase)
        : "memory");
    return done;
}

// Does not wait: a look ahead of time, so that the answer is there when it is needed.
TKT_DEVICE bool test_wait(const semaphore& sem, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(&sem)), "r"(phase)
        : "memory");
    return done;
}

// Bounded like every spin, but four times later: inside a block everyone ends up waiting for whoever waits at a
// gate, and the report must name the gate. No abort here: it ends the gate's wait, and so this one.
template <wait_role ROLE, wait_word WORD>
TKT_DEVICE void wait(const semaphore& sem, uint32_t phase, const spin_guard& guard) {
    if (try_wait(sem, phase)) return;
    const uint32_t start = kilo_nanoseconds();
    bool done;
    do {
        done = try_wait(sem, phase);
    } while (!done && (kilo_nanoseconds() - start) / 4 <= guard.limit_kilo_ns);
    if (!done) {  // outside the loop, and opaque: nothing of the report may be prepared on the fast path
        const uint32_t expected = opaque(phase);
        detail::give_up<ROLE, WORD>(guard, shared_address(&sem), expected, expected ^ 1);
    }
}

TKT_DEVICE void arrive(semaphore& sem) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&sem)) : "memory");
}

// Arrives on the same semaphore of block `rank` of the cluster (this block's own rank included). Relaxed: for
// readers that give a slot back and have nothing to publish; a release at cluster scope would drain all memory
// traffic of the thread, twice the cost of a pipeline step.
TKT_DEVICE void arrive_at(const semaphore& sem, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(&sem)),
        "r"(rank)
        : "memory");
}

namespace tma {

// Arrives and announces how many bytes must land before this phase completes.
TKT_DEVICE void expect_bytes(semaphore& sem, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&sem)),
                 "r"(bytes)
                 : "memory");
}

}  // namespace tma
}  // namespace tkt
