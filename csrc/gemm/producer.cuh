// The producer role: walks the tasks, publishes each to the other roles, waits at the gate and keeps the ring of
// stages full. One warp; its first lane issues everything.
#pragma once

#include "order.cuh"

namespace tkt {

template <typename Config>
struct producer {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;

    // Waits until every reader has given the stage back, and announces what will land in it. Fragments are read by
    // ordinary loads: those, which the readers' arrivals publish, are ordered before the copy engine's writes here.
    // `phase` is the lap in which they read it; in the first lap nobody has.
    template <bool FIRST_LAP = false>
    static TKT_DEVICE semaphore& acquire(const globals& G, storage& smem, uint32_t index, uint32_t phase,
                                         uint32_t bytes) {
        if constexpr (!FIRST_LAP) {
            wait<wait_role::producer, wait_word::stage_free>(smem.stage_free[index], phase, G.guard);
            if constexpr (!geo::kWgmma) fence_async_shared();
        }
        tma::expect_bytes(smem.stage_full[index], bytes);
        return smem.stage_full[index];
    }

    static TKT_DEVICE semaphore& acquire(const globals& G, storage& smem, const ring<Config::STAGES>& stage,
                                         uint32_t bytes) {
        return acquire(G, smem, stage.index, stage.phase ^ 1, bytes);
    }

    static TKT_DEVICE uint32_t bytes(const task& t) {
        return (t.height / geo::kPieceRows) * geo::a_piece::kBytes + Config::CLUSTER * geo::b_piece::kBytes;
    }

    static TKT_DEVICE void prefetch_maps(const globals& G) {
        tma::prefetch_map(G.activations.maps[0]);
        tma::prefetch_map(G.weights.maps[0]);
        tma::prefetch_map(G.outputs.maps[0]);
    }

    static TKT_DEVICE void load_activations(const globals& G, typename storage::stage& to, semaphore& full,
                                            const task& t, int k, int rank) {
        // Rolled loops on purpose: where ptxas 13.0 turns a conditional load into a predicated one, it may set the
        // load's coordinate under a predicate that is not computed yet, and the load reads another row.
        const int pieces = t.height / geo::kPieceRows;
        if (Config::CLUSTER == 1 || t.share != task::share_a) {
#pragma unroll 1
            for (int piece = 0; piece < pieces; ++piece)
                tma::load_async<Config::KEEP_ACTIVATIONS>(to.a[piece], G.activations,
                                                          {t.row + piece * geo::kPieceRows, k}, full);
        } else {
#pragma unroll 1
            for (int piece = rank; piece < pieces; piece += Config::CLUSTER)
                tma::load_async_multicast<Config::KEEP_ACTIVATIONS>(to.a[piece], G.activations,
                                                                    {t.row + piece * geo::kPieceRows, k}, full, 3);
        }
    }

    static TKT_DEVICE void load_weights(const globals& G, typename storage::stage& to, semaphore& full,
                                        const task& t, int k, int rank) {
        constexpr int kPieceCols = Config::COL_BLOCK / Config::CLUSTER;
        const int base = t.expert * (geo::kEnk ? G.cols : G.reduction);
        auto at = [&](int piece) {
            const int col = t.col + piece * kPieceCols;
            return geo::kEnk ? coord{base + col, k} : coord{base + k, col};
        };
        if constexpr (Config::CLUSTER == 2) {
            if (t.share == task::share_b) {
                tma::load_async_multicast<Config::KEEP_WEIGHTS>(to.b[rank], G.weights, at(rank), full, 3);
                return;
            }
        }
#pragma unroll
        for (int piece = 0; piece < Config::CLUSTER; ++piece)
            tma::load_async<Config::KEEP_WEIGHTS>(to.b[piece], G.weights, at(piece), full);
    }

    template <typename Gate>
    static TKT_DEVICE void run(const globals& G, storage& smem, const Gate& gate, int unit, int num_units) {
        const int rank = Config::CLUSTER > 1 ? cluster_rank() : 0;
        // The wgmma forms are measured without `elect_lane`: there this warp has time to spare.
        auto issuer = [] { return geo::kWgmma ? lane_id() == 0 : elect_lane(); };
        if (issuer()) prefetch_maps(G);
        const int steps = G.reduction / Config::RED_BLOCK;
        task_order<Config> order(G, unit, num_units);
        begin_roles(smem);
        ring<Config::STAGES> stage;
        ring<geo::kTaskSlots> slot;

        for (;;) {
            const task t = order.next(rank);
            if (issuer()) {
                wait<wait_role::producer, wait_word::task_free>(smem.task_free[slot.index], slot.phase ^ 1,
                                                                G.guard);
                smem.tasks[slot.index] = t;
                arrive(smem.task_full[slot.index]);
            }
            slot.advance();
            if (t.height == 0) break;

            const uint32_t tile_bytes = bytes(t);
            if (issuer())
                for (int block = t.row / G.pad; block * G.pad < t.row + t.height; ++block) gate(block);
            auto load = [&](int from, int to) {
                for (int step = from; step < to; ++step) {
                    if (issuer()) {
                        semaphore& full = acquire(G, smem, stage, tile_bytes);
                        load_activations(G, smem.stages[stage.index], full, t, step * Config::RED_BLOCK, rank);
                        load_weights(G, smem.stages[stage.index], full, t, step * Config::RED_BLOCK, rank);
                    }
                    stage.advance();
                }
            };
            if constexpr (Config::DRAW == task_draw::dispenser) {
                // Two loops: in one, the compiler waits for the answer at the loop's next turn, since that might
                // draw again.
                load(0, steps / 2);
                order.draw();
                load(steps / 2, steps);
            } else {
                load(0, steps);
                order.draw();
            }
            __syncwarp();
        }
        order.finish();
    }
};

}  // namespace tkt
