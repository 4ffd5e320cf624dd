// How a thread waits: for a word to grow, bounded by the abort word and the spin limit, with a report of what it
// saw when it gives up. Semaphores with phases live here too. Nothing here knows of blocks' work.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "../abi.h"

namespace tkt {

using globals = tkt_globals;

inline int64_t clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

inline void pause_once() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

inline void sleep_ns(int64_t ns) {
    const timespec time{0, long(ns)};
    nanosleep(&time, nullptr);
}

// Sleeps while `word` still holds `seen`, at most `ns`. Private to the process.
inline void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
    const timespec time{0, long(ns)};
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, ns ? &time : nullptr, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// What all threads of one launch share: its arguments, and whether and why it must stop.
struct Launch {
    globals G;
    tkt_machine machine;
    std::atomic<int32_t> end{TKT_DONE};

    // True once the launch must be left: a wait gave up, or the abort word is set.
    bool stopped() {
        if (end.load(std::memory_order_relaxed) != TKT_DONE) return true;
        if (machine.abort_word && __atomic_load_n(machine.abort_word, __ATOMIC_RELAXED)) {
            stop(TKT_ABORTED);
            return true;
        }
        return false;
    }

    // The first reason to stop wins; returns whether this one did.
    bool stop(int32_t reason) {
        int32_t none = TKT_DONE;
        return end.compare_exchange_strong(none, reason);
    }
};

// One thread of a block: a consumer when index < CONSUMER_WARPS, else the block's producer.
struct Warp {
    Launch& launch;
    int block;
    int index;
    const char* role;
};

inline void report_spin(const Warp& warp, const char* word, int index, int64_t expected, int64_t seen) {
    tkt_spin_report* report = warp.launch.machine.report;
    if (!report) return;
    report->rank = warp.launch.G.rank;
    report->block = warp.block;
    strncpy(report->role, warp.role, sizeof report->role - 1);
    strncpy(report->word, word, sizeof report->word - 1);
    report->index = index;
    report->expected = expected;
    report->seen = seen;
    __atomic_store_n(&report->set, 1, __ATOMIC_RELEASE);
}

// Which words a wait polls. `root`: supplied by another block or rank, bounded by the spin limit. `inner`: supplied
// by a thread of the same block, which may itself be in a root wait; four times the limit, so that the root reports.
enum class Bound { root, inner };

constexpr int YIELDS = 8;
constexpr int64_t LONGEST_SLEEP_NS = 100000;

// Waits until `read()` >= expected: pauses, then yields, then lets `sleep(seen, ns)` sleep at most ns.
// Returns false when the launch must stop; the wait that ran out of its limit writes the report.
template <typename Read, typename Sleep>
bool wait_until(const Warp& warp, const char* word, int index, int64_t expected, Bound bound, const Read& read,
                const Sleep& sleep) {
    if (read() >= expected) [[likely]]
        return true;
    for (int i = warp.launch.G.backoff; i > 0; --i) {
        pause_once();
        if (read() >= expected) return true;
    }
    const int64_t limit = warp.launch.machine.spin_limit_ns * (bound == Bound::root ? 1 : 4);
    const int64_t begin = clock_ns(CLOCK_MONOTONIC);
    int64_t nap = 2000;
    for (int i = 0;; ++i) {
        if (warp.launch.stopped()) return false;
        if (i < YIELDS) {
            sched_yield();
        } else {
            sleep(nap);
            nap = nap * 2 < LONGEST_SLEEP_NS ? nap * 2 : LONGEST_SLEEP_NS;
        }
        const int64_t seen = read();
        if (seen >= expected) return true;
        if (clock_ns(CLOCK_MONOTONIC) - begin > limit) {
            if (warp.launch.stop(TKT_SPIN_LIMIT)) report_spin(warp, word, index, expected, seen);
            return false;
        }
    }
}

// Waits for a word that another block or another process only ever raises.
template <typename Word>
bool wait_word(const Warp& warp, const char* name, int index, const Word* word, int64_t expected) {
    return wait_until(
        warp, name, index, expected, Bound::root,
        [&] { return int64_t(__atomic_load_n(word, __ATOMIC_ACQUIRE)); }, [](int64_t ns) { sleep_ns(ns); });
}

// An mbarrier between the threads of one block: `count` arrivals complete a phase. Phases are counted, never reset
// within a block's life, so a late reader cannot miss one.
struct alignas(64) semaphore {
    std::atomic<uint32_t> phase;
    std::atomic<uint32_t> pending;
    std::atomic<uint32_t> sleepers;
    uint32_t count;
};

inline void init_semaphore(semaphore& bar, int count) {
    bar.phase.store(0, std::memory_order_relaxed);
    bar.pending.store(count, std::memory_order_relaxed);
    bar.sleepers.store(0, std::memory_order_relaxed);
    bar.count = count;
}

inline void arrive(semaphore& bar) {
    if (bar.pending.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    bar.pending.store(bar.count, std::memory_order_relaxed);
    bar.phase.fetch_add(1, std::memory_order_seq_cst);
    if (bar.sleepers.load(std::memory_order_seq_cst)) futex_wake(bar.phase);
}

// Sleeps on the phase word; an arrival that completes the phase ends the sleep early.
inline void sleep_on(semaphore& bar, int64_t phases, int64_t ns) {
    bar.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = bar.phase.load(std::memory_order_seq_cst);
    if (seen < phases) futex_sleep(bar.phase, seen, ns);
    bar.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

// Waits until `phases` phases have completed.
inline bool wait(const Warp& warp, semaphore& bar, int64_t phases, const char* word, int index) {
    return wait_until(
        warp, word, index, phases, Bound::inner,
        [&] { return int64_t(bar.phase.load(std::memory_order_acquire)); },
        [&](int64_t ns) { sleep_on(bar, phases, ns * 8); });
}

// Meets all ranks at `sequence`: writes this rank's word on every rank, then waits for every word here.
inline bool device_barrier(const Warp& warp, uint64_t sequence) {
    const globals& G = warp.launch.G;
    for (int r = 0; r < G.world; ++r) __atomic_store_n(&G.barrier[r][G.rank], sequence, __ATOMIC_RELEASE);
    for (int r = 0; r < G.world; ++r)
        if (!wait_word(warp, "barrier", r, &G.barrier[G.rank][r], int64_t(sequence))) return false;
    return true;
}

}  // namespace tkt
