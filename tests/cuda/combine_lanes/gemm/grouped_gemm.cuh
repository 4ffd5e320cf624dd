// Stands in for the tile layer and the GEMM template, so that g++ compiles the combine roles: lanes are coroutines that
// run in a random order, and bulk stores happen as late as they may.
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
};

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
            getcontext(&made->context);
            made->context.uc_stack.ss_sp = made->stack.data();
            made->context.uc_stack.ss_size = made->stack.size();
            makecontext(&made->context, entry, 0);
            all.push_back(std::move(made));
        }
    }
    for (long step = 0;; ++step) {
        if (step > 3'000'000) fail("no progress");
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
inline void __threadfence_system() {}
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
enum class wait_word { landed, watermark };

namespace tma {
inline void store_bytes(void* to, const void* from, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16)
        lanes::fail("an unaligned bulk store");
    lanes::now->open.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
}
inline void commit() {
    lanes::now->groups.push_back(std::move(lanes::now->open));
    lanes::now->open.clear();
}
template <int PENDING = 0>
void store_async_wait() {
    lanes::yield();
    while (lanes::now->groups.size() > PENDING) {
        for (const lanes::copy& one : lanes::now->groups.front()) std::memcpy(one.to, one.from, one.bytes);
        lanes::now->groups.pop_front();
    }
}
}  // namespace tma

inline void fence_async_shared() {}

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
    static constexpr bool kWgmma = ROWS_OF_A_STEP == 4;
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
