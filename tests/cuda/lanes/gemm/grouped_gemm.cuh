// What csrc/comm/dispatch.cuh needs of a GPU, on the CPU: every lane is a coroutine, warps interleave by a seed, and the
// copy engine is as late as it may be. Loads land when someone has waited for them for a while; stores read shared
// memory only when their issuer's bulk wait of either kind forces them to, and write only when its full wait does.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "abi.h"

#define TKT_DEVICE inline
#define __shared__
#define __align__(bytes)

struct int2 {
    int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline struct {
    unsigned x;
} gridDim;

namespace lanes {

struct copy {
    char* to;
    const char* from;
    uint32_t bytes;
    std::vector<char> read = {};  // what a store has taken from its slot
};

struct warp {
    int index, block, arrived = 0, generation = 0;
    int64_t slots[32];
};

struct lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    warp* of = nullptr;
    int number = 0, waits_for = -1;
    bool done = false;
    std::vector<copy> open;
    std::deque<std::vector<copy>> groups;
    size_t read = 0;  // of `groups`, from the front: their slots may be overwritten
};

// What a bulk wait does with a store that it forces.
inline void (*perform)(const copy&) = [](const copy& one) { std::memcpy(one.to, one.from, one.bytes); };

inline std::vector<std::unique_ptr<lane>> all;
inline lane* now = nullptr;
inline ucontext_t scheduler;
inline std::mt19937 chance;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// An array behind its length.
inline std::vector<int32_t> table(FILE* file) {
    int32_t size = 0;
    if (std::fread(&size, 4, 1, file) != 1) fail("short file");
    std::vector<int32_t> values(size);
    if (size && std::fread(values.data(), 4, size, file) != static_cast<size_t>(size)) fail("short file");
    return values;
}

inline void yield() { swapcontext(&now->context, &scheduler); }

inline void warp_sync() {
    warp& w = *now->of;
    if (++w.arrived == 32) {
        w.arrived = 0;
        ++w.generation;
        return;
    }
    now->waits_for = w.generation;
    while (w.generation == now->waits_for) yield();
    now->waits_for = -1;
}

inline int64_t exchange(int64_t value, const std::function<int64_t(const int64_t*)>& read) {
    warp& w = *now->of;
    w.slots[now->number] = value;
    warp_sync();
    const int64_t result = read(w.slots);
    warp_sync();
    return result;
}

inline void entry() {
    extern void body();
    body();
    if (!now->groups.empty() || !now->open.empty()) fail("a lane left with stores under way");
    now->done = true;
    for (;;) yield();
}

// Runs `body` on every lane of every warp until all are done.
inline void run(std::vector<warp>& warps, unsigned seed) {
    chance.seed(seed);
    all.clear();
    for (warp& w : warps)
        for (int n = 0; n < 32; ++n) {
            auto made = std::make_unique<lane>();
            made->of = &w;
            made->number = n;
            getcontext(&made->context);
            made->context.uc_stack.ss_sp = made->stack.data();
            made->context.uc_stack.ss_size = made->stack.size();
            makecontext(&made->context, entry, 0);
            all.push_back(std::move(made));
        }
    for (long step = 0;; ++step) {
        if (step > 300'000) fail("no progress");
        const size_t first = chance() % warps.size() * 32;
        bool left = false;
        for (size_t i = first; i < first + 32; ++i) {
            lane& one = *all[i];
            if (one.done || (one.waits_for >= 0 && one.of->generation == one.waits_for)) continue;
            now = &one;
            swapcontext(&scheduler, &one.context);
        }
        for (auto& one : all) left = left || !one->done;
        if (!left) return;
    }
}

}  // namespace lanes

inline int __shfl_sync(uint32_t, int value, int from) {
    return static_cast<int>(lanes::exchange(value, [from](const int64_t* all) { return all[from & 31]; }));
}
inline uint32_t __ballot_sync(uint32_t, bool vote) {
    return static_cast<uint32_t>(lanes::exchange(vote, [](const int64_t* all) {
        int64_t mask = 0;
        for (int i = 0; i < 32; ++i) mask |= (all[i] & 1) << i;
        return mask;
    }));
}
inline void __syncwarp() { lanes::warp_sync(); }
inline int __ffs(uint32_t mask) { return __builtin_ffs(static_cast<int>(mask)); }
inline int atomicAdd(int32_t* word, int value) {
    lanes::yield();
    const int before = *word;
    *word += value;
    return before;
}
template <typename T>
T __ldg(const T* at) {
    return *at;
}

namespace tkt {

using std::max;
using std::min;
constexpr int kWarpThreads = 32;
inline int lane_id() { return lanes::now->number; }
inline int warp_id() { return lanes::now->of->index; }

struct bf16 {
    uint16_t bits;
};
struct spin_guard {
    int rank;
    uint32_t limit_kilo_ns;
};
enum class activation_rows { gathered = 0, indexed = 1 };

// The bits of an mbarrier: a phase completes when all arrivals and all announced bytes are there.
struct semaphore {
    int16_t alive, phase;
    int32_t bytes;
};
static_assert(sizeof(semaphore) == 8);
constexpr int16_t kAlive = 0x5a5a;

inline std::vector<std::pair<lanes::copy, semaphore*>> loads;
inline int loads_issued = 0;

inline void init_semaphore(semaphore& sem, int) { sem = {kAlive, 0, 0}; }
inline void publish_semaphores() {}
inline void drop_semaphore(semaphore& sem) {
    if (sem.alive != kAlive || sem.bytes) lanes::fail("a semaphore was dropped that is not idle");
    sem.alive = 0;
}

enum class wait_role { producer, consumer, storer, gate, communicate };
enum class wait_word { stage_full, stage_free, task_full, task_free, out_full, out_free, turn, arrivals, signal, flag };

inline void land_one() {
    if (loads.empty()) return;
    const size_t pick = lanes::chance() % loads.size();
    auto [copy, sem] = loads[pick];
    loads.erase(loads.begin() + pick);
    std::memcpy(copy.to, copy.from, copy.bytes);
    sem->bytes -= copy.bytes;
    if (sem->bytes == 0) sem->phase ^= 1;
}

template <wait_role ROLE, wait_word WORD>
void wait(const semaphore& sem, uint32_t phase, const spin_guard&) {
    if (sem.alive != kAlive) lanes::fail("a wait on a semaphore that is not there");
    while (static_cast<uint32_t>(sem.phase) == phase) {
        if (lanes::chance() % 64 == 0) land_one();
        lanes::yield();
    }
}

// A look: what lands in between is a matter of chance.
inline bool test_wait(const semaphore& sem, uint32_t phase) {
    if (sem.alive != kAlive) lanes::fail("a look at a semaphore that is not there");
    if (lanes::chance() % 64 == 0) land_one();
    return static_cast<uint32_t>(sem.phase) != phase;
}

namespace tma {
inline void expect_bytes(semaphore& sem, uint32_t bytes) {
    if (sem.alive != kAlive || sem.bytes) lanes::fail("a load into a slot that still waits for one");
    sem.bytes = static_cast<int32_t>(bytes);
}
inline void load_bytes(void* to, const void* from, uint32_t bytes, semaphore& sem) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16) lanes::fail("an unaligned bulk load");
    std::memset(to, 0xee, bytes);  // whoever still reads the slot reads this
    ++loads_issued;
    loads.push_back({{static_cast<char*>(to), static_cast<const char*>(from), bytes}, &sem});
}
inline void store_bytes(void* to, const void* from, uint32_t bytes) {
    lanes::now->open.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
}
inline void commit() {
    lanes::now->groups.push_back(std::move(lanes::now->open));
    lanes::now->open.clear();
}
inline void take_from_slots(size_t pending) {
    lanes::lane& mine = *lanes::now;
    for (; mine.read + pending < mine.groups.size(); ++mine.read)
        for (lanes::copy& one : mine.groups[mine.read]) one.read.assign(one.from, one.from + one.bytes);
}
template <int PENDING = 0>
void store_async_read_wait() {
    lanes::yield();
    take_from_slots(PENDING);
}
template <int PENDING = 0>
void store_async_wait() {
    lanes::yield();
    take_from_slots(PENDING);
    for (; lanes::now->groups.size() > PENDING; --lanes::now->read) {
        for (lanes::copy& one : lanes::now->groups.front()) {
            one.from = one.read.data();
            lanes::perform(one);
        }
        lanes::now->groups.pop_front();
    }
}
}  // namespace tma

inline void fence_async_shared() {}
inline void fence_async() {}

template <typename T>
struct gl {
    T* data;
    int32_t rows, cols;
    T* at(int row, int col) const { return data + static_cast<int64_t>(row) * cols + col; }
};
template <typename GL, int WORLD>
struct pgl {
    GL views[WORLD];
    const GL& operator[](int rank) const { return views[rank]; }
};

template <typename Config>
struct gemm_globals {
    int32_t* dispenser;
    spin_guard guard;
    int32_t reduction, pad;
};

}  // namespace tkt
