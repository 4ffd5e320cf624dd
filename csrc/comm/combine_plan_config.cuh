// What the building of combine tables reads and writes. No control flow. The tables are those of
// tktune/core/combine_tables.py, over a schedule that comm/plan.cuh has built.
#pragma once

#include "../abi.h"
#include "../tile/spin.cuh"

namespace tkt {

constexpr int kCombinePlanWarps = 16, kCombinePlanThreads = kCombinePlanWarps * kWarpThreads;
constexpr int kCombinePlanMostBlocks = 32;
constexpr int kCombineKeys = 4096;  // readiness of so many tokens at once in shared memory

// A rank's part of the symmetric memory: words [source][block], each written by that source's block alone; then
// [parity][source] how many partial rows the source owes; then, for each parity and source, the weights of the
// source's tokens (tokens, top_k) and the slots (tokens, top_k) that the source has given to the rows of this rank's
// tokens, -1 where it holds none.
struct combine_region {
    static constexpr int kSignals = 0, kOwed = TKT_MAX_WORLD * kCombinePlanMostBlocks * 8,
                         kPlanes = kOwed + 2 * TKT_MAX_WORLD * 4;
};

// The launch argument; the host mirrors this layout (tktune/families/gemm_combine/plan_globals.py).
struct combine_plan_globals {
    char* region[TKT_MAX_WORLD];  // each rank's region
    const float* topk_weights;    // (tokens, top_k) of this rank
    uint64_t* state;              // 2 words: plans made so far; blocks that have left, blocks × plans
    const int32_t* words;         // the schedule's: padded rows, pad blocks, tokens wanted here
    const int32_t* counts;        // (local experts): real rows
    const int32_t* base;          // (local experts): first slot
    const int32_t* slots;         // (world, tokens, top_k)
    const int2* pull_tokens;      // (tokens wanted here): source rank and token
    const int32_t* pull_slots;    // (tokens wanted here, top_k)
    const int32_t* job_order;     // (tokens wanted here): indices into pull_tokens by largest slot
    int32_t* plan;                // 2 words: pad blocks, jobs
    int2* experts;                // (local experts): first row and real rows
    int4* walk;                   // (passes × local experts): expert, first row, real rows, columns
    int32_t* jobs;                // (world · tokens · groups): item · groups + group
    int32_t* push_expected;       // (world)
    int32_t* recv_from;           // (world): partial rows that each rank owes
    int32_t* final_contrib;       // (tokens, world)
    int32_t* owners;              // (tokens, top_k); -1 where nobody holds the row
    int32_t* owner_slots;         // (tokens, top_k); -1 where nobody holds the row
    float* everyones;             // (world, tokens, top_k): weights
    spin_guard guard;
    int32_t world, tokens, top_k, local_experts, pad;
    int32_t form, own_last;       // tkt_form; whether own tokens come after those of peers
    int32_t groups, passes;       // runs of columns; how many times the GEMM walks over the experts, 1 or groups
    int32_t group_tiles;          // column tiles of a run
};

// Threads share 32-bit words: readiness of `kCombineKeys` tokens; or of the jobs of a block, with as many before and
// behind as a pad block may end, and one bit and one sum for 32 jobs.
constexpr int combine_plan_shared_words(int world, int tokens, int pad, int blocks) {
    const int jobs = world * tokens, share = (jobs + blocks - 1) / blocks;
    const int listed = share + 2 * pad + 2 * ((jobs + kWarpThreads - 1) / kWarpThreads + 1);
    return (listed > kCombineKeys ? listed : kCombineKeys) + TKT_MAX_WORLD;
}

}  // namespace tkt
