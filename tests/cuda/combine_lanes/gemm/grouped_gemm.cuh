// Stands in for the tile layer and the GEMM template, so that g++ compiles the combine roles: lanes are coroutines that
// run in a random order. The copy engine is as late as it may be: loads land some time before their wait ends and fill
// their slot with rubbish when they are issued; stores read their slot when a bulk wait of either kind forces them, and
// write when a full one does. What was written after the last fence of a loading lane does not exist for its loads.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
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
struct uint4 {
    uint32_t x, y, z, w;
};

namespace lanes {

struct copy {
    char* to;
    const char* from;
    uint32_t bytes;
    std::vector<char> read = {};  // what a store has taken from its slot, or a load from its source
};
// Memory that the copy engine reads while others write it: when each 16 bytes were written last.
struct watched {
    const char* start;
    std::vector<long> written;
};
struct warp {
    int index, block, lanes, arrived = 0, generation = 0;
    std::function<void()> body;
    int64_t exchanged[32];
};
struct lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    warp* of = nullptr;
    int number = 0, waits_for = -1;
    bool done = false;
    std::vector<copy> open;
    std::deque<std::vector<copy>> groups;
    size_t read = 0;            // of `groups`, from the front: their slots may be overwritten
    long fenced = 0;            // when this lane last ordered what it had seen before its loads
    bool fenced_words = false;  // since it last counted
    bool fenced_store = false, fenced_load = false;  // its warp's slots, since the last store and since its last load
};

inline std::vector<watched> memories;
inline long clock_now = 1;

inline void wrote(const void* to, size_t bytes) {
    ++clock_now;
    const char* const at = static_cast<const char*>(to);
    for (watched& one : memories)
        if (at >= one.start && at < one.start + 16 * one.written.size())
            for (size_t i = (at - one.start) / 16; i <= (at - one.start + bytes - 1) / 16; ++i) one.written[i] = clock_now;
}

inline std::vector<std::unique_ptr<lane>> all;
inline lane* now = nullptr;
inline ucontext_t scheduler;
inline std::mt19937 chance;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

inline void yield() { swapcontext(&now->context, &scheduler); }

inline void warp_sync() {
    warp& w = *now->of;
    if (++w.arrived == w.lanes) {
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
    w.exchanged[now->number] = value;
    warp_sync();
    const int64_t result = read(w.exchanged);
    warp_sync();
    return result;
}

inline void entry() {
    now->of->body();
    if (!now->groups.empty() || !now->open.empty()) fail("a lane left with stores under way");
    now->done = true;
    for (;;) yield();
}

// What a lane's load finds at `from`: rubbish in every 16 bytes that were written after its fence.
inline std::vector<char> seen(const lane& by, const char* from, uint32_t bytes) {
    std::vector<char> found(from, from + bytes);
    for (const watched& one : memories)
        if (from >= one.start && from < one.start + 16 * one.written.size())
            for (uint32_t i = 0; i < bytes; i += 16)
                if (one.written[(from + i - one.start) / 16] > by.fenced) std::memset(found.data() + i, 0xdd, 16);
    return found;
}

inline void (*land_one)() = nullptr;

// Runs every lane of every warp until all are done.
inline void run(std::deque<warp>& warps, unsigned seed) {
    chance.seed(seed);
    all.clear();
    std::vector<size_t> first;
    for (warp& w : warps) {
        first.push_back(all.size());
        for (int n = 0; n < w.lanes; ++n) {
            auto made = std::make_unique<lane>();
            made->of = &w;
            made->number = n;
            made->fenced = clock_now;
            getcontext(&made->context);
            made->context.uc_stack.ss_sp = made->stack.data();
            made->context.uc_stack.ss_size = made->stack.size();
            makecontext(&made->context, entry, 0);
            all.push_back(std::move(made));
        }
    }
    for (long step = 0;; ++step) {
        if (step > 600'000) fail("no progress");
        if (chance() % 32 == 0) land_one();
        const size_t pick = chance() % warps.size();
        for (size_t i = first[pick]; i < first[pick] + warps[pick].lanes; ++i) {
            lane& one = *all[i];
            if (one.done || (one.waits_for >= 0 && one.of->generation == one.waits_for)) continue;
            now = &one;
            swapcontext(&scheduler, &one.context);
        }
        bool left = false;
        for (auto& one : all) left = left || !one->done;
        if (!left) return;
    }
}

struct place {
    unsigned x;
};
inline place block() { return {static_cast<unsigned>(now->of->block)}; }
inline unsigned grid;

}  // namespace lanes

#define blockIdx lanes::block()
#define gridDim \
    lanes::place { lanes::grid }

inline int __shfl_sync(uint32_t, int value, int from) {
    return static_cast<int>(lanes::exchange(value, [from](const int64_t* all) { return all[from & 31]; }));
}
inline float __shfl_sync(uint32_t mask, float value, int from) {
    int bits;
    std::memcpy(&bits, &value, 4);
    bits = __shfl_sync(mask, bits, from);
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint64_t __shfl_sync(uint32_t, uint64_t value, int from) {
    return lanes::exchange(static_cast<int64_t>(value), [from](const int64_t* all) { return all[from & 31]; });
}
inline int __shfl_sync(uint32_t mask, bool value, int from) { return __shfl_sync(mask, static_cast<int>(value), from); }
inline uint32_t __ballot_sync(uint32_t, bool vote) {
    return static_cast<uint32_t>(lanes::exchange(vote, [](const int64_t* all) {
        int64_t mask = 0;
        for (int i = 0; i < 32; ++i) mask |= (all[i] & 1) << i;
        return mask;
    }));
}
inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
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
inline void* __cvta_shared_to_generic(size_t) { return nullptr; }
inline uint4 __ldcg(const uint4* at) { return *at; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

namespace tkt {

using std::min;
constexpr int kWarpThreads = 32;
inline int lane_id() { return lanes::now->number; }
inline int warp_id() { return lanes::now->of->index; }

inline uint32_t opaque(uint32_t value) { return value; }
inline uint32_t shared_address(const void*) { return 0; }

template <typename T>
constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

struct bf16 {
    uint16_t bits;
};
inline uint16_t half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline uint32_t pack_bf16(float low, float high) { return half(low) | static_cast<uint32_t>(half(high)) << 16; }

struct spin_guard {
    int rank;
};
enum class wait_role { combine, reduce };
enum class wait_word { stage_full, landed, watermark };

// The same lane of a warp each time, and not the first.
inline bool elect_lane() { return lanes::now->number == lanes::now->of->index * 7 % 31 + 1; }

// The bits of an mbarrier: a phase completes when all arrivals and all announced bytes are there.
struct semaphore {
    int16_t alive, phase;
    int32_t bytes;
};
static_assert(sizeof(semaphore) == 8);
constexpr int16_t kAlive = 0x5a5a;

struct load {
    lanes::copy copy;
    semaphore* sem;
    const lanes::lane* by;
};
inline std::vector<load> loads;

inline void land_one() {
    if (loads.empty()) return;
    const size_t pick = lanes::chance() % loads.size();
    load one = std::move(loads[pick]);
    loads.erase(loads.begin() + pick);
    if (one.copy.read.empty()) one.copy.read = lanes::seen(*one.by, one.copy.from, one.copy.bytes);
    std::memcpy(one.copy.to, one.copy.read.data(), one.copy.bytes);
    one.sem->bytes -= one.copy.bytes;
    if (one.sem->bytes == 0) one.sem->phase ^= 1;
}

inline void init_semaphore(semaphore& sem, int) { sem = {kAlive, 0, 0}; }
inline void publish_semaphores() {}
inline void drop_semaphore(semaphore& sem) { sem.alive = 0; }
inline bool test_wait(const semaphore& sem, uint32_t phase) { return static_cast<uint32_t>(sem.phase) != phase; }
template <wait_role ROLE, wait_word WORD>
void wait(const semaphore& sem, uint32_t phase, const spin_guard&) {
    if (sem.alive != kAlive) lanes::fail("a wait on a semaphore that is not there");
    while (static_cast<uint32_t>(sem.phase) == phase) {
        if (lanes::chance() % 64 == 0) land_one();
        lanes::yield();
    }
}

inline void fence_async() {
    lanes::yield();
    lanes::now->fenced = lanes::clock_now;
}
inline void fence_async_shared() { lanes::now->fenced_store = lanes::now->fenced_load = true; }

namespace tma {
inline void expect_bytes(semaphore& sem, uint32_t bytes) {
    if (sem.alive != kAlive || sem.bytes) lanes::fail("a load into a slot that still waits for one");
    sem.bytes = static_cast<int32_t>(bytes);
    if (bytes == 0) sem.phase ^= 1;
}
inline void load_bytes(void* to, const void* from, uint32_t bytes, semaphore& sem) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || bytes == 0)
        lanes::fail("an unaligned bulk load");
    if (!lanes::now->fenced_load) lanes::fail("a load overwrites what lanes have read without a fence");
    lanes::now->fenced_load = false;
    std::memset(to, 0xee, bytes);  // whoever still reads the slot reads this
    loads.push_back({{static_cast<char*>(to), static_cast<const char*>(from), bytes}, &sem, lanes::now});
    if (lanes::chance() % 2) loads.back().copy.read = lanes::seen(*lanes::now, loads.back().copy.from, bytes);
}
inline void store_bytes(void* to, const void* from, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16)
        lanes::fail("an unaligned bulk store");
    for (auto& one : lanes::all)
        if (one->of == lanes::now->of) {
            if (!one->fenced_store) lanes::fail("a store reads what a lane wrote without a fence");
            one->fenced_store = false;
        }
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
        for (const lanes::copy& one : lanes::now->groups.front()) {
            std::memcpy(one.to, one.read.data(), one.bytes);
            lanes::wrote(one.to, one.bytes);
        }
        lanes::now->groups.pop_front();
    }
}
}  // namespace tma

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

// As csrc/gemm deals an expert's pieces of rows over its tiles: as evenly as can be, the taller tiles first.
template <typename Config>
struct geometry : Config {
    static constexpr int kPieceRows = Config::PIECE_ROWS, kThreads = 32 * (Config::CONSUMER_WARPS + 4);
    static constexpr bool kWgmma = MOST_VECTORS == 8;
};
template <typename Config>
struct task_order {
    struct tiling {
        int tall, low, low_pieces;
        explicit tiling(int pieces) {
            const int tiles = ceil_div(pieces, Config::ROW_BLOCK / Config::PIECE_ROWS);
            low_pieces = tiles > 0 ? pieces / tiles : 0;
            tall = pieces - tiles * low_pieces;
            low = tiles - tall;
        }
    };
};
template <typename Config>
struct shared_storage {
    char stages[4096];
    uint64_t stage_full[4];
};
template <typename Config>
struct gemm_globals {
    spin_guard guard;
    int32_t cols, pad;
};

}  // namespace tkt
