// The push role: a rank's communicating blocks bring its own rows to the ranks that want them, each once a destination,
// into this rank's section of their memory. By index: they say of each pad block there when its last row of this rank is
// in place, and its gate waits for that; local atomics elect, one plain store announces. Gathered: they say it of each
// row, and whoever scatters rows there waits for that. A link without remote atomics serves as well. The role waits for
// no block and no rank, so that whoever waits for a flag is always served.
#pragma once

#include "dispatch.cuh"
#include "push_config.cuh"
#include "scatter.cuh"

namespace tkt {

// One warp of a communicating block. Items are dealt to the destinations in turn, around the ring from the next rank on;
// each destination's tokens come in the order in which it needs them. A row in flight holds a slot from the issue of its
// load until its store has read it, and counts as there when the store is performed, which is later: it is loaded,
// stored, freed, retired. The first lane issues and waits.
template <typename Globals>
struct push_warp {
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr int kOthers = Globals::world - 1;
    static constexpr int kTokenBits = 28;  // of a target, below the destination
    static constexpr int kPrefetched = 128;  // items ahead of the queue whose tables are brought to L2
    // Rows that are announced one by one share a fence.
    static constexpr int kRetiredAtOnce = Globals::kIndexed ? 1 : 4;

    const Globals& G;
    const int me, tokens;
    semaphore* const full;  // of this warp's slots
    char* const rows;
    const uint32_t row_bytes;
    const int num_items, unread, pending;
    int draws;             // waves this warp may still take
    int ahead = 0;         // first lane: the next wave to take, drawn while the one before it is pushed
    uint32_t waiting = 0;  // lanes whose item of the current wave is not pushed yet
    int target = -1, place = 0;            // this lane's item: destination and token; place in the tables
    int held_target = 0, held_place = 0;   // lane n % 32: those of row n
    slot_place loading, storing;
    int loaded = 0, stored = 0, freed = 0, retired = 0;  // rows

    TKT_DEVICE push_warp(const Globals& G, char* memory, int draws)
        : G(G),
          me(G.gemm.guard.rank),
          tokens(G.tokens[0].rows),
          full(reinterpret_cast<semaphore*>(memory) + warp_id() * G.warp_slots),
          rows(memory + kSlotReserveBytes + static_cast<int64_t>(warp_id()) * G.warp_slots * G.gemm.reduction * 2),
          row_bytes(G.gemm.reduction * 2),
          num_items(__ldg(G.push_plan + Globals::kTurns) * kOthers),
          unread(min(G.unread, G.warp_slots - 1)),
          pending(G.pending),
          draws(draws) {}

    TKT_DEVICE char* row(int slot) const { return rows + slot * row_bytes; }
    static TKT_DEVICE int to_of(int target) { return target >> kTokenBits; }
    static TKT_DEVICE int token_of(int target) { return target & ((1 << kTokenBits) - 1); }
    TKT_DEVICE const int32_t* blocks_of(int at) const { return G.push_blocks + static_cast<int64_t>(at) * G.top_k; }

    // Only a wave that will be taken: its rows would be lost otherwise. Nobody needs the answer for a while.
    TKT_DEVICE void draw_ahead() {
        if (draws > 0 && lane_id() == 0) ahead = atomicAdd(G.queue + kNextPush, 1);
    }

    // Sees to it that a lane of the wave has a row to push; a destination that wants few has none left. False when the
    // queue is dry.
    TKT_DEVICE bool draw() {
        while (waiting == 0) {
            if (draws == 0) return false;
            --draws;
            const int first = __shfl_sync(kAll, ahead, 0) * G.wave;
            if (first >= num_items) {
                draws = 0;
                return false;
            }
            draw_ahead();
            const int item = first + lane_id();
            target = -1;
            if (lane_id() < G.wave && item < num_items) {
                int to = me + 1 + item % kOthers;
                if (to >= Globals::world) to -= Globals::world;
                place = to * tokens + item / kOthers;
                const int token = __ldg(G.push_tokens + place);
                if (token >= 0) target = to << kTokenBits | token;
                if (item + kPrefetched < num_items) {
                    prefetch(G.push_tokens + place + kPrefetched / kOthers);
                    if (Globals::kIndexed) prefetch(blocks_of(place + kPrefetched / kOthers));
                }
            }
            waiting = __ballot_sync(kAll, target >= 0);
        }
        return true;
    }

    TKT_DEVICE void load() {
        const int lane = __ffs(waiting) - 1;
        waiting &= waiting - 1;
        const int its_target = __shfl_sync(kAll, target, lane), its_place = __shfl_sync(kAll, place, lane);
        if (lane_id() == loaded % kWarpThreads) {
            held_target = its_target;
            held_place = its_place;
        }
        if (lane_id() == 0) {
            tma::expect_bytes(full[loading.index], row_bytes);
            tma::load_bytes(row(loading.index), G.tokens[me].at(token_of(its_target), 0), row_bytes, full[loading.index]);
        }
        ++loaded;
        loading.advance(G.warp_slots);
    }

    TKT_DEVICE void store() {
        const int its_target = __shfl_sync(kAll, held_target, stored % kWarpThreads);
        if (lane_id() == 0) {
            bf16* const there = G.sections[to_of(its_target)].at(me * tokens + token_of(its_target), 0);
            tma::store_bytes(there, row(storing.index), row_bytes);
            tma::commit();
        }
        ++stored;
        storing.advance(G.warp_slots);
    }

    // Slots whose stores have read them are free; whether the rows are there to be seen is another matter.
    TKT_DEVICE void free_slots() {
        wait_read(unread);
        freed = stored - unread;
    }

    // The full wait: a row counts as there when its store is performed. By the lane that issued it; what the others do
    // follows through the warp's barrier.
    TKT_DEVICE void retire(int open) {
        if (lane_id() == 0) {
            at_most<kMostOpen>(open, [](auto n) { tma::store_async_wait<n.value>(); });
            if (!Globals::kIndexed && retired < stored - open) fence_system();
        }
        __syncwarp();
        freed = max(freed, stored - open);
        for (; retired < stored - open; ++retired) arrived(retired % kWarpThreads);
    }

    TKT_DEVICE void arrived(int entry) const {
        if constexpr (Globals::kIndexed) {
            count(entry);
            return;
        }
        const int its_target = __shfl_sync(kAll, held_target, entry);
        if (lane_id() == 0)
            announce_fenced(G.flags[to_of(its_target)] + me * tokens + token_of(its_target), *G.sequence);
    }

    // Whoever counts the last row that a pad block gets from this rank tells that block's gate, and puts the count back
    // for the next launch: nobody else comes to it in this one. Its fence acquires what all others released with their
    // counts, and releases it to the peer.
    TKT_DEVICE void count(int entry) const {
        const int its_to = to_of(__shfl_sync(kAll, held_target, entry));
        const int its_place = __shfl_sync(kAll, held_place, entry);
        for (int x = lane_id(); x < G.top_k; x += kWarpThreads) {
            const int block = __ldg(blocks_of(its_place) + x);
            if (block < 0) continue;
            const int counter = __ldg(G.push_plan + its_to) + block;
            if (fetch_add_release(G.missing + counter, -1) != 1) continue;
            fence_system();
            G.missing[counter] = __ldg(G.push_expected + counter);
            announce_fenced(G.flags[its_to] + static_cast<int64_t>(block) * Globals::world + me, *G.sequence);
        }
    }

    // Whether the next row to store is here already: the first lane's word.
    TKT_DEVICE bool here() const { return slot_filled(full, storing); }

    TKT_DEVICE void run() {
        draw_ahead();
        open_slots(full, G.warp_slots);
        for (;;) {
            while (loaded - freed < G.warp_slots && draw()) load();
            if (stored == loaded) break;
            if (stored - retired >= pending + kRetiredAtOnce) retire(pending);
            if (stored > retired && !here()) {  // nothing better to do than to count what was stored
                retire(0);
                continue;
            }
            wait<wait_role::communicate, wait_word::stage_full>(full[storing.index], storing.phase, G.gemm.guard);
            __syncwarp();
            store();
            if (stored - freed > unread) free_slots();
        }
        retire(0);
        close_slots(full, G.warp_slots);
    }
};

// Every thread of the block comes here. `place`: of this block among those that communicate, -1 beyond them; by index
// each communicating warp draws at most `draws` waves to push, gathered to scatter.
template <typename Globals>
TKT_DEVICE void push(const Globals& G, int place, int draws) {
    extern __shared__ __align__(1024) char shared_memory[];
    if (warp_id() >= G.comm_warps) return;
    if constexpr (Globals::world > 1)
        if (Globals::kIndexed || (place >= 0 && place < G.num_push_blocks))
            push_warp<Globals>(G, shared_memory, Globals::kIndexed ? draws : 0x7fffffff).run();
    if constexpr (!Globals::kIndexed) scatter_warp<Globals>(G, shared_memory, draws).run();
}

// By index. Returns when every rank that owes rows of a pad block has said that they are in place: a lane of the calling
// warp waits for each of them, and what all lanes saw is seen behind the warp's next barrier. Own rows and padding wait
// for nobody. Proxies: as for the gate of pulled rows.
template <typename Globals>
struct push_gate : dispatch_gate<Globals> {
    using whole_warp = void;

    TKT_DEVICE void operator()(int pad_block) const {
        const Globals& G = this->G;
        if (!(G.roles & kGated)) return;
        const int source = lane_id();
        if (source >= Globals::world || !late(pad_block, source)) return;
        const int index = pad_block * Globals::world + source;
        const uint64_t* const word = G.flags[G.gemm.guard.rank] + index;
        const uint64_t sequence = *G.sequence;
        spin_until<wait_role::gate, wait_word::flag, 32>(
            G.gemm.guard, index, static_cast<int64_t>(sequence), [&] { return look_at_peers(word) >= sequence; },
            [&] { return static_cast<int64_t>(look_at_peers(word)); });
    }

    // All that it takes to know is asked for at once: a tile waits for one answer, not for three.
    TKT_DEVICE bool late(int pad_block, int source) const {
        const Globals& G = this->G;
        const uint32_t sources = __ldg(G.gate_sources + pad_block);
        const uint64_t sequence = *G.sequence;
        const uint64_t seen = look_at_peers(G.flags[G.gemm.guard.rank] + pad_block * Globals::world + source);
        return (sources >> source & 1) && seen < sequence;
    }
};

template <typename Globals, bool BY_INDEX>
struct pushed_gate {
    using type = dispatch_gate<Globals>;
};
template <typename Globals>
struct pushed_gate<Globals, true> {
    using type = push_gate<Globals>;
};
// Gathered rows are counted where they are scattered, as pulled ones are.
template <typename Globals>
using gate_of_pushed = typename pushed_gate<Globals, Globals::kIndexed>::type;

}  // namespace tkt
