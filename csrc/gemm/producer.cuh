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
        const bool issuer = lane_id() == 0;
        if (issuer) {
            tma::prefetch_map(G.activations.maps[0]);
            tma::prefetch_map(G.weights.maps[0]);
            tma::prefetch_map(G.outputs.maps[0]);
        }
        const int steps = G.reduction / Config::RED_BLOCK;
        const int draw_at = steps / 2;  // an atomic behind this much traffic takes microseconds
        task_order<Config> order(G, unit, num_units);
        begin_roles(smem);
        ring<Config::STAGES> stage;
        ring<geo::kTaskSlots> slot;

        for (;;) {
            const task t = order.next(rank);
            if (issuer) {
                wait<wait_role::producer, wait_word::task_free>(smem.task_free[slot.index], slot.phase ^ 1,
                                                                G.guard);
                smem.tasks[slot.index] = t;
                arrive(smem.task_full[slot.index]);
            }
            slot.advance();
            if (t.height == 0) break;

            const uint32_t bytes = (t.height / geo::kPieceRows) * geo::a_piece::kBytes +
                                   Config::CLUSTER * geo::b_piece::kBytes;
            if (issuer)
                for (int block = t.row / G.pad; block * G.pad < t.row + t.height; ++block) gate(block);
            for (int step = 0; step < steps; ++step) {
                if (step == draw_at) order.draw();
                if (issuer) {
                    semaphore& full = smem.stage_full[stage.index];
                    wait<wait_role::producer, wait_word::stage_free>(smem.stage_free[stage.index], stage.phase ^ 1,
                                                                     G.guard);
                    tma::expect_bytes(full, bytes);
                    load_activations(G, smem.stages[stage.index], full, t, step * Config::RED_BLOCK, rank);
                    load_weights(G, smem.stages[stage.index], full, t, step * Config::RED_BLOCK, rank);
                }
                stage.advance();
            }
            __syncwarp();
        }
        order.finish();
    }
};

}  // namespace tkt
