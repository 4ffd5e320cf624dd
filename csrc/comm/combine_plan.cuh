// Combine tables of one rank, built by a few blocks after the schedule: each rank gives every other its weights and the
// slots of that rank's tokens, lists its own jobs meanwhile, and reads what it was given. One launch, no host.
#pragma once

#include "blocks.cuh"
#include "combine_plan_config.cuh"

namespace tkt {

struct combine_planner {
    static constexpr uint32_t kAll = 0xffffffffu;

    const combine_plan_globals& G;
    const int warp, me;
    const int of_block, first, last;  // own tokens of this block
    int32_t* const sums;              // (world): what the first block counts
    int32_t* const memory;

    TKT_DEVICE combine_planner(const combine_plan_globals& G, int32_t* shared)
        : G(G),
          warp(warp_id()),
          me(G.guard.rank),
          of_block(ceil_div(G.tokens, static_cast<int>(gridDim.x))),
          first(min(static_cast<int>(blockIdx.x) * of_block, G.tokens)),
          last(min(first + of_block, G.tokens)),
          sums(shared),
          memory(shared + TKT_MAX_WORLD) {}

    TKT_DEVICE uint64_t* signal(int at, int source, int block) const {
        return reinterpret_cast<uint64_t*>(G.region[at] + combine_region::kSignals) + source * kCombinePlanMostBlocks +
               block;
    }
    // Of `source` on rank `at`: `which` is 0 for its weights, 1 for the slots it has given.
    TKT_DEVICE int32_t* plane(int at, uint64_t sequence, int source, int which) const {
        const int64_t number = ((sequence & 1) * G.world + source) * 2 + which;
        return reinterpret_cast<int32_t*>(G.region[at] + combine_region::kPlanes) + number * G.tokens * G.top_k;
    }

    TKT_DEVICE int32_t* owed(int at, uint64_t sequence, int source) const {
        const int number = (sequence & 1) * TKT_MAX_WORLD + source;
        return reinterpret_cast<int32_t*>(G.region[at] + combine_region::kOwed) + number;
    }

    // How many partial rows each rank is owed; the first block tells them with its tokens.
    TKT_DEVICE void count(uint64_t sequence, int wanted) const {
        const int mine = threadIdx.x;
        if (mine < G.world) sums[mine] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < wanted; i += kCombinePlanThreads) atomicAdd(sums + G.pull_tokens[i].x, 1);
        __syncthreads();
        if (mine < G.world) {
            G.push_expected[mine] = sums[mine];
            *owed(mine, sequence, me) = sums[mine];
        }
    }

    // Two plans ago everybody had read this half of the planes: whoever signalled the last plan was done with it.
    TKT_DEVICE void push(uint64_t sequence) const {
        const int32_t* weights = reinterpret_cast<const int32_t*>(G.topk_weights);
        for (int at = first * G.top_k + threadIdx.x; at < last * G.top_k; at += kCombinePlanThreads) {
            const int32_t weight = weights[at];
#pragma unroll 1
            for (int rank = 0; rank < G.world; ++rank) {
                plane(rank, sequence, me, 0)[at] = weight;
                plane(rank, sequence, me, 1)[at] = G.slots[static_cast<int64_t>(rank) * G.tokens * G.top_k + at];
            }
        }
        __threadfence_system();
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < G.world) announce(signal(threadIdx.x, me, blockIdx.x), sequence);
    }

    // Blocks `from` to `to` of every rank have pushed.
    TKT_DEVICE void await_planes(uint64_t sequence, int from, int to) const {
        for (int i = threadIdx.x; i < G.world * (to - from); i += kCombinePlanThreads) {
            const uint64_t* word = signal(me, i / (to - from), from + i % (to - from));
            spin_until<wait_role::planner, wait_word::weights, 64>(
                G.guard, i, static_cast<int64_t>(sequence), [&] { return look_at_peers(word) >= sequence; },
                [&] { return static_cast<int64_t>(look_at_peers(word)); });
        }
        __syncthreads();
    }

    // The rank that holds row x of an own token, and its slot there; -1 where nobody does.
    TKT_DEVICE int2 holder(uint64_t sequence, int64_t at) const {
        int2 found = make_int2(-1, -1);
#pragma unroll 2
        for (int rank = 0; rank < G.world; ++rank) {
            const int slot = __ldcg(plane(me, sequence, rank, 1) + at);
            if (slot >= 0) found = make_int2(rank, slot);
        }
        return found;
    }

    // Everybody's weights for this block's tokens, and who holds the rows of the own ones.
    TKT_DEVICE void read(uint64_t sequence) const {
        const int64_t of_source = static_cast<int64_t>(G.tokens) * G.top_k;
        for (int at = first * G.top_k + threadIdx.x; at < last * G.top_k; at += kCombinePlanThreads) {
#pragma unroll 1
            for (int rank = 0; rank < G.world; ++rank)
                reinterpret_cast<int32_t*>(G.everyones)[rank * of_source + at] =
                    __ldcg(plane(me, sequence, rank, 0) + at);
            const int2 found = holder(sequence, at);
            G.owners[at] = found.x;
            G.owner_slots[at] = found.y;
        }
        for (int i = first * G.world + threadIdx.x; i < last * G.world; i += kCombinePlanThreads) {
            const int32_t* slots = plane(me, sequence, i % G.world, 1) + static_cast<int64_t>(i / G.world) * G.top_k;
            int largest = -1;
#pragma unroll 4
            for (int x = 0; x < G.top_k; ++x) largest = max(largest, __ldcg(slots + x));
            G.final_contrib[i] = largest >= 0;
        }
        if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < G.world)
            G.recv_from[threadIdx.x] = __ldcg(owed(me, sequence, threadIdx.x));
    }

    // The GEMM walks over the experts once, or once for each run of columns.
    TKT_DEVICE void describe(int jobs) const {
        for (int i = blockIdx.x * kCombinePlanThreads + threadIdx.x; i < G.passes * G.local_experts;
             i += gridDim.x * kCombinePlanThreads) {
            const int pass = i / G.local_experts, expert = i - pass * G.local_experts;
            const int columns = G.passes == 1 ? 0 : pass * G.group_tiles << 16 | G.group_tiles;
            G.walk[i] = make_int4(expert, G.base[expert], G.counts[expert], columns);
            if (pass == 0) G.experts[expert] = make_int2(G.base[expert], G.counts[expert]);
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            G.plan[0] = G.words[1];
            G.plan[1] = jobs * G.groups;
        }
    }

    // The last pad block that a wanted token's sum waits for.
    TKT_DEVICE int last_block(int item) const {
        int largest = 0;
#pragma unroll 4
        for (int x = 0; x < G.top_k; ++x) largest = max(largest, G.pull_slots[static_cast<int64_t>(item) * G.top_k + x]);
        return largest / G.pad;
    }

    // Jobs by (own, last pad block, group, largest slot), or by (group, own, largest slot) where the GEMM takes one run
    // of columns after the other. `job_order` is by largest slot, so a job's place follows from how many of its kind
    // stand before it there, and before the first and behind the last that end with the same block: those are
    // neighbours, fewer than a pad block has rows.
    TKT_DEVICE void list_pushes(int wanted) const {
        const int words = ceil_div(wanted, kWarpThreads);
        int32_t *const bits = memory, *const before = memory + words + 1, *const ends = before + words + 1;
        if (G.own_last) {
            for (int i = threadIdx.x; i < words; i += kCombinePlanThreads) bits[i] = 0;
            __syncthreads();
            for (int i = threadIdx.x; i < wanted; i += kCombinePlanThreads)
                if (G.pull_tokens[G.job_order[i]].x == me)
                    atomicOr(reinterpret_cast<uint32_t*>(bits) + i / kWarpThreads, 1u << i % kWarpThreads);
            __syncthreads();
            if (warp == 0) {  // own ones before each word
                int carried = 0;
                for (int at = 0; at < words; at += kWarpThreads) {
                    const int word = at + lane_id(), some = word < words ? __popc(bits[word]) : 0;
                    int until = some;
#pragma unroll
                    for (int by = 1; by < kWarpThreads; by *= 2) {
                        const int lower = __shfl_up_sync(kAll, until, by);
                        if (lane_id() >= by) until += lower;
                    }
                    if (word < words) before[word] = carried + until - some;
                    carried += __shfl_sync(kAll, until, kWarpThreads - 1);
                }
                if (lane_id() == 0) before[words] = carried, bits[words] = 0;
            }
            __syncthreads();
        }
        const int share = ceil_div(wanted, static_cast<int>(gridDim.x));
        const int from = min(static_cast<int>(blockIdx.x) * share, wanted), to = min(from + share, wanted);
        const int low = max(from - G.pad, 0), high = min(to + G.pad, wanted);
        const bool by_block = G.groups > 1 && G.passes == 1;
        if (by_block)
            for (int i = low + threadIdx.x; i < high; i += kCombinePlanThreads) ends[i - low] = last_block(G.job_order[i]);
        __syncthreads();
        const auto own_before = [&](int i) {
            if (!G.own_last) return 0;
            return before[i / kWarpThreads] + __popc(bits[i / kWarpThreads] & ((1u << i % kWarpThreads) - 1));
        };
        const int own = own_before(wanted);
        for (int i = from + threadIdx.x; i < to; i += kCombinePlanThreads) {
            const int item = G.job_order[i];
            const bool late = G.own_last && (bits[i / kWarpThreads] >> i % kWarpThreads & 1);
            const auto rank_at = [&](int at) { return late ? own_before(at) : at - own_before(at); };
            const int rank = rank_at(i), behind = late ? wanted - own : 0;
            int begin = i, end = i + 1;
            if (by_block) {
                while (begin > low && ends[begin - 1 - low] == ends[i - low]) --begin;
                while (end < high && ends[end - low] == ends[i - low]) ++end;
            }
            const int start = by_block ? rank_at(begin) : rank, alike = by_block ? rank_at(end) - start : 1;
            for (int group = 0; group < G.groups; ++group) {
                const int place = G.passes > 1 ? group * wanted + behind + rank
                                               : (behind + start) * G.groups + group * alike + rank - start;
                G.jobs[place] = item * G.groups + group;
            }
        }
    }

    // How late an own token's rows are: whether all of them are here (those come last), the largest slot.
    TKT_DEVICE uint32_t lateness(uint64_t sequence, int token) const {
        bool here = G.own_last;
        int largest = 0;
#pragma unroll 2
        for (int x = 0; x < G.top_k; ++x) {
            const int2 found = holder(sequence, static_cast<int64_t>(token) * G.top_k + x);
            here = here && found.x == me;
            largest = max(largest, found.y);
        }
        return static_cast<uint32_t>(largest) | (here ? 0x80000000u : 0u);
    }

    // As `list_pushes`, over own tokens, whose rows are anywhere: a job's place is the number of jobs before it. Warps
    // take tokens of this block, lanes compare them with all others.
    TKT_DEVICE void list_pulls(uint64_t sequence) const {
        uint32_t* const keys = reinterpret_cast<uint32_t*>(memory);
        const bool by_block = G.passes == 1;
        constexpr int kTokens = 4;  // of a warp at once
        for (int begin = first; begin < last; begin += kTokens * kCombinePlanWarps) {
            uint32_t mine[kTokens], low[kTokens];
            int below[kTokens] = {}, alike[kTokens] = {}, lower[kTokens] = {};
            for (int i = 0; i < kTokens; ++i) {
                const int token = min(begin + i * kCombinePlanWarps + warp, G.tokens - 1);
                mine[i] = lateness(sequence, token);
                low[i] = by_block ? mine[i] - (mine[i] & 0x7fffffffu) % G.pad : mine[i];
            }
            for (int chunk = 0; chunk < G.tokens; chunk += kCombineKeys) {
                const int held = min(kCombineKeys, G.tokens - chunk);
                __syncthreads();
                for (int i = threadIdx.x; i < held; i += kCombinePlanThreads) keys[i] = lateness(sequence, chunk + i);
                __syncthreads();
                for (int at = lane_id(); at < held; at += kWarpThreads) {
                    const uint32_t key = keys[at];
#pragma unroll
                    for (int i = 0; i < kTokens; ++i) {
                        const int token = begin + i * kCombinePlanWarps + warp;
                        below[i] += key < low[i];
                        alike[i] += key >= low[i] && key - low[i] < static_cast<uint32_t>(by_block ? G.pad : 1);
                        lower[i] += key < mine[i] || (key == mine[i] && chunk + at < token);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kTokens; ++i) {
                const int token = begin + i * kCombinePlanWarps + warp;
                const int before = sum(below[i]), same = sum(alike[i]), rank = sum(lower[i]);
                if (token >= last) continue;
                for (int group = lane_id(); group < G.groups; group += kWarpThreads) {
                    const int place = by_block ? before * G.groups + group * same + rank - before
                                               : group * G.tokens + rank;
                    G.jobs[place] = token * G.groups + group;
                }
            }
        }
    }
    static TKT_DEVICE int sum(int value) {
#pragma unroll
        for (int by = kWarpThreads / 2; by > 0; by /= 2) value += __shfl_sync(kAll, value, (lane_id() + by) % kWarpThreads);
        return value;
    }

    TKT_DEVICE void run() const {
        const uint64_t sequence = G.state[0] + 1;
        const int wanted = G.words[2];
        const bool pulls = G.form == TKT_FORM_PULL;
        if (blockIdx.x == 0) count(sequence, wanted);
        push(sequence);
        describe(pulls ? G.tokens : wanted);
        if (!pulls) list_pushes(wanted);
        await_planes(sequence, pulls ? 0 : blockIdx.x, pulls ? gridDim.x : blockIdx.x + 1);
        read(sequence);
        if (pulls) list_pulls(sequence);
        __syncthreads();
        if (threadIdx.x == 0 && add_acquire_release(G.state + 1, 1) == sequence * gridDim.x - 1) G.state[0] = sequence;
    }
};

}  // namespace tkt
