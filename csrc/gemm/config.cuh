// What a grouped GEMM variant is made of: the build parameters, everything derived from them, the block's shared
// memory and the globals of a launch. No control flow.
#pragma once

#include "../tile/tile.cuh"

namespace tkt {

enum class main_loop { mma_sync = 0, wgmma = 1, wgmma_pingpong = 2 };
enum class weight_layout { ekn = 0, enk = 1 };
enum class task_draw { stride = 0, dispenser = 1 };
// Where a slot's row stands: gathered in slot order, or anywhere, as a table of the gate says (indexed.cuh).
enum class activation_rows { gathered = 0, indexed = 1 };

// A Config is a struct of static constexpr members; csrc/kernels/grouped_gemm.cu documents each of them.
// `geometry` derives the rest and refuses what cannot work.
template <typename Config>
struct geometry : Config {
    using Config::CLUSTER;
    using Config::COL_BLOCK;
    using Config::CONSUMER_WARPS;
    using Config::OUT_SLOTS;
    using Config::RED_BLOCK;
    using Config::ROW_BLOCK;
    using Config::STAGES;

    static constexpr bool kWgmma = Config::MAIN_LOOP != main_loop::mma_sync;
    static constexpr bool kPingPong = Config::MAIN_LOOP == main_loop::wgmma_pingpong;
    static constexpr bool kEnk = Config::WEIGHT_LAYOUT == weight_layout::enk;
    // mma.sync may do without a producer warp: its first consumer warp then feeds the ring between two steps.
    static constexpr bool kIndexed = Config::ACTIVATIONS == activation_rows::indexed;
    static constexpr int kLoaderWarps = kIndexed ? 2 : 0;      // the last of the producers
    static constexpr int kLoadDepth = STAGES > 3 ? 2 : 1;      // stages that they have asked for and not announced
    static constexpr int kProducerWarps = kWgmma ? 4 : Config::PRODUCER_WARPS;
    static constexpr bool kFedByConsumer = kProducerWarps == 0;
    static constexpr int kProducer = kFedByConsumer ? 0 : CONSUMER_WARPS;  // the warp that walks, waits and loads
    static constexpr int kThreads = (CONSUMER_WARPS + kProducerWarps) * kWarpThreads;

    // A tile's rows move in pieces, so that a tile of few rows moves and computes only the pieces it needs.
    static constexpr int kPieceRows = ROW_BLOCK >= 128 ? 64 : ROW_BLOCK;
    static constexpr int kPieces = ROW_BLOCK / kPieceRows;

    using a_piece = st_bf<kPieceRows, RED_BLOCK>;
    // Blocks of a cluster that share a weight tile fetch one piece each.
    using b_piece = st_bf<kEnk ? COL_BLOCK / CLUSTER : RED_BLOCK, kEnk ? RED_BLOCK : COL_BLOCK / CLUSTER>;
    using a_box = st_bf<kPieceRows, a_piece::kWide>;
    using b_box = st_bf<b_piece::rows, b_piece::kWide>;
    static constexpr int kStageBytes = kPieces * a_piece::kBytes + CLUSTER * b_piece::kBytes;

    // wgmma: how warpgroups divide a tile. In ping-pong each takes a whole tile in turn.
    static constexpr int kWarpgroups = kWgmma ? CONSUMER_WARPS / 4 : 1;
    static constexpr int kGroupRows = kPingPong ? 1 : (kWarpgroups < ROW_BLOCK / 64 ? kWarpgroups : ROW_BLOCK / 64);
    static constexpr int kGroupCols = kPingPong || !kWgmma ? 1 : kWarpgroups / kGroupRows;
    static constexpr int kGroupM = kWgmma ? ROW_BLOCK / kGroupRows : 64;
    static constexpr int kGroupN = kWgmma ? COL_BLOCK / kGroupCols : 64;
    // A warpgroup's output columns leave in whole panels where they fill them, else in halves of one. Output slots belong
    // to a warpgroup, or in ping-pong, where one warpgroup writes at a time, to all.
    static constexpr int kFold = Config::Finish::kFold;
    static constexpr int kOutN = kGroupN / kFold;
    static constexpr int kOutCols = kWgmma && kOutN % kPanelCols != 0 ? kPanelCols / 2 : kPanelCols;
    static constexpr int kOutRings = kPingPong ? 1 : kWarpgroups;
    using c_piece = st_bf<kPieceRows, kOutCols>;
    using out_tile = st_bf<64, kOutCols>;
    static constexpr int kSlotBytes = kWgmma ? out_tile::kBytes : 0;

    // mma.sync: how warps divide a tile.
    static constexpr int kWarpRows = kWgmma ? 1 : ROW_BLOCK / Config::WARP_M;
    static constexpr int kWarpCols = kWgmma ? 1 : COL_BLOCK / Config::WARP_N;

    static constexpr int kFreeArrivals = (kPingPong ? 4 : CONSUMER_WARPS) * CLUSTER;
    // Who feeds the ring between its own steps must never wait for a slot that it has not read itself.
    static constexpr int kTaskSlots = kFedByConsumer ? STAGES : 2;

    static_assert(ROW_BLOCK % 16 == 0 && COL_BLOCK % 64 == 0 && COL_BLOCK <= 256);
    static_assert(RED_BLOCK % 64 == 0 || (!kWgmma && RED_BLOCK == 32), "wgmma reads panels of 64");
    static_assert(kWgmma || kProducerWarps == 0 || kProducerWarps == 1);
    static_assert(b_box::rows <= 256 && (kEnk || RED_BLOCK <= 256), "a TMA box has at most 256 rows");
    static_assert(CLUSTER == 1 || (CLUSTER == 2 && kWgmma && RED_BLOCK == 64 && (kEnk || COL_BLOCK % 128 == 0)));
    static_assert(CLUSTER == 1 || Config::DRAW == task_draw::stride, "a cluster's blocks would draw different tasks");
    static_assert(!kWgmma || (CONSUMER_WARPS % 4 == 0 && ROW_BLOCK % 64 == 0 && kGroupM % 64 == 0 &&
                              kGroupN % 64 == 0 && kGroupRows * kGroupCols * (kPingPong ? kWarpgroups : 1) ==
                                                       kWarpgroups));
    static_assert(kWgmma || (kWarpRows * kWarpCols == CONSUMER_WARPS && Config::WARP_M % 16 == 0 &&
                             Config::WARP_N % 16 == 0 && Config::WARP_M <= kPieceRows),
                  "mma.sync: the warps' tiles cover the block's");
    static_assert(!kIndexed || (kWgmma && CLUSTER == 1 && RED_BLOCK == 64 && kPieceRows == 64), "indexed rows");
    static_assert(!kIndexed || kLoadDepth + Config::MMA_DEPTH < STAGES,
                  "stages that are asked for, and not announced, beside those that consumers hold");
};

// One unit of work of one block. `height` is the rows to compute, whole pieces (0 ends the walk); `share` is the
// operand that the blocks of a cluster fetch together.
struct task {
    enum : int { share_none = 0, share_a = 1, share_b = 2 };
    int32_t row, col;
    int16_t expert, height;
    int32_t share;
};

template <typename Config>
struct shared_storage {
    using geo = geometry<Config>;
    struct stage {
        typename geo::a_piece a[geo::kPieces];
        typename geo::b_piece b[geo::CLUSTER];
    };
    stage stages[Config::STAGES];
    char out[geo::kOutRings * Config::OUT_SLOTS * geo::kSlotBytes + 16];  // wgmma only; then 16 bytes of air

    semaphore stage_full[Config::STAGES], stage_free[Config::STAGES];
    semaphore task_full[geo::kTaskSlots], task_free[geo::kTaskSlots];
    semaphore out_full[geo::kOutRings * Config::OUT_SLOTS], out_free[geo::kOutRings * Config::OUT_SLOTS];
    semaphore turn[geo::kWarpgroups], out_turn[geo::kWarpgroups];  // ping-pong only: whose main loop, whose output
    semaphore tile_out;                                            // mma.sync only: all warps have written a tile
    task tasks[geo::kTaskSlots];

    TKT_DEVICE typename geo::out_tile& out_slot(int slot) {
        return *reinterpret_cast<typename geo::out_tile*>(out + slot * geo::kSlotBytes);
    }

    TKT_DEVICE void init_semaphores() {
        for (int s = 0; s < Config::STAGES; ++s) {
            init_semaphore(stage_full[s], 1 + geo::kLoaderWarps);
            init_semaphore(stage_free[s], geo::kFreeArrivals);
        }
        for (int s = 0; s < geo::kTaskSlots; ++s) {
            init_semaphore(task_full[s], 1);
            // Every reading thread arrives: once a tile that costs nothing, and racecheck follows it.
            init_semaphore(task_free[s], (Config::CONSUMER_WARPS + geo::kLoaderWarps) * kWarpThreads +
                                             (geo::kWgmma ? 1 : 0));
        }
        for (int s = 0; s < geo::kOutRings * Config::OUT_SLOTS; ++s) {
            init_semaphore(out_full[s], 4);
            init_semaphore(out_free[s], 1);
        }
        init_semaphore(tile_out, Config::CONSUMER_WARPS);
        for (int s = 0; s < geo::kWarpgroups; ++s) {
            init_semaphore(turn[s], 4);
            init_semaphore(out_turn[s], 4);
        }
        publish_semaphores();
    }
};

// Every thread of the block comes here once, from its role's branch, before the first use of a semaphore: a role's
// code is then already being fetched while the semaphores are made.
template <typename Config>
TKT_DEVICE void begin_roles(shared_storage<Config>& smem) {
    if (threadIdx.x == 0) smem.init_semaphores();
    __syncthreads();
    if constexpr (Config::CLUSTER > 1) cluster_sync();
}

// Where an expert's rows are, in walk order, and which column tiles the walk computes of them: the first × 65536 and how
// many, or 0 for all. Rows start at a pad boundary; `rows` counts real ones.
struct expert_rows {
    int32_t expert, first_row, rows, columns;
};

// The launch arguments; the host mirrors this layout (offsets are asserted below).
template <typename Config>
struct gemm_globals {
    using geo = geometry<Config>;
    gl<bf16, typename geo::a_box> activations;  // (capacity, K)
    gl<bf16, typename geo::b_box> weights;      // (E · N, K) or (E · K, N)
    gl<bf16, typename geo::c_piece> outputs;    // (capacity, N / kFold)
    const expert_rows* walk;                    // (num_experts), longest first where that pays
    int32_t* dispenser;                         // 2 words, zero before the first launch; the launch re-zeroes them
    spin_guard guard;
    int32_t num_experts;
    int32_t reduction;    // K
    int32_t cols;         // N
    int32_t pad;
    int32_t raster_rows;  // row tiles of an expert that advance together before the column changes; 0: all
    int32_t turn_back;    // strides: 1, they run forth and back; dispenser: waves beyond the first that are dealt by stride
};

struct gemm_globals_layout {
    static constexpr int kActivations = 0, kWeights = 192, kOutputs = 384, kWalk = 576, kDispenser = 584,
                         kGuard = 592, kNumExperts = 616, kReduction = 620, kCols = 624, kPad = 628,
                         kRasterRows = 632, kBytes = 640;
};

}  // namespace tkt
