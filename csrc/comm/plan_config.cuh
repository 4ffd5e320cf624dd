// What the building of schedule tables reads and writes, and how its blocks share the tokens and their memory. No
// control flow. The tables are those of tktune/core/tables.py.
#pragma once

#include "../abi.h"
#include "../tile/spin.cuh"

namespace tkt {

constexpr int kPlanWarps = 16, kPlanThreads = kPlanWarps * kWarpThreads;
constexpr int kPlanMostBlocks = 32, kPlanMostExperts = 256;

// What is counted of each local expert: its rows; tokens whose first expert here it is; tokens whose last one it is.
// Experts' rows follow each other, so the order of smallest (largest) slots is that of first (last) experts, then ring.
constexpr int kRows = 0, kFirsts = 1, kLasts = 2, kKinds = 3;

// Words of `status`, in host memory, raised and never lowered by a launch.
constexpr int kWrongIds = 0, kRowsWanted = 1;

// A rank's plan region of the symmetric memory: words [source][block], each written by that source's block alone; then
// the ids [parity][source][token][x], those of a source written by that source alone; then, for ranks that push,
// [parity][source][block][expert] how many rows of each expert of all ranks that block of the source has.
struct plan_region {
    static constexpr int kSignals = 0, kIds = TKT_MAX_WORLD * kPlanMostBlocks * 8;
};
constexpr int kCountQuad = 4;  // counts of a block begin at 16 bytes, and are read so many at once

// The launch argument; the host mirrors this layout (tktune/families/cuda/plan_globals.py).
struct plan_globals {
    char* region[TKT_MAX_WORLD];  // each rank's plan region
    const void* ids;              // (tokens, top_k) of this rank: global expert ids, of `id_bytes`
    uint64_t* state;              // 2 words: plans made so far; blocks that came to their meetings, blocks × plans
    int32_t* counted;             // (world × blocks, kKinds × local experts); behind it (blocks, experts), for ranks that push
    int32_t* status;              // 2 words
    int32_t* words;               // 3: padded rows, pad blocks, tokens wanted here
    int32_t* counts;              // (local experts): real rows
    int32_t* base;                // (local experts): first slot
    int4* walk;                   // (local experts): expert, first row, real rows, 0
    int2* pull_indices;           // (capacity): source rank and token of a slot; -1 on padding
    int32_t* block_expert;        // (capacity / pad)
    int32_t* slack;               // (capacity / pad): padding rows of each pad block
    int32_t* own_slack;           // (capacity / pad): padding rows and rows of this rank's own tokens
    int32_t* arrivals;            // (capacity / pad): becomes `slack`, or `own_slack` when own rows stay in place
    int32_t* slots;               // (world, tokens, top_k): slot of each assignment, -1 where the expert is elsewhere
    int2* pull_tokens;            // (world × tokens): tokens wanted here, by smallest slot
    int32_t* pull_slots;          // (world × tokens, top_k): their slots
    int32_t* job_order;           // (world × tokens): indices into pull_tokens by largest slot
    int32_t* queue;               // 3 words that become 0; may be null
    int32_t* dispenser;           // 2 words that become 0 and `never_last`; may be null
    // Where rows are pushed; all null where they are pulled. The tables are those of tktune/core/push_tables.py.
    int32_t* push_plan;           // (world + 2): where each destination's counters begin, the last ends; most tokens to any
    int32_t* push_tokens;         // (world, tokens): own tokens as each destination needs them; -1 behind the last
    int32_t* push_blocks;         // (world, tokens, top_k): their pad blocks there; -1 where the expert is elsewhere
    int32_t* push_expected;       // (counters, at most (world - 1) × capacity / pad): rows for each pad block there
    int32_t* missing;             // (counters): becomes `push_expected`
    int32_t* gate_sources;        // (capacity / pad): bit s: rank s pushes a row of this pad block
    spin_guard guard;
    int32_t world, tokens, top_k, experts, pad, capacity, id_bytes, never_last;
    int32_t own_in_place, unused;
};

// Threads share 32-bit words: counters of each warp, its bits, and the sums over blocks, sources and experts; two sums of
// each rank. Push tables take the place of the others when those are made.
constexpr int plan_shared_words(int world, int experts) {
    return experts * (kPlanWarps * (kKinds + 1) + kKinds * (world + 2)) + kKinds + 1 + 2 * TKT_MAX_WORLD;
}

}  // namespace tkt
