// Consumer role of the mma.sync main loop (any architecture from sm_90 on, and the only one of sm_120a): warps
// multiply fragments out of the stages; the finished tile is laid over the last stage they read.
#pragma once

#include "config.cuh"

namespace tkt {

template <typename Config>
struct mma_consumer {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;
    using barriers = barrier_registry<Config::CONSUMER_WARPS>;
    static constexpr int WARP_M = Config::WARP_M, WARP_N = Config::WARP_N;
    using accumulator = rt_fl<WARP_M, WARP_N>;

    // The warp that reads a strip is the warp that writes it: both ask `row_strip`.
    static TKT_DEVICE int warp_row() { return row_strip<geo::kWarpRows>(warp_id() / geo::kWarpCols) * WARP_M; }
    static TKT_DEVICE int warp_col() { return (warp_id() % geo::kWarpCols) * WARP_N; }

    // Ordinary reads must be ordered before the copy engine refills what they read.
    static TKT_DEVICE void release(storage& smem, int stage) {
        fence_async_shared();
        __syncwarp();
        if (lane_id() == 0) arrive(smem.stage_free[stage]);
    }

    // A stage is a run of chunks: 16 deep, 16 columns wide, each multiplied with the slice's whole column of `a`.
    // Chunks are fetched kAhead chunks early, across the stage boundary too, so that the tensor cores never wait
    // for a fragment and few registers hold fragments. Leaves the last stage unreleased and returns its index:
    // the output goes there.
    static TKT_DEVICE int main_loop(const globals& G, storage& smem, accumulator& acc, ring<Config::STAGES>& stage,
                                    int steps, int row, int col) {
        constexpr int kWide = WARP_N / 16, kChunks = Config::RED_BLOCK / 16 * kWide;
        constexpr int kAhead = kWide < 4 ? kWide : 4;
        rt_bf<WARP_M, 16> a[2];
        rt_bf<16, 16> b[kAhead];
        auto fetch = [&](const typename storage::stage& from, int chunk) {
            const int k = chunk / kWide * 16, at = col + chunk % kWide * 16;
            if (chunk % kWide == 0)
                warp::load(a[chunk / kWide % 2], from.a[row / geo::kPieceRows], row % geo::kPieceRows, k);
            if constexpr (geo::kEnk)
                warp::load_right(b[chunk % kAhead], from.b[0], at, k);
            else
                warp::load_right_transposed(b[chunk % kAhead], from.b[0], k, at);
        };
        static_assert(kChunks % kAhead == 0);

        wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase, G.guard);
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) fetch(smem.stages[stage.index], chunk);
        int last = stage.index;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            last = stage.index;
            stage.advance();
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                warp::mma(acc, a[chunk / kWide % 2], b[chunk % kAhead], chunk % kWide * 16);
                if (chunk + kAhead < kChunks) {
                    fetch(smem.stages[last], chunk + kAhead);
                } else if (step + 1 < steps) {
                    if (chunk + kAhead == kChunks) {
                        release(smem, last);
                        wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase,
                                                                         G.guard);
                    }
                    fetch(smem.stages[stage.index], chunk + kAhead - kChunks);
                }
            }
        }
        return last;
    }

    static TKT_DEVICE int skip_loop(const globals& G, storage& smem, ring<Config::STAGES>& stage, int steps) {
        int last = stage.index;
        for (int step = 0; step < steps; ++step) {
            last = stage.index;
            wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[last], stage.phase, G.guard);
            if (step + 1 < steps) release(smem, last);
            stage.advance();
        }
        return last;
    }

    // The output tile over stage memory: pieces of kPieceRows × 64, row pieces outermost.
    static TKT_DEVICE typename geo::c_piece& out_piece(typename storage::stage& over, int row, int col) {
        auto* pieces = reinterpret_cast<typename geo::c_piece*>(&over);
        return pieces[(row / geo::kPieceRows) * (Config::COL_BLOCK / kPanelCols) + col / kPanelCols];
    }

    static TKT_DEVICE void put_out(typename storage::stage& over, accumulator& acc, int row, int col) {
        Config::Finish::apply(acc);
#pragma unroll
        for (int r = 0; r < WARP_M; r += 16)
#pragma unroll
            for (int c = 0; c < WARP_N; c += 16)
                warp::store<16>(out_piece(over, row + r, col + c), acc, r / 16, c, (row + r) % geo::kPieceRows,
                                (col + c) % kPanelCols);
        fence_async_shared();
    }

    // By one thread. The epilogue of a tile runs when the next tile is stored, or at the end.
    template <typename Epilogue>
    struct announcer {
        task stored{0, 0, 0, 0, 0};
        TKT_DEVICE void operator()(const globals& G, const Epilogue& epilogue) {
            tma::store_async_wait<0>();
            for (int block = stored.row / G.pad; block * G.pad < stored.row + stored.height; ++block)
                epilogue(block, stored.col / Config::COL_BLOCK);
            stored.height = 0;
        }
    };

    template <typename Epilogue>
    static TKT_DEVICE void run(const globals& G, storage& smem, const Epilogue& epilogue) {
        const int steps = G.reduction / Config::RED_BLOCK;
        const int row = warp_row(), col = warp_col();
        const bool storer = threadIdx.x == 0;
        ring<Config::STAGES> stage;
        ring<geo::kTaskSlots> slot;
        announcer<Epilogue> announce;
        for (;;) {
            wait<wait_role::consumer, wait_word::task_full>(smem.task_full[slot.index], slot.phase, G.guard);
            const task t = smem.tasks[slot.index];
            arrive(smem.task_free[slot.index]);
            slot.advance();
            if (t.height == 0) break;

            int last;
            if (row < t.height) {
                accumulator acc;
                warp::zero(acc);
                last = main_loop(G, smem, acc, stage, steps, row, col);
                barriers::consumers::sync();  // everyone has read the stage that the output overwrites
                put_out(smem.stages[last], acc, row, col);
            } else {
                last = skip_loop(G, smem, stage, steps);
                barriers::consumers::sync();
            }
            barriers::consumers::sync();
            if (storer) {
                announce(G, epilogue);
#pragma unroll 1
                for (int r = 0; r < t.height; r += geo::kPieceRows)
#pragma unroll 1
                    for (int c = 0; c < Config::COL_BLOCK; c += kPanelCols)
                        tma::store_async<Config::KEEP_OUTPUTS>(G.outputs, out_piece(smem.stages[last], r, c),
                                                               {t.row + r, t.col + c});
                tma::commit();
                announce.stored = t;
                tma::store_async_read_wait<0>();
            }
            release(smem, last);
        }
        if (storer) announce(G, epilogue);
    }
};

}  // namespace tkt
