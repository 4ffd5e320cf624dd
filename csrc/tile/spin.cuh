// Bounded waiting: every spin of every kernel ends by itself, and says who waited for what before it traps.
#pragma once

#include "../abi.h"
#include "base.cuh"

namespace tkt {

// Travels by value in the globals. `report` is mapped host memory: after a trap device memory cannot be read.
struct spin_guard {
    tkt_spin_report* report;               // may be null
    const volatile uint32_t* abort_word;   // mapped host memory, may be null; non-zero: stop waiting and finish
    uint32_t limit_kilo_ns;                // units of 1024 ns; 2 s by default
    int32_t rank;
};

// One report a module: the first wait that gives up keeps it. Never reset, since a trap ends the context.
static __device__ int32_t spin_claimed = 0;

enum class wait_role : int { producer, consumer, storer, gate, communicate, planner, combine, reduce };
enum class wait_word : int {
    stage_full, stage_free, task_full, task_free, out_full, out_free, turn, arrivals, signal, ids, blocks, landed,
    watermark, flag, weights
};

namespace detail {

// Up to eight characters of a name, as they lie in memory; names are stored as immediates, since a kernel that
// uses wgmma may not call functions.
TKT_DEVICE constexpr uint64_t eight_characters(const char* name, int from) {
    uint64_t packed = 0;
    int length = 0;
    while (name[length]) ++length;
    for (int i = 0; i < 8 && from + i < length; ++i)
        packed |= static_cast<uint64_t>(static_cast<unsigned char>(name[from + i])) << (8 * i);
    return packed;
}

TKT_DEVICE constexpr const char* name_of(wait_role role) {
    constexpr const char* kNames[] = {"producer", "consumer", "storer",  "gate",
                                      "communicate", "planner", "combine", "reduce"};
    return kNames[static_cast<int>(role)];
}
TKT_DEVICE constexpr const char* name_of(wait_word word) {
    constexpr const char* kNames[] = {"stage_full", "stage_free", "task_full", "task_free", "out_full",
                                      "out_free",   "turn",       "arrivals",  "signal", "ids", "blocks",
                                      "landed",     "watermark",  "flag", "weights"};
    return kNames[static_cast<int>(word)];
}

template <typename Name, Name NAME, int BYTES>
TKT_DEVICE void put_name(char* to) {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
        reinterpret_cast<volatile uint32_t*>(to)[2 * i] = static_cast<uint32_t>(eight_characters(name_of(NAME), 8 * i));
        reinterpret_cast<volatile uint32_t*>(to)[2 * i + 1] =
            static_cast<uint32_t>(eight_characters(name_of(NAME), 8 * i) >> 32);
    }
}

template <wait_role ROLE, wait_word WORD>
TKT_DEVICE void give_up(const spin_guard& guard, int index, int64_t expected, int64_t seen) {
    if (guard.report && atomicCAS(&spin_claimed, 0, 1) == 0) {
        tkt_spin_report* report = guard.report;
        report->rank = guard.rank;
        report->block = blockIdx.x;
        put_name<wait_role, ROLE, sizeof report->role>(report->role);
        put_name<wait_word, WORD, sizeof report->word>(report->word);
        report->index = index;
        report->expected = expected;
        report->seen = seen;
        __threadfence_system();
        *const_cast<volatile int32_t*>(&report->set) = 1;
        __threadfence_system();
    }
    // The claimer needs time to get its report across before another thread's trap stops the block.
    const uint32_t start = kilo_nanoseconds();
    while (kilo_nanoseconds() - start < 200) {}
    __trap();
}

}  // namespace detail

// Between two looks of one waiter at the abort word. Such a look crosses the host bus, and what it passes there is the
// traffic between GPUs: with a look every 40 us from each waiting block, rows from a peer took 200 us instead of 3.
constexpr uint32_t kAbortLookKiloNs = 2000;

// Spins until `ready()` or the guard ends the wait. Returns false only when the abort word was raised, which a wait
// notices within about 2 ms. `seen()` is what the report shows; `PAUSE` is the back-off in nanoseconds between two looks.
template <wait_role ROLE, wait_word WORD, int PAUSE, typename Ready, typename Seen>
TKT_DEVICE bool spin_until(const spin_guard& guard, int index, int64_t expected, Ready ready, Seen seen) {
    if (ready()) return true;
    const uint32_t start = kilo_nanoseconds();
    uint32_t heard = start;
    for (uint32_t looks = 1;; ++looks) {
        if (PAUSE) __nanosleep(PAUSE);
        if (ready()) return true;
        if (looks % 64 == 0) {
            const uint32_t now = kilo_nanoseconds();
            if (guard.abort_word && now - heard > kAbortLookKiloNs) {
                heard = now;
                if (*guard.abort_word) return false;
            }
            if (now - start > guard.limit_kilo_ns) detail::give_up<ROLE, WORD>(guard, index, expected, seen());
        }
    }
}

}  // namespace tkt
