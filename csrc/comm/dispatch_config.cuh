// What a launch of the dispatch fusion reads and writes, and how its blocks share their memory. No control flow.
#pragma once

#include "../gemm/grouped_gemm.cuh"

namespace tkt {

// Bits of `roles`; the values are those of tkt_roles (csrc/abi.h).
constexpr int32_t kCommunicate = TKT_COMMUNICATE, kCompute = TKT_COMPUTE, kGated = TKT_GATED;

// Words of `queue`: the next wave of rows, blocks that have left, the next wave to push.
constexpr int kNextWave = 0, kBlocksDone = 1, kNextPush = 2;

// Words of `plan`: padded rows, pad blocks, tokens wanted here. On the device, so that a captured launch serves
// whatever routing its tables hold when it is replayed.
constexpr int kPlanRows = 0, kPlanBlocks = 1, kPlanTokens = 2;

// The GEMM's own last-unit count starts here, so that it never elects: blocks may still join when all compute blocks
// are done, and only the last block of the launch may make the dispenser ready for the next one.
constexpr int32_t kNeverLast = 1 << 20;

// Row slots overlay the GEMM's shared memory behind their semaphores.
constexpr int kSlotReserveBytes = 2048;
constexpr int kMostSlots = kSlotReserveBytes / sizeof(semaphore);

// The launch arguments; the host mirrors this layout (tktune/families/cuda/dispatch_globals.py).
template <typename Config, int WORLD>
struct dispatch_globals {
    static constexpr bool kIndexed = Config::ACTIVATIONS == activation_rows::indexed;
    gemm_globals<Config> gemm;    // `activations` is the buffer below; `guard` and `pad` serve both roles
    bf16* gathered;               // (capacity, K) by slot; indexed: (WORLD × tokens, K) by source and token
    const int32_t* plan;          // 3 words
    const int2* pull_indices;     // (rows): source rank and token of a slot; -1 on padding
    const int2* pull_tokens;      // (tokens): source rank and token, in pull order
    const int32_t* pull_slots;    // (tokens, top_k): their slots here, -1 where the expert is elsewhere
    const int32_t* slack;         // (blocks): rows that nobody brings: padding; indexed: also those of this rank
    int32_t* arrivals;            // (blocks): slack and arrived rows; a block is complete at `pad`
    int32_t* queue;               // 3 words, zero between launches
    int32_t roles;
    int32_t num_comp_blocks;      // the lowest blocks compute, the others communicate (and then join)
    int32_t head;                 // gathered: the first rows are fetched slot by slot, the rest once a token
    int32_t top_k;
    int32_t wave;                 // rows or tokens a warp draws at once, at most 32
    int32_t opening;              // waves that each warp of a compute block brings before its first task
    int32_t warp_slots;           // slots of a warp of a communicating block, each for a piece of a row
    int32_t comm_warps;           // warps of a block that communicate
    int32_t pending;              // stores of pieces that may be under way when a warp goes on; slots + pending <= 32
    int32_t unread;               // of those, that may not have read their slot yet, below warp_slots
    int32_t pieces;               // a row moves in so many, a power of two
    int32_t beside;               // warps of a compute block that bring rows while the others compute, where the
                                  // build has some to spare; their slots lie behind the GEMM's shared memory:
    int32_t beside_slots, beside_pending, beside_unread, beside_pieces;
    int32_t openers;              // warps of a compute block that bring rows until its first tile can begin; 0: all,
                                  // `opening` waves
    int32_t unused;
    pgl<gl<bf16>, WORLD> tokens;  // each rank's token rows, (tokens, K)
};

// Semaphores of the warps beside, before their slots.
constexpr int kBesideReserveBytes = 256;

struct dispatch_globals_layout {
    static constexpr int kGathered = 640, kPlan = 648, kQueue = 696, kRoles = 704, kPending = 736, kTokens = 776;
};

}  // namespace tkt
