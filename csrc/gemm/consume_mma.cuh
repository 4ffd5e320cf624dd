// Consumer role of the mma.sync main loop (any architecture from sm_90 on, and the only one of sm_120a): warps
// multiply fragments out of the stages, and each writes its part of a finished tile straight out of its registers. No
// warp waits for another but through the ring, so one may write while its neighbour multiplies.
#pragma once

#include "feeder.cuh"
#include "hooks.cuh"

namespace tkt {

template <typename Config>
struct mma_consumer {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;
    static constexpr int WARP_M = Config::WARP_M, WARP_N = Config::WARP_N;
    using accumulator = rt_fl<WARP_M, WARP_N>;
    struct yes {
        static constexpr bool value = true;
    };
    struct no {
        static constexpr bool value = false;
    };
    static_assert(Config::KEEP_OUTPUTS == tma::keep::normal, "outputs leave by ordinary stores");

    // The warp that reads a strip is the warp that writes it: both ask `row_strip`.
    static TKT_DEVICE int warp_row() { return row_strip<geo::kWarpRows>(warp_id() / geo::kWarpCols) * WARP_M; }
    static TKT_DEVICE int warp_col() { return (warp_id() % geo::kWarpCols) * WARP_N; }

    // What was read here the copy engine refills: whoever issues that load orders the two (`producer::acquire`), so
    // that no warp stops in the middle of its products for a fence.
    static TKT_DEVICE void release(storage& smem, int stage) {
        __syncwarp();
        if (lane_id() == 0) arrive(smem.stage_free[stage]);
    }

    // A stage is a run of chunks: 16 deep, 16 columns wide, each multiplied with the slice's whole column of `a`.
    // Chunks are fetched kAhead chunks early, across the stage boundary too, and the strips of a slice's `a` are
    // spread over its first fetches, so that the tensor cores never wait for a fragment. A ring of twice that many
    // chunks lets the compiler issue a fetch before the products that still read the older fragments. `between` runs
    // after each step, with the place and the lap of the stage that the warp has just given back.
    template <typename Between>
    static TKT_DEVICE void main_loop(const globals& G, storage& smem, accumulator& acc, ring<Config::STAGES>& stage,
                                     int steps, int row, int col, Between between) {
        constexpr int kWide = WARP_N / 16, kTall = WARP_M / 16, kChunks = Config::RED_BLOCK / 16 * kWide;
        constexpr int kAhead = kWide <= 4 ? kWide : kWide % 4 == 0 ? 4 : kWide % 3 == 0 ? 3 : kWide % 2 == 0 ? 2 : 1;
        constexpr int kRing = 2 * kAhead;
        constexpr int kLook = kChunks - kAhead > kWide ? kChunks - kAhead - kWide : 0;
        static_assert(kChunks % kRing == 0 && Config::RED_BLOCK % 32 == 0);
        rt_bf<WARP_M, 16> a[2];
        rt_bf<16, 16> b[kRing];
        auto fetch = [&](const typename storage::stage& from, int chunk) {
            const int k = chunk / kWide * 16, place = chunk % kWide, at = col + place * 16;
#pragma unroll
            for (int strip = 0; strip < kTall; ++strip)
                if (place < kAhead && strip * kAhead / kTall == place)
                    warp::load_strip(a[chunk / kWide % 2], strip, from.a[row / geo::kPieceRows],
                                     row % geo::kPieceRows + 16 * strip, k);
            if constexpr (geo::kEnk)
                warp::load_right(b[chunk % kRing], from.b[0], at, k);
            else
                warp::load_right_transposed(b[chunk % kRing], from.b[0], k, at);
        };
        auto multiply = [&](int chunk) {
            warp::mma(acc, a[chunk / kWide % 2], b[chunk % kRing], chunk % kWide * 16);
        };
        // One stage; `more` is a type, so that neither kind of step has a branch in it.
        auto compute = [&](auto more) {
            const uint32_t current = stage.index, lap = stage.phase;
            stage.advance();
            bool ready = true;
#pragma unroll
            for (int chunk = 0; chunk < kChunks - kAhead; ++chunk) {
                if (more.value && chunk == kLook) ready = test_wait(smem.stage_full[stage.index], stage.phase);
                fetch(smem.stages[current], chunk + kAhead);
                multiply(chunk);
            }
            release(smem, current);
            if (more.value && !ready)
                wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase, G.guard);
#pragma unroll
            for (int chunk = kChunks - kAhead; chunk < kChunks; ++chunk) {
                if (more.value) fetch(smem.stages[stage.index], chunk + kAhead - kChunks);
                multiply(chunk);
            }
            between(current, lap);
        };

        wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase, G.guard);
#pragma unroll
        for (int chunk = 0; chunk < kAhead; ++chunk) fetch(smem.stages[stage.index], chunk);
        int step = 1;
        if constexpr (!geo::kFedByConsumer) {  // two steps a turn: the way back costs as much as six products
#pragma unroll 1
            for (; step + 1 < steps; step += 2) {
                compute(yes{});
                compute(yes{});
            }
        }
#pragma unroll 1
        for (; step < steps; ++step) compute(yes{});
        compute(no{});
    }

    static TKT_DEVICE void skip_loop(const globals& G, storage& smem, ring<Config::STAGES>& stage, int steps) {
        for (int step = 0; step < steps; ++step) {
            wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase, G.guard);
            release(smem, stage.index);
            stage.advance();
        }
    }

    // By one thread. The epilogue of a tile runs when this warp has written the next one, or at the end: by then the
    // other warps' writes have long arrived, and nobody waits for them.
    template <typename Epilogue>
    struct announcer {
        static constexpr bool kSilent = __is_same(Epilogue, no_epilogue);
        task written{0, 0, 0, 0, 0};
        uint32_t phase = 0;

        TKT_DEVICE void operator()(const globals& G, storage& smem, const Epilogue& epilogue) {
            if (kSilent || written.height == 0) return;
            wait<wait_role::consumer, wait_word::out_full>(smem.tile_out, phase, G.guard);
            phase ^= 1;
            __threadfence();  // the other warps' writes, for whoever hears of them
            for (int block = written.row / G.pad; block * G.pad < written.row + written.height; ++block)
                epilogue(block, written.col / Config::COL_BLOCK);
            written.height = 0;
        }
    };

    template <typename Epilogue, typename Between>
    static TKT_DEVICE void run(const globals& G, storage& smem, const Epilogue& epilogue, Between between) {
        const int steps = G.reduction / Config::RED_BLOCK;
        const int row = warp_row(), col = warp_col();
        const bool speaks = threadIdx.x == 0;
        ring<Config::STAGES> stage;
        ring<geo::kTaskSlots> slot;
        announcer<Epilogue> announce;
        for (;;) {
            wait<wait_role::consumer, wait_word::task_full>(smem.task_full[slot.index], slot.phase, G.guard);
            const task t = smem.tasks[slot.index];
            arrive(smem.task_free[slot.index]);
            slot.advance();
            if (t.height == 0) break;

            if (row < t.height) {
                accumulator acc;
                warp::zero(acc);
                main_loop(G, smem, acc, stage, steps, row, col, between);
                warp::store<WARP_N / geo::kFold, typename Config::Finish>(G.outputs.data, G.outputs.cols, acc, t.row + row,
                                                                          (t.col + col) / geo::kFold);
            } else {
                skip_loop(G, smem, stage, steps);
            }
            if constexpr (!announcer<Epilogue>::kSilent) {
                __syncwarp();
                if (speaks) announce(G, smem, epilogue);
                if (lane_id() == 0) arrive(smem.tile_out);
                announce.written = t;
            }
        }
        if (speaks) announce(G, smem, epilogue);
    }

    // The role where a warp of its own feeds the ring.
    template <typename Epilogue>
    static TKT_DEVICE void run(const globals& G, storage& smem, const Epilogue& epilogue) {
        run(G, smem, epilogue, [](uint32_t, uint32_t) {});
    }

    // The role where the first consumer warp feeds it.
    template <typename Gate, typename Epilogue>
    static TKT_DEVICE void run_and_feed(const globals& G, storage& smem, const Gate& gate, const Epilogue& epilogue,
                                        int unit, int num_units) {
        const bool feeds = warp_id() == geo::kProducer;
        feeder<Config, Gate> feed(G, smem, gate, unit, num_units);
        if (feeds) feed.fill();
        run(G, smem, epilogue, [&](uint32_t index, uint32_t lap) {
            if (feeds) feed.feed(index, lap);
        });
        if (feeds) feed.finish();
    }
};

}  // namespace tkt
