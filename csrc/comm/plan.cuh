// Schedule tables of one rank, built by a few resident blocks: ids travel to every rank, then each rank counts, adds up
// and places. Every block and warp has a run of 32-token words of each source, so that places follow from counts and
// no two threads ever race for one. Ring order: by (source - rank) mod world, then token.
#pragma once

#include "blocks.cuh"
#include "plan_config.cuh"

namespace tkt {

struct plan_builder {
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr int kAtOnce = 4;  // loads under way of a thread: none may move over the stores that follow
    static constexpr int kWrong = -2;  // among ids that travel

    const plan_globals& G;
    const int warp;                          // asked for once: all lanes of a warp must ask together
    const int me, local, first, kinds;       // rank; experts here, the first of them; counters of a warp
    const int num_words;                     // of 32 tokens, that a source has
    const int source_warps;                  // of a block, for one source
    const int block_words, warp_words;       // of one source
    int32_t *const counters, *const bits, *const totals, *const sums, *const bases, *const ends;

    TKT_DEVICE plan_builder(const plan_globals& G, int32_t* shared)
        : G(G),
          warp(warp_id()),
          me(G.guard.rank),
          local(G.experts / G.world),
          first(me * local),
          kinds(kKinds * local),
          num_words(ceil_div(G.tokens, kWarpThreads)),
          source_warps(kPlanWarps / G.world),
          block_words(ceil_div(num_words, static_cast<int>(gridDim.x))),
          warp_words(ceil_div(block_words, source_warps)),
          counters(shared),
          bits(counters + kPlanWarps * kinds),
          totals(bits + kPlanWarps * local),
          sums(totals + G.world * kinds),
          bases(sums + kinds),
          ends(bases + kinds) {}

    // A warp's place: the step of its source around the ring, and its words there.
    TKT_DEVICE int step() const { return warp / source_warps; }
    TKT_DEVICE bool works() const { return step() < G.world; }
    TKT_DEVICE int source_of(int step) const {
        const int source = me + step;
        return source < G.world ? source : source - G.world;
    }
    TKT_DEVICE int begin() const { return blockIdx.x * block_words + warp % source_warps * warp_words; }
    TKT_DEVICE int end() const {
        return min(min(begin() + warp_words, static_cast<int>(blockIdx.x + 1) * block_words), num_words);
    }

    TKT_DEVICE uint64_t* signal(int at, int source) const {
        return reinterpret_cast<uint64_t*>(G.region[at] + plan_region::kSignals) + source * kPlanMostBlocks + blockIdx.x;
    }
    TKT_DEVICE int32_t* ids(int at, uint64_t sequence, int source) const {
        const int64_t matrix = (sequence & 1) * G.world + source;
        return reinterpret_cast<int32_t*>(G.region[at] + plan_region::kIds) + matrix * G.tokens * G.top_k;
    }
    TKT_DEVICE int64_t given(int64_t at) const {
        return G.id_bytes == 8 ? static_cast<const int64_t*>(G.ids)[at] : static_cast<const int32_t*>(G.ids)[at];
    }

    // Gives this block's tokens to every rank; -1 is no expert, as the caller says it of tokens that are not there, and
    // kWrong what is none or named twice. Two plans ago everybody had read this half of the buffer: the last plan's ids
    // came from ranks that were done with the one before. Calls `note(at, expert)` for each right id, and by all threads
    // `tell()` before other ranks hear of it.
    template <typename Note, typename Tell>
    TKT_DEVICE void give(uint64_t sequence, Note note, Tell tell) const {
        const int from = min(static_cast<int>(blockIdx.x) * block_words * kWarpThreads, G.tokens) * G.top_k;
        const int to = min(static_cast<int>(blockIdx.x + 1) * block_words * kWarpThreads, G.tokens) * G.top_k;
        for (int begin = from + threadIdx.x; begin < to; begin += kAtOnce * kPlanThreads) {
            int64_t some[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (begin + i * kPlanThreads < to) some[i] = given(begin + i * kPlanThreads);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int at = begin + i * kPlanThreads;
                if (at >= to) break;
                bool right = some[i] >= -1 && some[i] < G.experts;
#pragma unroll 1
                for (int other = at - at % G.top_k; other < at; ++other)
                    right = right && (given(other) != some[i] || some[i] == -1);
#pragma unroll 1
                for (int rank = 0; rank < G.world; ++rank)
                    ids(source_of(rank), sequence, me)[at] = right ? static_cast<int32_t>(some[i]) : kWrong;
                if (right && some[i] >= 0) note(at, static_cast<int>(some[i]));
            }
        }
        tell();
        __threadfence_system();
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < G.world) announce(signal(threadIdx.x, me), sequence);
    }

    // The same block of every rank has given the tokens that this block is going to count.
    TKT_DEVICE void await_ids(uint64_t sequence) const {
        if (static_cast<int>(threadIdx.x) < G.world) {
            const uint64_t* word = signal(me, threadIdx.x);
            spin_until<wait_role::planner, wait_word::ids, 64>(
                G.guard, threadIdx.x, static_cast<int64_t>(sequence), [&] { return look_at_peers(word) >= sequence; },
                [&] { return static_cast<int64_t>(look_at_peers(word)); });
        }
        __syncthreads();
    }

    // Calls `each(x, expert)` for this lane's token of `from`, with experts counted from `first` on, -1 where the expert is
    // of another rank. False when an id was wrong.
    template <typename Each>
    TKT_DEVICE bool for_experts(const int32_t* from, int token, int first, Each each) const {
        bool right = true;
        if (token < G.tokens) {
            const int32_t* mine = from + static_cast<int64_t>(token) * G.top_k;
            for (int begin = 0; begin < G.top_k; begin += kAtOnce) {
                int some[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) some[i] = begin + i < G.top_k ? __ldcg(mine + begin + i) : 0;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    if (begin + i >= G.top_k) break;
                    const int expert = some[i] - first;
                    right = right && some[i] != kWrong;
                    each(begin + i, some[i] >= 0 && expert >= 0 && expert < local ? expert : -1);
                }
            }
        }
        return right;
    }

    TKT_DEVICE void count(uint64_t sequence) const {
        for (int i = threadIdx.x; i < kPlanWarps * kinds; i += kPlanThreads) counters[i] = 0;
        __syncthreads();
        bool right = true;
        if (works()) {
            int32_t* const mine = counters + warp * kinds;
            const int32_t* from = ids(me, sequence, source_of(step()));
            for (int word = begin(); word < end(); ++word) {
                int lowest = local, highest = -1;
                const bool fine = for_experts(from, word * kWarpThreads + lane_id(), first, [&](int, int expert) {
                    if (expert < 0) return;
                    atomicAdd(mine + kRows * local + expert, 1);
                    lowest = min(lowest, expert);
                    highest = max(highest, expert);
                });
                right = right && fine;
                if (highest >= 0) {
                    atomicAdd(mine + kFirsts * local + lowest, 1);
                    atomicAdd(mine + kLasts * local + highest, 1);
                }
            }
        }
        if (!right) *const_cast<volatile int32_t*>(G.status + kWrongIds) = 1;
        __syncthreads();
        for (int i = threadIdx.x; i < G.world * kinds; i += kPlanThreads) {
            const int step = i / kinds, kind = i % kinds;
            int sum = 0;
#pragma unroll 4
            for (int sub = 0; sub < source_warps; ++sub) sum += counters[(step * source_warps + sub) * kinds + kind];
            G.counted[(step * gridDim.x + blockIdx.x) * kinds + kind] = sum;
        }
    }

    // Turns every warp's counters into places: where its next row of an expert goes, its next token of a first or last
    // expert.
    TKT_DEVICE void add_up() const {
        for (int i = threadIdx.x; i < G.world * kinds; i += kPlanThreads) {
            const int step = i / kinds, kind = i % kinds, blocks = gridDim.x;
            const int32_t* column = G.counted + step * blocks * kinds + kind;
            int total = 0, before = 0;
#pragma unroll 8
            for (int block = 0; block < blocks; ++block) {
                const int some = __ldcg(column + block * kinds);
                before += block < static_cast<int>(blockIdx.x) ? some : 0;
                total += some;
            }
            totals[i] = total;
#pragma unroll 1
            for (int sub = 0; sub < source_warps; ++sub) {
                int32_t& counter = counters[(step * source_warps + sub) * kinds + kind];
                const int some = counter;
                counter = before;
                before += some;
            }
        }
        __syncthreads();
        for (int kind = threadIdx.x; kind < kinds; kind += kPlanThreads) {
            int sum = 0;
            for (int step = 0; step < G.world; ++step) {
                const int some = totals[step * kinds + kind];
                totals[step * kinds + kind] = sum;
                sum += some;
            }
            sums[kind] = sum;
        }
        __syncthreads();
        if (warp < kKinds) {  // the experts of one kind after each other, rows padded
            const int of = warp * local;
            int carried = 0;
            for (int at = 0; at < local; at += kWarpThreads) {
                const int expert = at + lane_id();
                const int sum = expert < local ? sums[of + expert] : 0;
                const int wide = warp == kRows ? ceil_div(sum, G.pad) * G.pad : sum;
                int until = wide;
#pragma unroll
                for (int by = 1; by < kWarpThreads; by *= 2) {
                    const int lower = __shfl_up_sync(kAll, until, by);
                    if (lane_id() >= by) until += lower;
                }
                if (expert < local) bases[of + expert] = carried + until - wide;
                carried += __shfl_sync(kAll, until, kWarpThreads - 1);
            }
            if (lane_id() == 0) ends[warp] = carried;
        }
        __syncthreads();
        if (works())
            for (int kind = lane_id(); kind < kinds; kind += kWarpThreads)
                counters[warp * kinds + kind] += bases[kind] + totals[step() * kinds + kind];
        __syncwarp();
    }

    TKT_DEVICE bool fits() const { return ends[kRows] <= G.capacity; }

    TKT_DEVICE void place(uint64_t sequence) const {
        if (!works()) return;
        int32_t* const mine = counters + warp * kinds;
        uint32_t* const held = reinterpret_cast<uint32_t*>(bits) + warp * local;  // lanes whose token has an expert
        const uint32_t lane = 1u << lane_id(), below = lane - 1;
        const int source = source_of(step()), most = G.world * G.tokens;
        const int32_t* from = ids(me, sequence, source);
        const bool fit = fits();
        for (int word = begin(); word < end(); ++word) {
            const int token = word * kWarpThreads + lane_id();
            for (int expert = lane_id(); expert < local; expert += kWarpThreads) held[expert] = 0;
            __syncwarp();
            int lowest = local, highest = -1;
            for_experts(from, token, first, [&](int, int expert) {
                if (expert < 0) return;
                atomicOr(held + expert, lane);
                lowest = min(lowest, expert);
                highest = max(highest, expert);
            });
            const uint32_t alike = __match_any_sync(kAll, lowest), last_alike = __match_any_sync(kAll, highest);
            __syncwarp();
            // The comparisons with bounds matter only after an abort, when ids may change under way.
            int position = -1;
            if (highest >= 0) {
                position = mine[kFirsts * local + lowest] + __popc(alike & below);
                const int job = mine[kLasts * local + highest] + __popc(last_alike & below);
                if (position >= most) position = -1;
                if (position >= 0) G.pull_tokens[position] = make_int2(source, token);
                if (job < most) G.job_order[job] = position;
            }
            for_experts(from, token, first, [&](int x, int expert) {
                int slot = -1;
                if (expert >= 0 && fit) slot = mine[kRows * local + expert] + __popc(held[expert] & below);
                if (slot >= G.capacity) slot = -1;
                if (slot >= 0) G.pull_indices[slot] = make_int2(source, token);
                G.slots[(static_cast<int64_t>(source) * G.tokens + token) * G.top_k + x] = slot;
                if (position >= 0) G.pull_slots[static_cast<int64_t>(position) * G.top_k + x] = slot;
            });
            __syncwarp();
            for (int expert = lane_id(); expert < local; expert += kWarpThreads)
                mine[kRows * local + expert] += __popc(held[expert]);
            if (highest >= 0 && !(alike & below)) mine[kFirsts * local + lowest] += __popc(alike);
            if (highest >= 0 && !(last_alike & below)) mine[kLasts * local + highest] += __popc(last_alike);
            __syncwarp();
        }
    }

    // Bit s is set where another rank s has a row of this pad block of a local expert, counted from its first one. Rows of
    // an expert stand in ring order.
    TKT_DEVICE int sources_of(int expert, int block) const {
        const int32_t* from = totals + kRows * local + expert;
        int found = 0;
        for (int step = 1; step < G.world; ++step) {
            const int end = step + 1 < G.world ? from[(step + 1) * kinds] : sums[kRows * local + expert];
            if (max(from[step * kinds], block * G.pad) < min(end, (block + 1) * G.pad)) found |= 1 << source_of(step);
        }
        return found;
    }

    // What follows from the counts alone, experts dealt out to the blocks. Rows that do not fit make an empty plan.
    TKT_DEVICE void describe(uint64_t sequence) const {
        const bool fit = fits();
        for (int expert = blockIdx.x; expert < local; expert += gridDim.x) {
            const int count = fit ? sums[kRows * local + expert] : 0, base = fit ? bases[kRows * local + expert] : 0;
            const int blocks = ceil_div(count, G.pad);
            // An expert's own rows are its first: those before the next step around the ring begins.
            const int own = !fit || G.world == 1 ? count : totals[kinds + kRows * local + expert];
            for (int row = count + threadIdx.x; row < blocks * G.pad; row += kPlanThreads)
                G.pull_indices[base + row] = make_int2(-1, -1);
            for (int block = threadIdx.x; block < blocks; block += kPlanThreads) {
                const int at = base / G.pad + block, slack = max(0, (block + 1) * G.pad - count);
                G.block_expert[at] = expert;
                const int own_slack = slack + min(max(own - block * G.pad, 0), G.pad);
                G.slack[at] = slack;
                G.own_slack[at] = own_slack;
                G.arrivals[at] = G.own_in_place ? own_slack : slack;
                if (G.gate_sources) G.gate_sources[at] = sources_of(expert, block);
            }
            if (threadIdx.x == 0) {
                G.counts[expert] = count;
                G.base[expert] = base;
                G.walk[expert] = make_int4(expert, base, count, 0);
            }
        }
        if (blockIdx.x != 0 || threadIdx.x != 0) return;
        const int rows = fit ? ends[kRows] : 0;
        G.words[0] = rows;
        G.words[1] = rows / G.pad;
        G.words[2] = fit ? ends[kFirsts] : 0;
        if (!fit) *const_cast<volatile int32_t*>(G.status + kRowsWanted) = ends[kRows];
        if (G.queue) G.queue[0] = G.queue[1] = G.queue[2] = 0;
        if (G.dispenser) {
            G.dispenser[0] = 0;
            G.dispenser[1] = G.never_last;
        }
        G.state[0] = sequence;  // every block had read it before they met
    }

    // Behind the giving of ids.
    TKT_DEVICE void build(uint64_t sequence) const {
        await_ids(sequence);
        count(sequence);
        blocks_meet(G.guard, G.state + 1, sequence * gridDim.x);
        add_up();
        place(sequence);
        describe(sequence);
    }

    TKT_DEVICE void run() const {
        const uint64_t sequence = G.state[0] + 1;
        give(sequence, [](int, int) {}, [] {});
        build(sequence);
    }
};

}  // namespace tkt
