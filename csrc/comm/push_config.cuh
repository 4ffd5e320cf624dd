// What a launch reads and writes beyond the pull form when rows are pushed by the rank that has them. No control flow.
#pragma once

#include "dispatch_config.cuh"

namespace tkt {

// The host mirrors this layout (tktune/families/cuda/push_globals.py).
template <int WORLD>
struct push_part {
    static constexpr int world = WORLD;
    static constexpr int kTurns = WORLD + 1;  // word of push_plan
    // Rows by index: tables by pad block and their counters; gathered: not looked at, but for the first two.
    const int32_t* push_plan;      // where each destination's counters begin and the last ends; most pushes to any of them
    const int32_t* push_tokens;    // (WORLD, tokens): own tokens as each destination needs them; -1 behind the last
    const int32_t* push_blocks;    // (WORLD, tokens, top_k): their pad blocks there, -1 where the expert is elsewhere
    const int32_t* push_expected;  // (counters): rows for each pad block of each destination
    int32_t* missing;              // (counters): those of them that are not there yet; as expected between launches
    const int32_t* gate_sources;   // (blocks): bit s: rank s pushes a row of this pad block
    const uint64_t* sequence;      // of the last meeting: greater with every launch, the same on all ranks
    pgl<gl<bf16>, WORLD> sections;  // on each rank, (WORLD × tokens, K): section s is written by rank s alone
    uint64_t* flags[WORLD];        // on each rank, by index (blocks, WORLD): rank s has pushed all its rows of the block;
                                   // gathered (WORLD, tokens): this row has been pushed
    int32_t num_push_blocks;       // gathered: the first communicating blocks, which push before they scatter
    int32_t unused;
};

// `tokens` are each rank's own rows as ever.
template <typename Config, int WORLD>
struct push_globals : dispatch_globals<Config, WORLD>, push_part<WORLD> {
    static_assert(sizeof(dispatch_globals<Config, WORLD>) % alignof(gemm_globals<Config>) == 0, "the part follows at once");
};

struct push_part_layout {
    static constexpr int kMissing = 32, kSections = 56;
};

}  // namespace tkt
