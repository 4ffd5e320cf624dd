// What csrc/comm/plan.cuh needs of a GPU, on the CPU: every thread is a coroutine, warps of all blocks of all ranks
// interleave by a seed, and a thread gives way where others could have come between.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#define TKT_DEVICE inline

struct int2 {
    int x, y;
};
struct int4 {
    int x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

namespace lanes {

struct meeting {
    int size = 0, arrived = 0, generation = 0;
};
struct warp {
    meeting all{32};
    int64_t slots[32];
};
struct place {
    unsigned x;
};
struct lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(32 << 10);
    warp* of = nullptr;
    meeting* block = nullptr;
    place thread, index;
    int rank = 0;
    const meeting* waits_at = nullptr;
    int waits_for = 0;
    bool done = false;
};

inline std::vector<std::unique_ptr<lane>> all;
inline lane* now = nullptr;
inline ucontext_t scheduler;
inline std::mt19937 chance;
inline place grid;
inline int slow = -1;  // a rank whose warps take fewer turns than others'

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}
inline void yield() { swapcontext(&now->context, &scheduler); }

inline void meet(meeting& at) {
    if (++at.arrived == at.size) {
        at.arrived = 0;
        ++at.generation;
        return;
    }
    now->waits_at = &at;
    now->waits_for = at.generation;
    while (at.generation == now->waits_for) yield();
    now->waits_at = nullptr;
}

template <typename Read>
int64_t exchange(int64_t value, Read read) {
    warp& w = *now->of;
    w.slots[now->thread.x % 32] = value;
    meet(w.all);
    const int64_t result = read(w.slots);
    meet(w.all);
    return result;
}

inline void entry() {
    extern void body();
    body();
    now->done = true;
    for (;;) yield();
}

// Runs `all`, 32 threads of a warp after each other, until all are done.
inline void run() {
    for (auto& one : all) {
        getcontext(&one->context);
        one->context.uc_stack.ss_sp = one->stack.data();
        one->context.uc_stack.ss_size = one->stack.size();
        makecontext(&one->context, entry, 0);
    }
    std::vector<size_t> warps(all.size() / 32);
    for (size_t w = 0; w < warps.size(); ++w) warps[w] = 32 * w;
    for (long idle = 0; !warps.empty();) {
        const size_t pick = chance() % warps.size();
        if (all[warps[pick]]->rank == slow && chance() % 8) continue;
        bool moved = false, left = false;
        for (size_t i = warps[pick]; i < warps[pick] + 32; ++i) {
            lane& one = *all[i];
            left = left || !one.done;
            if (one.done || (one.waits_at && one.waits_at->generation == one.waits_for)) continue;
            now = &one;
            moved = true;
            swapcontext(&scheduler, &one.context);
        }
        if (!left) warps.erase(warps.begin() + pick);
        idle = moved ? 0 : idle + 1;
        if (idle > 1'000'000) fail("no progress");
    }
}

// Every rank's blocks of `threads`, then all of them to their end.
inline void launch(int ranks, int blocks, int threads) {
    grid.x = blocks;
    std::vector<std::unique_ptr<warp>> warps;
    std::vector<std::unique_ptr<meeting>> teams;
    for (int rank = 0; rank < ranks; ++rank)
        for (int block = 0; block < blocks; ++block) {
            teams.push_back(std::make_unique<meeting>(meeting{threads}));
            for (int thread = 0; thread < threads; ++thread) {
                if (thread % 32 == 0) warps.push_back(std::make_unique<warp>());
                auto made = std::make_unique<lane>();
                made->of = warps.back().get();
                made->block = teams.back().get();
                made->thread = {static_cast<unsigned>(thread)};
                made->index = {static_cast<unsigned>(block)};
                made->rank = rank;
                all.push_back(std::move(made));
            }
        }
    run();
}

// What each rank said, plan by plan, all of the same length.
template <typename Ranks>
int write(const char* path, const Ranks& ranks, int plans) {
    std::FILE* out = std::fopen(path, "wb");
    if (!out) return 2;
    for (int plan = 0; plan < plans; ++plan)
        for (const auto& rank : ranks) {
            const size_t words = rank.said.size() / plans;
            std::fwrite(rank.said.data() + plan * words, 4, words, out);
        }
    return std::fclose(out);
}

}  // namespace lanes

#define threadIdx lanes::now->thread
#define blockIdx lanes::now->index
#define gridDim lanes::grid

inline void __syncwarp() { lanes::meet(lanes::now->of->all); }
inline void __syncthreads() { lanes::meet(*lanes::now->block); }
inline void __threadfence_system() {}
inline int __popc(uint32_t mask) { return __builtin_popcount(mask); }
inline int __shfl_sync(uint32_t, int value, int from) {
    return static_cast<int>(lanes::exchange(value, [from](const int64_t* all) { return all[from]; }));
}
inline int __shfl_up_sync(uint32_t, int value, int by) {
    const int lane = lanes::now->thread.x % 32;
    return static_cast<int>(lanes::exchange(value, [=](const int64_t* all) { return all[std::max(lane - by, 0)]; }));
}
inline uint32_t __match_any_sync(uint32_t, int value) {
    return static_cast<uint32_t>(lanes::exchange(value, [=](const int64_t* all) {
        int64_t mask = 0;
        for (int i = 0; i < 32; ++i) mask |= int64_t{all[i] == value} << i;
        return mask;
    }));
}
inline int atomicAdd(int32_t* word, int value) {
    lanes::yield();
    return (*word += value) - value;
}
inline uint32_t atomicOr(uint32_t* word, uint32_t bits) {
    lanes::yield();
    return *word |= bits;
}
template <typename T>
T __ldcg(const T* at) {
    return *at;
}

namespace tkt {

using std::max;
using std::min;
constexpr int kWarpThreads = 32;
inline int lane_id() { return threadIdx.x % 32; }
// All lanes of a warp must ask together, as on a GPU, where the answer is shuffled.
inline int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
template <typename T>
constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

struct spin_guard {
    int32_t rank;
    int32_t patience;  // times that a wait looks before it goes on as after an abort; 0: as often as it takes
};
enum class wait_role { planner };
enum class wait_word { ids, blocks };

template <wait_role ROLE, wait_word WORD, int PAUSE, typename Ready, typename Seen>
bool spin_until(const spin_guard& guard, int, int64_t, Ready ready, Seen) {
    for (int looks = 1; !ready(); ++looks) {
        if (looks == guard.patience) return false;
        lanes::yield();
    }
    return true;
}
inline uint64_t look_at_peers(const uint64_t* word) { return *word; }
inline void announce(uint64_t* word, uint64_t sequence) {
    lanes::yield();
    if (*word >= sequence) lanes::fail("a signal does not grow");
    *word = sequence;
}

}  // namespace tkt
