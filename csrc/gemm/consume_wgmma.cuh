// Consumer and storer roles of the wgmma main loop (sm_90a): warpgroups multiply out of the stages, round into
// small output slots, and go on; one storer thread moves the slots to global memory and calls the epilogue.
#pragma once

#include "config.cuh"

namespace tkt {

template <typename Config>
struct wgmma_consumer {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;
    using accumulator = rt_fl<16, geo::kGroupN>;
    static constexpr int kM = geo::kGroupM / 64;
    static_assert(kM <= 2);

    static TKT_DEVICE void release(storage& smem, int stage) {
        if constexpr (Config::CLUSTER == 1) {
            if (lane_id() == 0) arrive(smem.stage_free[stage]);
        } else {
            if (lane_id() < Config::CLUSTER) arrive_at(smem.stage_free[stage], lane_id());
        }
    }

    // One batch of tensor work: a stage's whole reduction depth for the first M strips of 64 rows.
    template <int M>
    static TKT_DEVICE void multiply(accumulator (&acc)[kM], const typename storage::stage& from, int first_piece,
                                    int first_col, bool accumulate) {
        const uint32_t a = from.a[0].address() + first_piece * geo::a_piece::kBytes;
        const uint32_t b = from.b[0].address();
#pragma unroll
        for (int k = 0; k < Config::RED_BLOCK; k += 16) {
            const uint32_t a_k = a + (k / 64) * geo::a_box::kBytes + (k % 64) * 2;
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if constexpr (geo::kEnk) {
                    const uint32_t b_k = b + (k / 64) * geo::b_box::kBytes + (k % 64) * 2;
                    warpgroup::mma_async_ABt(acc[m], a_k + m * geo::a_piece::kBytes,
                                             b_k + first_col * kPanelRowBytes, accumulate || k > 0);
                } else {
                    warpgroup::mma_async_AB(acc[m], a_k + m * geo::a_piece::kBytes,
                                            b + (first_col / 64) * geo::b_box::kBytes + k * kPanelRowBytes,
                                            geo::b_box::kBytes, accumulate || k > 0);
                }
            }
        }
        warpgroup::mma_commit();
    }

    // In ping-pong the next warpgroup may look at the stages only when this one has seen its last stage full: a
    // phase bit tells one lap from the next, not from the one after, and the tensor cores work for one tile.
    static TKT_DEVICE void pass_turn(semaphore* turns) {
        const int next = (warp_id() / 4 + 1) % geo::kWarpgroups;
        __syncwarp();
        if (lane_id() == 0) arrive(turns[next]);
    }

    // MMA_DEPTH 1 keeps the next batch queued behind the running one, and so holds two stages; 0 holds one and
    // leaves it to the other warpgroup to fill the gap between two batches.
    template <int M>
    static TKT_DEVICE void main_loop(const globals& G, storage& smem, accumulator (&acc)[kM],
                                     ring<Config::STAGES>& stage, int steps, int first_piece, int first_col) {
        uint32_t held = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase, G.guard);
            if (geo::kPingPong && step + 1 == steps) pass_turn(smem.turn);
            warpgroup::mma_fence();
            multiply<M>(acc, smem.stages[stage.index], first_piece, first_col, step > 0);
            warpgroup::mma_wait<Config::MMA_DEPTH>();
            if (Config::MMA_DEPTH == 0)
                release(smem, stage.index);
            else if (step > 0)
                release(smem, held);
            held = stage.index;
            stage.advance();
        }
        if (Config::MMA_DEPTH > 0) {
            warpgroup::mma_wait<0>();
            release(smem, held);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) warpgroup::pin(acc[m]);
    }

    static TKT_DEVICE void skip_loop(const globals& G, storage& smem, ring<Config::STAGES>& stage, int steps) {
        for (int step = 0; step < steps; ++step) {
            wait<wait_role::consumer, wait_word::stage_full>(smem.stage_full[stage.index], stage.phase, G.guard);
            __syncwarp();
            release(smem, stage.index);
            stage.advance();
        }
    }

    static constexpr int kPanels = geo::kOutN / geo::kOutCols;

    template <int M>
    static TKT_DEVICE void put_out(const globals& G, storage& smem, accumulator (&acc)[kM],
                                   ring<Config::OUT_SLOTS>& out, int warpgroup_index) {
        const int warp_row = 16 * (warp_id() % 4);
        const int first_slot = geo::kPingPong ? 0 : warpgroup_index * Config::OUT_SLOTS;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int col = 0; col < geo::kOutN; col += geo::kOutCols) {
                const int at = first_slot + out.index;
                wait<wait_role::consumer, wait_word::out_free>(smem.out_free[at], out.phase ^ 1, G.guard);
                warp::store<geo::kOutCols, typename Config::Finish>(smem.out_slot(at), acc[m], 0, col, warp_row, 0);
                fence_async_shared();
                __syncwarp();
                if (lane_id() == 0) arrive(smem.out_full[at]);
                out.advance();
            }
        }
    }

    // The strips of 64 rows that a warpgroup has in a tile of this height, dealt evenly from the top.
    struct share {
        int first, strips;
    };
    static TKT_DEVICE share share_of(int height, int warpgroup_index) {
        const int all = height / 64;
        if constexpr (geo::kPingPong || geo::kGroupRows == 1) return {0, all};
        const int each = ceil_div(all, geo::kGroupRows), first = each * (warpgroup_index / geo::kGroupCols);
        return {first, min(max(all - first, 0), each)};
    }
    static TKT_DEVICE int first_col(int warpgroup_index) {
        return geo::kPingPong ? 0 : (warpgroup_index % geo::kGroupCols) * geo::kGroupN;
    }

    template <int M>
    static TKT_DEVICE void compute(const globals& G, storage& smem, ring<Config::STAGES>& stage,
                                   ring<Config::OUT_SLOTS>& out, int steps, int first_strip, int warpgroup_index,
                                   uint32_t turn_phase) {
        accumulator acc[kM];
        main_loop<M>(G, smem, acc, stage, steps, first_strip, first_col(warpgroup_index));
        if (geo::kPingPong)
            wait<wait_role::consumer, wait_word::turn>(smem.out_turn[warpgroup_index], turn_phase, G.guard);
        put_out<M>(G, smem, acc, out, warpgroup_index);
        if (geo::kPingPong) pass_turn(smem.out_turn);
    }

    static TKT_DEVICE void run(const globals& G, storage& smem, int warpgroup_index) {
        const int steps = G.reduction / Config::RED_BLOCK;
        ring<Config::STAGES> stage;
        ring<geo::kTaskSlots> slot;
        ring<Config::OUT_SLOTS> out;
        uint32_t turn_phase = warpgroup_index == 0 ? 1 : 0;  // the first warpgroup has the first turn
        int turn = 0;
        for (;;) {
            wait<wait_role::consumer, wait_word::task_full>(smem.task_full[slot.index], slot.phase, G.guard);
            const int height = smem.tasks[slot.index].height;
            arrive(smem.task_free[slot.index]);
            slot.advance();
            if (height == 0) break;

            if constexpr (geo::kPingPong) {
                const bool my_turn = turn == warpgroup_index;
                turn = turn + 1 == geo::kWarpgroups ? 0 : turn + 1;
                if (!my_turn) {
                    stage.advance(steps);
                    out.advance(height / 64 * kPanels);
                    continue;
                }
                wait<wait_role::consumer, wait_word::turn>(smem.turn[warpgroup_index], turn_phase, G.guard);
            }
            const share mine = share_of(height, warpgroup_index);
            if (mine.strips == kM)
                compute<kM>(G, smem, stage, out, steps, mine.first, warpgroup_index, turn_phase);
            else if (kM > 1 && mine.strips > 0)
                compute<1>(G, smem, stage, out, steps, mine.first, warpgroup_index, turn_phase);
            else
                skip_loop(G, smem, stage, steps);
            turn_phase ^= 1;
        }
    }
};

// The storer: one thread, so that whoever issued a tile's stores also waits for them and announces the tile.
template <typename Config>
struct wgmma_storer {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;
    using consumer = wgmma_consumer<Config>;

    template <typename Epilogue>
    static TKT_DEVICE void run(const globals& G, storage& smem, const Epilogue& epilogue) {
        ring<geo::kTaskSlots> slot;
        ring<Config::OUT_SLOTS> out[geo::kOutRings];
        int turn = 0;
        for (;;) {
            wait<wait_role::storer, wait_word::task_full>(smem.task_full[slot.index], slot.phase, G.guard);
            const task t = smem.tasks[slot.index];
            arrive(smem.task_free[slot.index]);
            slot.advance();
            if (t.height == 0) break;

#pragma unroll
            for (int group = 0; group < geo::kWarpgroups; ++group) {
                if (geo::kPingPong && group != turn) continue;
                const auto share = consumer::share_of(t.height, group);
                const int out_ring = group % geo::kOutRings;
                store_group(G, smem, out[out_ring], out_ring, t.row + 64 * share.first,
                            (t.col + consumer::first_col(group)) / geo::kFold, share.strips);
            }
            if constexpr (geo::kPingPong) turn = turn + 1 == geo::kWarpgroups ? 0 : turn + 1;
            tma::store_async_wait<0>();
            if (t.col >= G.cols) continue;  // a cluster's second block beyond the last column
            for (int block = t.row / G.pad; block * G.pad < t.row + t.height; ++block)
                epilogue(block, t.col / Config::COL_BLOCK);
        }
    }

    // A slot is freed when the next store has been issued, so that reading one overlaps issuing the other.
    static TKT_DEVICE void store_group(const globals& G, storage& smem, ring<Config::OUT_SLOTS>& out, int out_ring,
                                       int row, int col, int strips) {
        constexpr bool kOverlap = Config::OUT_SLOTS > 1;
        semaphore* held = nullptr;
#pragma unroll 1
        for (int piece = 0; piece < strips * consumer::kPanels; ++piece) {
            const int at = out_ring * Config::OUT_SLOTS + out.index;
            const int strip = piece / consumer::kPanels;
            wait<wait_role::storer, wait_word::out_full>(smem.out_full[at], out.phase, G.guard);
            tma::store_async<Config::KEEP_OUTPUTS>(G.outputs, smem.out_slot(at),
                             {row + 64 * strip, col + (piece % consumer::kPanels) * geo::kOutCols});
            tma::commit();
            if (kOverlap && held) {
                tma::store_async_read_wait<1>();
                arrive(*held);
            }
            held = &smem.out_free[at];
            if (!kOverlap) {
                tma::store_async_read_wait<0>();
                arrive(*held);
            }
            out.advance();
        }
        if (kOverlap && held) {
            tma::store_async_read_wait<0>();
            arrive(*held);
        }
    }
};

}  // namespace tkt
