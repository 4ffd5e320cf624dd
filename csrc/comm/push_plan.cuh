// The tables of a rank that pushes its rows, built by the launch that builds its schedule (comm/plan.cuh): own tokens as
// each destination needs them, their pad blocks there, and what is counted of those. Where a row goes follows from how many
// rows of its expert other ranks have before it, so each rank gives its counts together with its ids; everything else
// follows from own ids. The tables are those of tktune/core/push_tables.py.
#pragma once

#include "plan.cuh"

namespace tkt {

struct push_plan_builder : plan_builder {
    const bool pushes;
    const int row_words;  // of one block's counts
    // Words that the schedule is done with, by expert of all ranks: rows of all ranks, then first slot on its rank; of them
    // rows before those of this rank; own tokens of which it is the first on its rank, then those of experts before it
    // there; own rows. By rank: padded rows; own tokens that it wants.
    int32_t *const slots, *const before, *const firsts, *const own, *const rows, *const wanted;

    TKT_DEVICE push_plan_builder(const plan_globals& G, int32_t* shared)
        : plan_builder(G, shared),
          pushes(G.push_plan != nullptr),
          row_words(ceil_div(G.experts, kCountQuad) * kCountQuad),
          slots(totals),
          before(slots + G.experts),
          firsts(before + G.experts),
          own(bits),
          rows(ends + kKinds + 1),
          wanted(rows + TKT_MAX_WORLD) {}

    // Rows of each expert that blocks of `source` have, on rank `at`.
    TKT_DEVICE int32_t* given_rows(int at, uint64_t sequence, int source, int block) const {
        const int64_t ids_bytes = 2ll * 4 * G.world * G.tokens * G.top_k;
        const int64_t row = ((sequence & 1) * G.world + source) * gridDim.x + block;
        return reinterpret_cast<int32_t*>(G.region[at] + plan_region::kIds + ceil_div<int64_t>(ids_bytes, 16) * 16) +
               row * row_words;
    }
    // Own tokens of a block of which each expert is the first on its rank.
    TKT_DEVICE int32_t* own_firsts(int block) const {
        return G.counted + G.world * static_cast<int>(gridDim.x) * kinds + block * G.experts;
    }

    // Ring order on rank `at`.
    TKT_DEVICE int step_of(int source, int at) const { return source >= at ? source - at : source - at + G.world; }
    TKT_DEVICE bool goes_to(int rank) const { return rank != me && rows[rank] <= G.capacity; }
    TKT_DEVICE int blocks_on(int rank) const { return goes_to(rank) ? rows[rank] / G.pad : 0; }
    TKT_DEVICE int counters_before(int rank) const {
        int sum = 0;
        for (int other = 0; other < rank; ++other) sum += blocks_on(other);
        return sum;
    }

    // While ids are given: this block's rows of each expert, and tokens of which it is the first on its rank.
    TKT_DEVICE void note(int at, int expert) const {
        atomicAdd(counters + expert, 1);
        const int lowest = expert - expert % local, begin = at - at % G.top_k;
        bool is_first = true;
#pragma unroll 1
        for (int other = begin; other < begin + G.top_k; ++other)
            is_first = is_first && !(given(other) >= lowest && given(other) < expert);
        if (is_first) atomicAdd(counters + G.experts + expert, 1);
    }
    TKT_DEVICE void tell(uint64_t sequence) const {
        __syncthreads();
        for (int expert = threadIdx.x; expert < G.experts; expert += kPlanThreads) {
#pragma unroll 1
            for (int step = 0; step < G.world; ++step)
                given_rows(source_of(step), sequence, me, blockIdx.x)[expert] = counters[expert];
            own_firsts(blockIdx.x)[expert] = counters[G.experts + expert];
        }
    }
    TKT_DEVICE void forget(int32_t* words, int count) const {
        for (int i = threadIdx.x; i < count; i += kPlanThreads) words[i] = 0;
    }

    // As the schedule's counts, with ranks that get rows in the place of those that give them: every warp has a run of own
    // tokens for the destination of its step.
    TKT_DEVICE void count_own(uint64_t sequence) const {
        if (!works()) return;
        int32_t* const mine = counters + warp * kinds;
        for (int word = begin(); word < end(); ++word) {
            int lowest = local;
            for_experts(ids(me, sequence, me), word * kWarpThreads + lane_id(), source_of(step()) * local,
                        [&](int, int expert) {
                            if (expert < 0) return;
                            atomicAdd(mine + kRows * local + expert, 1);
                            lowest = min(lowest, expert);
                        });
            if (lowest < local) atomicAdd(mine + kFirsts * local + lowest, 1);
        }
    }

    // Rows of all ranks, and of those before this one on the ring of the expert's rank.
    TKT_DEVICE void add_given(uint64_t sequence) const {
        const int quads = row_words / kCountQuad;
        for (int i = threadIdx.x; i < G.world * quads; i += kPlanThreads) {
            const int source = i / quads, quad = i % quads;
            const int4* column = reinterpret_cast<const int4*>(given_rows(me, sequence, source, 0)) + quad;
            int sum[kCountQuad] = {};
#pragma unroll 8
            for (int block = 0; block < static_cast<int>(gridDim.x); ++block) {
                const int4 some = __ldcg(column + block * quads);
                sum[0] += some.x, sum[1] += some.y, sum[2] += some.z, sum[3] += some.w;
            }
#pragma unroll
            for (int k = 0; k < kCountQuad; ++k) {
                const int expert = quad * kCountQuad + k;
                if (expert >= G.experts) break;
                const int owner = expert / local;
                atomicAdd(slots + expert, sum[k]);
                if (step_of(source, owner) < step_of(me, owner)) atomicAdd(before + expert, sum[k]);
            }
        }
    }

    // Turns warps' counters of own tokens into those of all own tokens before theirs.
    TKT_DEVICE void add_own(uint64_t sequence) const {
        const int blocks = gridDim.x;
        for (int i = threadIdx.x; i < G.experts; i += kPlanThreads) {
            const int step = i / local, kind = i % local, expert = source_of(step) * local + kind;
            const int32_t *rows_of = given_rows(me, sequence, me, 0) + expert, *firsts_of = own_firsts(0) + expert;
            int all[2] = {}, sooner[2] = {};
#pragma unroll 8
            for (int block = 0; block < blocks; ++block) {
                const int some[2] = {__ldcg(rows_of + block * row_words), __ldcg(firsts_of + block * G.experts)};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    all[k] += some[k];
                    sooner[k] += block < static_cast<int>(blockIdx.x) ? some[k] : 0;
                }
            }
            own[expert] = all[0];
            firsts[expert] = all[1];
#pragma unroll 1
            for (int sub = 0; sub < source_warps; ++sub) {
                int32_t* counter = counters + (step * source_warps + sub) * kinds + kind;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int32_t& its = counter[(k == 0 ? kRows : kFirsts) * local];
                    const int some = its;
                    its = sooner[k];
                    sooner[k] += some;
                }
            }
        }
    }

    // A warp for each rank: its experts after each other, rows padded, and the tokens that it wants in the order of them.
    TKT_DEVICE void line_up() const {
        if (warp >= G.world) return;
        const int from = warp * local;
        int carried = 0, tokens = 0;
        for (int at = 0; at < local; at += kWarpThreads) {
            const int expert = at + lane_id();
            const int wide = expert < local ? ceil_div(slots[from + expert], G.pad) * G.pad : 0;
            const int some = expert < local ? firsts[from + expert] : 0;
            int until = wide, wanted_until = some;
#pragma unroll
            for (int by = 1; by < kWarpThreads; by *= 2) {
                const int lower = __shfl_up_sync(kAll, until, by), wanted_lower = __shfl_up_sync(kAll, wanted_until, by);
                if (lane_id() >= by) until += lower, wanted_until += wanted_lower;
            }
            if (expert < local) {
                slots[from + expert] = carried + until - wide;
                firsts[from + expert] = tokens + wanted_until - some;
            }
            carried += __shfl_sync(kAll, until, kWarpThreads - 1);
            tokens += __shfl_sync(kAll, wanted_until, kWarpThreads - 1);
        }
        if (lane_id() == 0) {
            rows[warp] = carried;
            wanted[warp] = goes_to(warp) ? tokens : 0;
        }
    }

    // Counters of pad blocks elsewhere, an expert a warp, and nothing where nobody wants a token.
    TKT_DEVICE void describe_pushes() const {
        for (int expert = blockIdx.x * kPlanWarps + warp; expert < G.experts; expert += gridDim.x * kPlanWarps) {
            const int to = expert / local;
            if (!goes_to(to)) continue;
            const int start = slots[expert], next = expert % local == local - 1 ? rows[to] : slots[expert + 1];
            const int first = before[expert], last = first + own[expert], at = counters_before(to) + start / G.pad;
            for (int block = lane_id(); block < (next - start) / G.pad; block += kWarpThreads) {
                const int pushed = max(min(last, (block + 1) * G.pad) - max(first, block * G.pad), 0);
                G.push_expected[at + block] = pushed;
                G.missing[at + block] = pushed;
            }
        }
        const int thread = blockIdx.x * kPlanThreads + threadIdx.x, threads = gridDim.x * kPlanThreads;
        for (int i = thread; i < G.world * G.tokens; i += threads)
            if (i % G.tokens >= wanted[i / G.tokens]) G.push_tokens[i] = -1;
        for (int i = thread; i < G.world * G.tokens * G.top_k; i += threads)
            if (i / G.top_k % G.tokens >= wanted[i / G.top_k / G.tokens]) G.push_blocks[i] = -1;
        if (thread <= G.world) G.push_plan[thread] = counters_before(thread);
        if (thread == 0) {
            int turns = 0;
            for (int rank = 0; rank < G.world; ++rank) turns = max(turns, wanted[rank]);
            G.push_plan[G.world + 1] = turns;
        }
    }

    // As the schedule's places, for the destination of the warp's step.
    TKT_DEVICE void place_pushes(uint64_t sequence) const {
        const int to = source_of(step());
        if (!works() || !goes_to(to)) return;
        int32_t* const mine = counters + warp * kinds;
        for (int expert = lane_id(); expert < local; expert += kWarpThreads) {
            mine[kRows * local + expert] += slots[to * local + expert] + before[to * local + expert];
            mine[kFirsts * local + expert] += firsts[to * local + expert];
        }
        uint32_t* const held = reinterpret_cast<uint32_t*>(bits) + warp * local;  // lanes whose token has an expert
        const uint32_t lane = 1u << lane_id(), below = lane - 1;
        for (int word = begin(); word < end(); ++word) {
            const int token = word * kWarpThreads + lane_id();
            for (int expert = lane_id(); expert < local; expert += kWarpThreads) held[expert] = 0;
            __syncwarp();
            int lowest = local;
            for_experts(ids(me, sequence, me), token, to * local, [&](int, int expert) {
                if (expert < 0) return;
                atomicOr(held + expert, lane);
                lowest = min(lowest, expert);
            });
            const uint32_t alike = __match_any_sync(kAll, lowest);
            __syncwarp();
            // The comparisons with bounds matter only after an abort, when counts may be those of other ids.
            int position = lowest < local ? mine[kFirsts * local + lowest] + __popc(alike & below) : G.tokens;
            if (position < G.tokens) {
                position += to * G.tokens;
                G.push_tokens[position] = token;
                for_experts(ids(me, sequence, me), token, to * local, [&](int x, int expert) {
                    int slot = G.capacity;
                    if (expert >= 0) slot = mine[kRows * local + expert] + __popc(held[expert] & below);
                    G.push_blocks[static_cast<int64_t>(position) * G.top_k + x] = slot < G.capacity ? slot / G.pad : -1;
                });
            }
            __syncwarp();
            for (int expert = lane_id(); expert < local; expert += kWarpThreads)
                mine[kRows * local + expert] += __popc(held[expert]);
            if (lowest < local && !(alike & below)) mine[kFirsts * local + lowest] += __popc(alike);
            __syncwarp();
        }
    }

    TKT_DEVICE void build_pushes(uint64_t sequence) const {
        __syncthreads();  // the schedule is made
        forget(counters, kPlanWarps * kinds);
        forget(slots, 2 * G.experts);  // and `before`
        __syncthreads();
        count_own(sequence);
        add_given(sequence);
        __syncthreads();
        add_own(sequence);
        __syncthreads();
        line_up();
        __syncthreads();
        describe_pushes();
        __syncthreads();  // bits take the place of own rows
        place_pushes(sequence);
    }

    TKT_DEVICE void run() const {
        const uint64_t sequence = G.state[0] + 1;
        if (pushes) {
            forget(counters, 2 * G.experts);
            __syncthreads();
        }
        give(
            sequence, [&](int at, int expert) { if (pushes) note(at, expert); }, [&] { if (pushes) tell(sequence); });
        build(sequence);
        if (pushes) build_pushes(sequence);
    }
};

}  // namespace tkt
