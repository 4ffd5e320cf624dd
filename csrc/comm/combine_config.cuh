// What a launch of the combine fusion reads and writes, and how its blocks share their memory. No control flow.
#pragma once

#include "../gemm/grouped_gemm.cuh"

namespace tkt {

// Words of `queue`, zero between launches: the next job, the next run of a token to reduce, blocks that have left, and
// how many rows of each run of columns were pushed to each rank.
constexpr int kMostCombineGroups = 4;
constexpr int kNextJob = 0, kNextToken = 1, kCombineBlocksDone = 2, kPushed = 4;
constexpr int kCombineQueueWords = kPushed + TKT_MAX_WORLD * kMostCombineGroups;

// Words of `plan`: pad blocks, and jobs in the list. On the device, so that a captured launch serves whatever routing
// its tables hold when it is replayed.
constexpr int kCombinePlanBlocks = 0, kCombinePlanJobs = 1;

constexpr int kMostCombineSlots = 8;            // row pieces of a warp on their way
constexpr int kCombineSums = 2;                 // finished stretches of a warp, one of them still read
constexpr int kMostCombineTopK = kWarpThreads;  // a lane holds one of a token's rows
constexpr int kVectorCols = 8;                  // bf16 of a 16-byte access
constexpr int kVectorBytes = 16;

// The launch arguments; the host mirrors this layout. Per rank and launch: G = groups runs of columns in which a pad
// block is announced and summed; an item is a pull token (pre-reduce) or an own token (pull).
template <typename Config, int WORLD>
struct combine_globals {
    using config = Config;
    static constexpr int world = WORLD;

    gemm_globals<Config> gemm;      // `outputs` is rows[rank]; `guard` and `pad` serve all roles
    const int32_t* plan;            // 2 words
    const int32_t* block_expert;    // (blocks)
    const int2* experts;            // (local experts): first row and real rows
    const int32_t* jobs;            // (jobs): item · G + group, in the order they are drawn
    const int2* pull_tokens;        // (pull tokens): source rank and token; pre-reduce only
    const int32_t* slots;           // (items, top_k): the slot of each row where it is held, -1 where it is not here
    const int32_t* owners;          // (tokens, top_k): the rank that holds each row; pull only
    const float* topk_weights;      // (WORLD · tokens, top_k)
    const int32_t* push_expected;   // (WORLD): pull tokens of each rank
    const int32_t* recv_from;       // (WORLD): partial rows that each rank owes
    const int32_t* final_contrib;   // (tokens, WORLD): whether that rank owes a partial row of the own token
    bf16* y;                        // (tokens, N)
    int32_t* finished;              // (blocks · G), then (G): tiles and pad blocks that have landed, zero between launches
    int32_t* queue;                 // kCombineQueueWords
    const uint64_t* sequence;       // of the last meeting: greater with every launch, the same on all ranks
    int32_t roles;                  // bits of tkt_roles (csrc/abi.h)
    int32_t num_comp_blocks;        // the lowest blocks compute first, the others sum from the start
    int32_t num_reduce_blocks;      // the highest blocks add the partial rows in the end
    int32_t form;                   // tkt_form (csrc/abi.h)
    int32_t groups;
    int32_t top_k;                  // at most kMostCombineTopK
    int32_t tokens;                 // of each rank
    int32_t warp_slots;             // row pieces of a warp on their way, at most kMostCombineSlots
    int32_t landed_stride;          // words of one rank among `landed`
    int32_t piece_vectors;          // 16-byte vectors of a piece in a lane, at most combine_memory::kVectors; pulls: half
    pgl<gl<bf16>, WORLD> rows;      // each rank's expert rows, (capacity, N)
    pgl<gl<bf16>, WORLD> staging;   // on each rank, (WORLD · tokens, N): plane d is written by rank d only
    // On each rank, (WORLD, kMostCombineGroups): rank d, and nobody else, says that its plane's run of columns is whole.
    uint64_t* watermarks[WORLD];
    // On each rank, (WORLD, landed_stride): block · G + group of rank d has landed; last, all blocks of a group have.
    uint64_t* landed[WORLD];
    TKT_DEVICE uint64_t* landed_word(int on, int owner, int pad_block, int group) const {
        return landed[on] + static_cast<int64_t>(owner) * landed_stride + pad_block * groups + group;
    }
    TKT_DEVICE uint64_t* whole_word(int on, int owner, int group) const {
        return landed[on] + static_cast<int64_t>(owner + 1) * landed_stride - kMostCombineGroups + group;
    }
};

struct combine_globals_layout {
    static constexpr int kPlan = 640, kQueue = 744, kRoles = 760, kLandedStride = 792, kRows = 800;
};

// How a block's memory is used for sums: the semaphores of all warps, then for each warp its row pieces and its finished
// stretches. All this overlays the GEMM's stages and output slots, never its semaphores.
template <typename Config>
struct combine_memory {
    static constexpr int kBytes = __builtin_offsetof(shared_storage<Config>, stage_full) / 128 * 128;
    // Warps that sum: those that multiply. The others rest, with the few registers that they may have kept.
    static constexpr int kWarps = Config::CONSUMER_WARPS;
    static constexpr int kReserveBytes = 1024;
    // Vectors of a piece in a lane, at most: their sums and the piece itself stand in registers.
    static constexpr int kVectors = geometry<Config>::kWgmma && geometry<Config>::kThreads <= 384 ? 8 : 4;
    static_assert(kWarps * kMostCombineSlots * sizeof(semaphore) <= kReserveBytes);
};

}  // namespace tkt
