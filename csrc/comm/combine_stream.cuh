// The pre-reduce form: each warp runs one stream of sums, of landed rows into partial rows that are pushed to the
// tokens' ranks, and of partial rows into results. While the rows of one step are added, those of the next are on their
// way. Pushing waits for tiles only, which wait for nothing; reducing waits for the pushes of all ranks, and a warp that
// may wait for those has no push of its own left.
#pragma once

#include "combine_pull.cuh"

namespace tkt {

template <typename Globals>
struct combine_stream {
    using config = typename Globals::config;
    static constexpr uint32_t kAll = 0xffffffffu;
    // A step: so many rows at once, and so many vectors of each in a lane. Two steps live in a thread's registers.
    static constexpr int kRows = geometry<config>::kWgmma && geometry<config>::kThreads <= 384 ? 4 : 2, kVectors = 2;
    static constexpr int kNone = -1, kPolls = 8, kLot = 8;  // jobs between two looks at watermarks; rows told of at once
    enum outcome { nothing, loaded, blocked };

    // `group`: its run of columns. A push goes to rank `token.x`; a reduce is of own token `token.y`.
    struct job {
        int2 token;
        int group;
        bool pushes;
    };
    struct step {
        uint4 got[kRows][kVectors];
        float weight;              // of this lane's row
        uint32_t lanes;            // whose rows are in `got`, in their order
        int base;                  // first vector
        bool opens, closes, ends;  // the first rows of these columns, the last, and the last of the job
        job of;
    };

    const Globals& G;
    const uint64_t epoch;
    const int me, width, vectors;
    char* const memory;  // of this warp's row slots
    const bool reduces, early;

    // The current job: lane x holds a row and its weight, `mask` says which lanes do.
    job now{};
    int row = 0, base = 0;
    float weight = 0.0f;
    uint32_t mask = 0, left = 0;
    bool begun = false, chosen = false, stopped = false;

    // Pushes drawn ahead, in the order in which their words become known: a place (first lane), an entry, the rows.
    int place = 0, entry = kNone, slot = kNone;
    int2 token{};
    job coming{};
    bool has_coming = false;

    // Reduces drawn ahead: a number (first lane); a number and which ranks owe.
    int number = 0, turn = kNone;
    bool owes = false, drawing = false;

    uint32_t landed_groups = 0, whole_groups = 0;  // known: all tiles have landed; all partial rows are here
    int jobs = 0;                                  // chosen so far

    float sum[kVectors][kVectorCols];

    // Row slots: where the next row goes, the oldest on its way, how many are; lane s: what the row in slot s was for.
    int next_slot = 0, oldest = 0, stored = 0, held = 0;
    int untold = 0, there = 0;  // rows that are there and not counted yet; lane d · kMostCombineGroups + g: those for it

    TKT_DEVICE combine_stream(const Globals& G, char* shared, bool reduces, bool early)
        : G(G),
          epoch(*G.sequence),
          me(G.gemm.guard.rank),
          width(G.gemm.cols / G.groups),
          vectors(width / kVectorCols),
          memory(shared + static_cast<int64_t>(warp_id()) * G.warp_slots * width * 2),
          reduces(reduces),
          early(reduces && early) {}

    // Drawing ahead. What one stage asks for, the next stage reads a job later.

    TKT_DEVICE void draw_place() {
        if (lane_id() == 0) place = draw(G.queue + kNextJob);
    }
    TKT_DEVICE void ask_entry() {
        const int at = __shfl_sync(kAll, place, 0);
        entry = at < __ldg(G.plan + kCombinePlanJobs) ? __ldg(G.jobs + at) : kNone;
    }
    TKT_DEVICE void ask_rows() {
        has_coming = entry != kNone;
        if (!has_coming) return;
        const int item = entry / G.groups;
        coming.group = entry - item * G.groups;
        coming.pushes = true;
        token = __ldg(G.pull_tokens + item);
        slot = lane_id() < G.top_k ? __ldg(G.slots + static_cast<int64_t>(item) * G.top_k + lane_id()) : kNone;
    }
    TKT_DEVICE void prepare_pushes() {
        draw_place();
        ask_entry();
        draw_place();
        ask_rows();
        ask_entry();
        draw_place();
    }
    TKT_DEVICE void take_push() {
        now = coming;
        now.token = token;
        row = slot;
        weight = 0.0f;
        if (lane_id() < G.top_k) {
            const int64_t at = static_cast<int64_t>(token.x) * G.tokens + token.y;
            weight = __ldg(G.topk_weights + at * G.top_k + lane_id());
        }
        ask_rows();
        if (has_coming) {
            ask_entry();
            draw_place();
        }
    }

    TKT_DEVICE void draw_number() {
        if (lane_id() == 0) number = draw(G.queue + kNextToken);
    }
    TKT_DEVICE void ask_turn() {
        turn = __shfl_sync(kAll, number, 0);
        if (turn >= G.tokens * G.groups) {
            turn = kNone;
            return;
        }
        const int64_t at = static_cast<int64_t>(turn % G.tokens) * Globals::world + lane_id();
        owes = lane_id() < Globals::world && __ldg(G.final_contrib + at);
    }
    TKT_DEVICE void prepare_reduces() {
        drawing = true;
        draw_number();
        ask_turn();
        if (turn != kNone) draw_number();
    }
    TKT_DEVICE void take_reduce() {
        now = {make_int2(me, turn % G.tokens), turn / G.tokens, false};
        row = owes ? lane_id() * G.tokens + now.token.y : kNone;
        weight = 1.0f;
        ask_turn();
        if (turn != kNone) draw_number();
    }

    // The next job: a reduce between two pushes where nothing would wait for it, else a push, at last what is left.
    TKT_DEVICE bool choose() {
        ++jobs;
        if (early && has_coming) {
            if (!drawing) prepare_reduces();
            if (turn != kNone && now.pushes) {
                const int group = turn / G.tokens;
                if (!(whole_groups >> group & 1) && jobs % kPolls == 0) look_whole(group, false);
                if (whole_groups >> group & 1) {
                    take_reduce();
                    return true;
                }
            }
        }
        if (has_coming) {
            take_push();
            return true;
        }
        if (reduces && !drawing) prepare_reduces();
        if (turn == kNone) return false;
        take_reduce();
        return true;
    }

    // Whether all that the current job adds is there; all lanes may then read all of it.
    TKT_DEVICE bool admitted(bool may_wait) {
        if (!now.pushes) return whole_groups >> now.group & 1 || look_whole(now.group, may_wait);
        if (!(G.roles & TKT_GATED) || landed_groups >> now.group & 1) return true;
        const bool mine = row != kNone;
        const uint64_t* const word = mine ? G.landed_word(me, me, row / G.gemm.pad, now.group)
                                          : G.whole_word(me, me, now.group);
        const bool asks = mine || lane_id() == kWarpThreads - 1;
        bool there = asks && look(word) >= epoch;
        if (__ballot_sync(kAll, there && !mine)) {
            landed_groups |= 1u << now.group;
            return true;
        }
        if (__all_sync(kAll, there || !mine)) return true;
        if (!may_wait) return false;
        if (mine && !there)
            there = spin_until<wait_role::combine, wait_word::landed, 64>(
                G.gemm.guard, static_cast<int>(word - G.landed[me]), static_cast<int64_t>(epoch),
                [&] { return look(word) >= epoch; }, [&] { return static_cast<int64_t>(look(word)); });
        stopped = !__all_sync(kAll, there || !mine);
        return !stopped;
    }
    // Whether every rank that owes partial rows has pushed this run of columns.
    TKT_DEVICE bool look_whole(int group, bool may_wait) {
        bool there = true;
        if (lane_id() < Globals::world && __ldg(G.recv_from + lane_id())) {
            const int index = lane_id() * kMostCombineGroups + group;
            const uint64_t* const word = G.watermarks[me] + index;
            there = look_at_peers(word) >= epoch;
            if (!there && may_wait)
                there = spin_until<wait_role::reduce, wait_word::watermark, 64>(
                    G.gemm.guard, index, static_cast<int64_t>(epoch), [&] { return look_at_peers(word) >= epoch; },
                    [&] { return static_cast<int64_t>(look_at_peers(word)); });
        }
        const bool all = __all_sync(kAll, there);
        if (all) whole_groups |= 1u << group;
        stopped = stopped || (may_wait && !all);
        return all;
    }

    // The next step, its rows asked for; `blocked` when they are not there and the warp may not wait for them.
    TKT_DEVICE outcome next(step& s, bool may_wait) {
        if (!begun) {
            if (stopped || (!chosen && !choose())) return nothing;
            chosen = true;
            if (!admitted(may_wait)) return stopped ? nothing : blocked;
            begun = true;
            chosen = false;
            base = 0;
            mask = left = __ballot_sync(kAll, row != kNone);
        }
        load(s);
        return loaded;
    }
    TKT_DEVICE void load(step& s) {
        s.of = now;
        s.base = base;
        s.opens = left == mask;
        s.lanes = left;
        s.weight = weight;
        const bf16* const rows = (now.pushes ? G.rows[me].data : G.staging[me].data) + now.group * width;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (!left) break;
            const int x = __ffs(left) - 1;
            left &= left - 1;
            const int64_t at = __shfl_sync(kAll, row, x);
            const uint4* from = reinterpret_cast<const uint4*>(rows + at * G.gemm.cols) + base + lane_id();
#pragma unroll
            for (int v = 0; v < kVectors; ++v)  // through L2: the rows were written during this launch
                s.got[r][v] = base + 32 * v + lane_id() < vectors ? __ldcg(from + 32 * v) : uint4{};
        }
        s.lanes ^= left;
        s.closes = left == 0;
        if (s.closes) {
            left = mask;
            base += 32 * kVectors;
            begun = base < vectors;
        }
        s.ends = !begun;
    }

    TKT_DEVICE void add(const step& s) {
        if (s.opens) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
#pragma unroll
                for (int i = 0; i < kVectorCols; ++i) sum[v][i] = 0.0f;
        }
        uint32_t lanes = s.lanes;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (!lanes) break;
            const float weight = __shfl_sync(kAll, s.weight, __ffs(lanes) - 1);
            lanes &= lanes - 1;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) add_weighted(sum[v], weight, s.got[r][v]);
        }
        if (!s.closes) return;
        uint4* to;
        if (s.of.pushes) {
            if (s.base == 0 && stored == G.warp_slots) retire(stored - 1);
            to = reinterpret_cast<uint4*>(memory + static_cast<int64_t>(next_slot) * width * 2);
        } else {
            to = reinterpret_cast<uint4*>(G.y + static_cast<int64_t>(s.of.token.y) * G.gemm.cols + s.of.group * width);
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (s.base + 32 * v + lane_id() < vectors) to[s.base + 32 * v + lane_id()] = rounded(sum[v]);
        if (s.of.pushes && s.ends) push(s.of);
    }

    TKT_DEVICE int turned(int slot) const { return slot + 1 == G.warp_slots ? 0 : slot + 1; }

    // The copy engine reads what the lanes wrote; the first lane issues, and later waits for what it issued.
    TKT_DEVICE void push(const job& j) {
        if (lane_id() == next_slot) held = j.token.x * kMostCombineGroups + j.group;
        fence_async_shared();
        __syncwarp();
        if (lane_id() == 0) {
            bf16* to = G.staging[j.token.x].at(me * G.tokens + j.token.y, j.group * width);
            tma::store_bytes(to, memory + static_cast<int64_t>(next_slot) * width * 2, width * 2);
            tma::commit();
        }
        next_slot = turned(next_slot);
        ++stored;
    }

    // The full wait, until at most `pending` rows are still on their way: the others are there, and are told of in lots,
    // since telling makes the warp wait.
    TKT_DEVICE void retire(int pending) {
        wait_for_stores(pending);
        for (; stored > pending; --stored) {
            there += lane_id() == __shfl_sync(kAll, held, oldest);
            oldest = turned(oldest);
            ++untold;
        }
        if (untold >= kLot || pending == 0) tell();
    }
    // The last row that a rank is owed of a run of columns raises its watermark: one word, one writer.
    TKT_DEVICE void tell() {
        for (uint32_t lanes = __ballot_sync(kAll, there != 0); lanes; lanes &= lanes - 1) {
            const int was_for = __ffs(lanes) - 1, to = was_for / kMostCombineGroups;
            const int rows = __shfl_sync(kAll, there, was_for);
            if (lane_id() != 0) continue;
            const int before = add_acquire_release(G.queue + kPushed + was_for, rows);
            if (before + rows != __ldg(G.push_expected + to)) continue;
            __threadfence_system();
            announce(G.watermarks[to] + me * kMostCombineGroups + was_for % kMostCombineGroups, epoch);
        }
        __syncwarp();
        there = untold = 0;
    }
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

    // Adds `s` while the rows of `then` are on their way. Before it waits for what others do, others get what it has.
    TKT_DEVICE bool turn_over(const step& s, step& then) {
        outcome found = next(then, false);
        add(s);
        if (found == blocked) {
            retire(0);
            found = next(then, true);
        }
        return found == loaded;
    }

    TKT_DEVICE void run() {
        prepare_pushes();
        step one, other;
        if (next(one, true) == loaded) {
            while (turn_over(one, other))
                if (!turn_over(other, one)) break;
        }
        retire(0);
    }
};

// Every warp that sums comes here, in blocks whose memory no GEMM uses any more.
template <typename Globals>
TKT_DEVICE void combine(const Globals& G) {
    extern __shared__ __align__(1024) char shared_memory[];
    if (G.form == TKT_FORM_PULL) {
        combine_pull<Globals>(G).run();
        return;
    }
    const int block = blockIdx.x;
    const bool reduces = block >= static_cast<int>(gridDim.x) - G.num_reduce_blocks;
    combine_stream<Globals>(G, shared_memory, reduces, block >= G.num_comp_blocks).run();
}

}  // namespace tkt
