// The combine roles: the epilogue that announces landed rows, and the job loop in which warps form weighted sums of
// landed rows, where the rows are (pre-reduce: one row is pushed to the token's rank) or where the token is (pull).
// They wait only for tiles, which wait for nothing, so that whoever waits for a sum is always served.
#pragma once

#include "combine_config.cuh"
#include "combine_signals.cuh"

namespace tkt {

// Hook 2. Whoever completes the last tile of a run of columns is elected to announce it. Each tile's stores are
// performed before it is counted, and all counts happen before the announcement.
template <typename Globals>
struct combine_epilogue {
    using config = typename Globals::config;
    using geo = geometry<config>;
    const Globals& G;

    // Row tiles that overlap a pad block: an expert's pieces are dealt evenly over its tiles.
    TKT_DEVICE int row_tiles(int pad_block) const {
        const int2 expert = __ldg(G.experts + __ldg(G.block_expert + pad_block));
        const int pieces = ceil_div(expert.y, geo::kPieceRows);
        const int begin = (pad_block * G.gemm.pad - expert.x) / geo::kPieceRows;
        const int end = min(begin + G.gemm.pad / geo::kPieceRows, pieces);
        const typename task_order<config>::tiling t(pieces);
        return tile_of(t, end - 1) - tile_of(t, begin) + 1;
    }
    static TKT_DEVICE int tile_of(const typename task_order<config>::tiling& t, int piece) {
        const int tall_pieces = t.tall * (t.low_pieces + 1);
        return piece < tall_pieces ? piece / (t.low_pieces + 1) : t.tall + (piece - tall_pieces) / t.low_pieces;
    }

    TKT_DEVICE void operator()(int pad_block, int col_block) const {
        if (!(G.roles & TKT_GATED)) return;
        const int tiles = ceil_div<int>(G.gemm.cols, config::COL_BLOCK) / G.groups, group = col_block / tiles;
        const int word = pad_block * G.groups + group;
        if (add_acquire_release(G.finished + word, 1) != row_tiles(pad_block) * tiles - 1) return;
        const uint64_t epoch = *G.sequence;
        const int64_t at = static_cast<int64_t>(G.gemm.guard.rank) * G.landed_stride + word;
        if (G.form != TKT_FORM_PULL) {
            announce_here(G.landed[G.gemm.guard.rank] + at, epoch);
            return;
        }
        __threadfence_system();
#pragma unroll 1
        for (int r = 0; r < Globals::world; ++r) announce(G.landed[r] + at, epoch);
    }
};

// Eight products more; each one exact or rounded with its addition, in the order of the calls.
TKT_DEVICE void add_weighted(float (&sum)[kVectorCols], float weight, uint4 row) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}
TKT_DEVICE uint4 rounded(const float (&sum)[kVectorCols]) {
    return {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
            pack_bf16(sum[6], sum[7])};
}

// What one warp is to sum: `width` columns of an item. Lane x holds the token's x-th row; `slot` is -1 beyond.
struct combine_job {
    int item, group;
    int2 token;  // source rank and token
    int slot, owner;
    float weight;
};

template <typename Globals>
struct combine_warp {
    using config = typename Globals::config;
    static constexpr uint32_t kAll = 0xffffffffu;
    // Rows on their way to a lane's registers, 16 bytes each; as many as the registers of a block's threads allow.
    static constexpr int kBatch = geometry<config>::kThreads <= 384 ? 8 : 4;

    const Globals& G;
    const uint64_t epoch;
    const int me, width;
    char* const memory;  // of this warp's slots
    int ahead = 0;       // first lane: the next job, drawn while the one before it is summed
    int held = -1;       // lane s: the rank that the row in slot s goes to

    TKT_DEVICE combine_warp(const Globals& G, char* shared)
        : G(G),
          epoch(*G.sequence),
          me(G.gemm.guard.rank),
          width(G.gemm.cols / G.groups),
          memory(shared + static_cast<int64_t>(warp_id()) * G.warp_slots * width * 2) {}

    TKT_DEVICE void draw_ahead() {
        if (lane_id() == 0) ahead = atomicAdd(G.queue + kNextJob, 1);
    }

    // False when no job is left.
    TKT_DEVICE bool take(combine_job& job, bool pulls) {
        const int place = __shfl_sync(kAll, ahead, 0);
        if (place >= __ldg(G.plan + kCombinePlanJobs)) return false;
        draw_ahead();
        const int entry = __ldg(G.jobs + place), x = lane_id();
        job.item = entry / G.groups;
        job.group = entry - job.item * G.groups;
        job.token = pulls ? make_int2(me, job.item) : __ldg(G.pull_tokens + job.item);
        job.slot = -1;
        job.owner = me;
        job.weight = 0.0f;
        if (x < G.top_k) {
            const int64_t at = static_cast<int64_t>(job.item) * G.top_k + x;
            job.slot = __ldg(G.slots + at);
            if (pulls) job.owner = __ldg(G.owners + at);
            const int64_t token = static_cast<int64_t>(job.token.x) * G.tokens + job.token.y;
            job.weight = __ldg(G.topk_weights + token * G.top_k + x);
        }
        return true;
    }

    // Every lane waits for the block of its own row; after it, all lanes may read all of them. False on an abort.
    TKT_DEVICE bool wait_landed(const combine_job& job, bool pulls) const {
        bool landed = true;
        if ((G.roles & TKT_GATED) && job.slot >= 0) {
            const int64_t index = static_cast<int64_t>(job.owner) * G.landed_stride +
                                  job.slot / G.gemm.pad * G.groups + job.group;
            const uint64_t* word = G.landed[me] + index;
            const auto seen = [&] { return pulls ? look_at_peers(word) : look_here(word); };
            landed = spin_until<wait_role::combine, wait_word::landed, 64>(
                G.gemm.guard, static_cast<int>(index), static_cast<int64_t>(epoch), [&] { return seen() >= epoch; },
                [&] { return static_cast<int64_t>(seen()); });
        }
        landed = __all_sync(kAll, landed);
        __syncwarp();
        return landed;
    }

    TKT_DEVICE int vectors() const { return width / kVectorCols; }

    // Adds the rows of the lanes in `mask`, in their order; vectors base + 32 · b + lane of the job's columns.
    template <int BATCH>
    TKT_DEVICE void add_rows(const combine_job& job, uint32_t mask, int owner, int base,
                             float (&sum)[BATCH][kVectorCols]) const {
        const bf16* rows = G.rows[owner].data + job.group * width;
#pragma unroll 1
        for (uint32_t left = mask; left; left &= left - 1) {
            const int x = __ffs(left) - 1;
            const int64_t row = __shfl_sync(kAll, job.slot, x);
            const float weight = __shfl_sync(kAll, job.weight, x);
            const uint4* from = reinterpret_cast<const uint4*>(rows + row * G.gemm.cols) + base + lane_id();
            uint4 got[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b)  // through L2: the rows were written during this launch
                got[b] = base + 32 * b + lane_id() < vectors() ? __ldcg(from + 32 * b) : uint4{};
#pragma unroll
            for (int b = 0; b < BATCH; ++b) add_weighted(sum[b], weight, got[b]);
        }
    }

    TKT_DEVICE void form(const combine_job& job, int slot) const {
        uint4* to = reinterpret_cast<uint4*>(memory + static_cast<int64_t>(slot) * width * 2) + lane_id();
        const uint32_t mask = __ballot_sync(kAll, job.slot >= 0);
        for (int base = 0; base < vectors(); base += 32 * kBatch) {
            float sum[kBatch][kVectorCols] = {};
            add_rows(job, mask, me, base, sum);
#pragma unroll
            for (int b = 0; b < kBatch; ++b)
                if (base + 32 * b + lane_id() < vectors()) to[base + 32 * b] = rounded(sum[b]);
        }
    }

    // The copy engine reads what the lanes wrote; the first lane issues, and later waits for what it issued.
    TKT_DEVICE void push(const combine_job& job, int slot) {
        if (lane_id() == slot) held = job.token.x;
        fence_async_shared();
        __syncwarp();
        if (lane_id() == 0) {
            bf16* row = G.staging[job.token.x].at(me * G.tokens + job.token.y, job.group * width);
            tma::store_bytes(row, memory + static_cast<int64_t>(slot) * width * 2, width * 2);
            tma::commit();
        }
    }

    // The full wait: at most `pending` rows are still on their way.
    TKT_DEVICE void wait_for_stores(int pending) const {
        if (lane_id() == 0) {
            switch (pending) {
                case 0: tma::store_async_wait<0>(); break;
                case 1: tma::store_async_wait<1>(); break;
                case 2: tma::store_async_wait<2>(); break;
                case 3: tma::store_async_wait<3>(); break;
                case 4: tma::store_async_wait<4>(); break;
                case 5: tma::store_async_wait<5>(); break;
                case 6: tma::store_async_wait<6>(); break;
                default: tma::store_async_wait<7>(); break;
            }
        }
        __syncwarp();
    }

    // The row that was in `slot` is there. The last one that a rank is owed raises its watermark: one word, one writer.
    TKT_DEVICE void retire(int slot) const {
        const int to = __shfl_sync(kAll, held, slot);
        if (lane_id() != 0) return;
        const int owed = __ldg(G.push_expected + to) * G.groups;
        if (add_acquire_release(G.queue + kPushed + to, 1) != owed - 1) return;
        __threadfence_system();
        announce(G.watermarks[to] + me, epoch);
    }

    TKT_DEVICE bool run_push() {
        draw_ahead();
        int next = 0, oldest = 0, stored = 0;  // slots: where the next row goes, the oldest on its way, how many are
        const auto turned = [&](int slot) { return slot + 1 == G.warp_slots ? 0 : slot + 1; };
        combine_job job;
        bool whole = true;
        while (take(job, false)) {
            whole = wait_landed(job, false);
            if (!whole) break;
            if (stored == G.warp_slots) {
                wait_for_stores(stored - 1);
                retire(oldest);
                oldest = turned(oldest);
                --stored;
            }
            form(job, next);
            push(job, next);
            next = turned(next);
            ++stored;
        }
        wait_for_stores(0);
        for (; stored > 0; --stored) {
            retire(oldest);
            oldest = turned(oldest);
        }
        return whole;
    }

    // An own token's whole result. Partial sums are rounded rank by rank as a push would round them, so that both forms
    // give the same bits.
    TKT_DEVICE void run_pull() {
        constexpr int kPullBatch = kBatch / 2;
        draw_ahead();
        combine_job job;
        while (take(job, true)) {
            if (!wait_landed(job, true)) return;
            uint4* to = reinterpret_cast<uint4*>(G.y + static_cast<int64_t>(job.item) * G.gemm.cols +
                                                 job.group * width) + lane_id();
            for (int base = 0; base < vectors(); base += 32 * kPullBatch) {
                float total[kPullBatch][kVectorCols] = {};
#pragma unroll 1
                for (int owner = 0; owner < Globals::world; ++owner) {
                    const uint32_t mask = __ballot_sync(kAll, job.slot >= 0 && job.owner == owner);
                    if (!mask) continue;
                    float sum[kPullBatch][kVectorCols] = {};
                    add_rows(job, mask, owner, base, sum);
#pragma unroll
                    for (int b = 0; b < kPullBatch; ++b) add_weighted(total[b], 1.0f, rounded(sum[b]));
                }
#pragma unroll
                for (int b = 0; b < kPullBatch; ++b)
                    if (base + 32 * b + lane_id() < vectors()) to[32 * b + base] = rounded(total[b]);
            }
        }
    }
};

// The tail of a launch, by one warp of each block after all of the block's work: the last block out leaves every word
// as this launch found it. Landed words and watermarks stay: they only grow.
template <typename Globals>
TKT_DEVICE void leave_combine(const Globals& G) {
    bool last = false;
    if (lane_id() == 0)
        last = add_acquire_release(G.queue + kCombineBlocksDone, 1) == static_cast<int32_t>(gridDim.x) - 1;
    if (!__shfl_sync(0xffffffffu, last, 0)) return;
    const int words = __ldg(G.plan + kCombinePlanBlocks) * G.groups;
    for (int word = lane_id(); word < words; word += kWarpThreads) G.finished[word] = 0;
    if (lane_id() < kCombineQueueWords) G.queue[lane_id()] = 0;
}

}  // namespace tkt
