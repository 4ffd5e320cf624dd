// The dispatch role: resident blocks draw waves of rows and fetch each from the rank that has it. Gathered: a row is
// stored to every local slot that wants it. Indexed: it is stored once, to its place among all ranks' tokens, and this
// rank's own rows stay where they are. The gate is on the other side. The role waits for no block and no rank, so that
// whoever waits for it is always served.
#pragma once

#include "dispatch_config.cuh"
#include "signals.cuh"

namespace tkt {

// A warp's place in its ring of row slots, whose number is known at run time only.
struct slot_place {
    int index = 0;
    uint32_t phase = 0;
    TKT_DEVICE void advance(int slots) {
        if (++index == slots) {
            index = 0;
            phase ^= 1;
        }
    }
};

// One warp of a communicating block. Items are the slots of the head, then the tokens that are wanted, each for its
// slots beyond the head (indexed: no head, and own tokens need no fetching). Slot by slot the first pad blocks are complete soonest; token by token no row is fetched
// twice. An item in flight holds one row slot from the issue of its load until its stores are performed; loads run
// `warp_slots - pending` items ahead of the stores. The first lane issues and waits; lanes look up destinations and
// count arrivals.
template <typename Globals>
struct dispatch_warp {
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr bool kIndexed = Globals::kIndexed;

    const Globals& G;
    semaphore* const full;     // of this warp's slots
    char* const rows;
    const uint32_t row_bytes;
    const int head;              // items below are slots
    const int num_items;
    int draws;                   // waves this warp may still take
    int ahead = 0;               // first lane: the next wave to take, drawn while the one before it is fetched
    int first = 0;               // item of lane 0 in the current wave
    uint32_t waiting = 0;        // lanes whose item of the current wave is not fetched yet
    int2 request{-1, -1};
    int held = 0;                // lane s: the item in slot s
    int held_row = 0;            // lane s: indexed: where that item's row goes

    TKT_DEVICE dispatch_warp(const Globals& G, char* memory, int draws)
        : G(G),
          full(reinterpret_cast<semaphore*>(memory) + warp_id() * G.warp_slots),
          rows(memory + kSlotReserveBytes + static_cast<int64_t>(warp_id()) * G.warp_slots * G.gemm.reduction * 2),
          row_bytes(G.gemm.reduction * 2),
          head(kIndexed ? 0 : min(G.head, __ldg(G.plan + kPlanRows))),
          num_items(head < __ldg(G.plan + kPlanRows) ? head + __ldg(G.plan + kPlanTokens) : head),
          draws(draws) {}

    TKT_DEVICE char* row(int slot) const { return rows + slot * row_bytes; }
    TKT_DEVICE int fan(int item) const { return item < head ? 1 : G.top_k; }
    TKT_DEVICE const int32_t* slots_of(int item) const {
        return G.pull_slots + static_cast<int64_t>(item - head) * G.top_k;
    }
    TKT_DEVICE int destination(int item, int x) const {
        if (x >= fan(item)) return -1;
        if (item < head) return item;
        const int slot = __ldg(slots_of(item) + x);
        return slot < head ? -1 : slot;
    }

    // Only a wave that will be taken: its rows would be lost otherwise. Nobody needs the answer for a while.
    TKT_DEVICE void draw_ahead() {
        if (draws > 0 && lane_id() == 0) ahead = atomicAdd(G.queue + kNextWave, 1);
    }

    // Sees to it that a lane of the wave has a row to fetch; padding slots have none. False when the queue is dry.
    TKT_DEVICE bool draw() {
        while (waiting == 0) {
            if (draws == 0) return false;
            --draws;
            first = __shfl_sync(kAll, ahead, 0) * G.wave;
            if (first >= num_items) {
                draws = 0;
                return false;
            }
            draw_ahead();
            const int item = first + lane_id();
            request = make_int2(-1, -1);
            if (lane_id() < G.wave && item < head) request = __ldg(G.pull_indices + item);
            if (lane_id() < G.wave && item >= head && item < num_items) {
                request = __ldg(G.pull_tokens + (item - head));
                if (kIndexed && request.x == G.gemm.guard.rank)
                    request.x = -1;
                else
                    prefetch(slots_of(item));  // looked up when the row is here
            }
            waiting = __ballot_sync(kAll, request.x >= 0);
        }
        return true;
    }

    TKT_DEVICE void load(int slot) {
        const int lane = __ffs(waiting) - 1;
        waiting &= waiting - 1;
        const int source = __shfl_sync(kAll, request.x, lane), token = __shfl_sync(kAll, request.y, lane);
        if (lane_id() == slot) {
            held = first + lane;
            held_row = source * G.tokens[source].rows + token;
        }
        if (lane_id() == 0) {
            tma::expect_bytes(full[slot], row_bytes);
            tma::load_bytes(row(slot), G.tokens[source].at(token, 0), row_bytes, full[slot]);
        }
    }

    TKT_DEVICE void store_to(int64_t row_index, int slot) const {
        if (lane_id() == 0) tma::store_bytes(G.gathered + row_index * G.gemm.reduction, row(slot), row_bytes);
    }

    TKT_DEVICE void store(int slot) {
        if constexpr (kIndexed) {
            store_to(__shfl_sync(kAll, held_row, slot), slot);
            if (lane_id() == 0) tma::commit();
            return;
        }
        const int item = __shfl_sync(kAll, held, slot);
        for (int base = 0; base < fan(item); base += kWarpThreads) {
            const int to = destination(item, base + lane_id());
            // Rolled and warp-uniform: the copy engine's operands live in uniform registers.
#pragma unroll 1
            for (uint32_t left = __ballot_sync(kAll, to >= 0); left; left &= left - 1)
                store_to(__shfl_sync(kAll, to, __ffs(left) - 1), slot);
        }
        if (lane_id() == 0) tma::commit();
    }

    // The full wait: a row counts as arrived, and its slot as free, when the stores are performed. By the lane that
    // issued them; the others' releases follow it through the warp's barrier.
    TKT_DEVICE void wait_for_stores(int pending) const {
        if (lane_id() == 0) {
            switch (pending) {
                case 0: tma::store_async_wait<0>(); break;
                case 1: tma::store_async_wait<1>(); break;
                case 2: tma::store_async_wait<2>(); break;
                case 3: tma::store_async_wait<3>(); break;
                default: tma::store_async_wait<4>(); break;
            }
        }
        __syncwarp();
    }

    TKT_DEVICE void arrived(int slot) const {
        const int item = __shfl_sync(kAll, held, slot);
        for (int base = 0; base < fan(item); base += kWarpThreads) {
            const int to = destination(item, base + lane_id());
            if (to >= 0) add_release(G.arrivals + to / G.gemm.pad, 1);
        }
    }

    TKT_DEVICE void run() {
        draw_ahead();
        if (lane_id() == 0) {
            for (int slot = 0; slot < G.warp_slots; ++slot) init_semaphore(full[slot], 1);
            publish_semaphores();
        }
        __syncwarp();
        slot_place loading, storing, retiring;
        int loaded = 0, stored = 0;  // rows in slots: still loading or just loaded; stores under way
        for (;;) {
            while (loaded + stored < G.warp_slots && draw()) {
                load(loading.index);
                loading.advance(G.warp_slots);
                ++loaded;
            }
            if (loaded == 0) break;
            wait<wait_role::communicate, wait_word::stage_full>(full[storing.index], storing.phase, G.gemm.guard);
            __syncwarp();
            store(storing.index);
            storing.advance(G.warp_slots);
            --loaded;
            ++stored;
            if (stored > G.pending) {
                wait_for_stores(G.pending);
                arrived(retiring.index);
                retiring.advance(G.warp_slots);
                --stored;
            }
        }
        wait_for_stores(0);
        for (; stored > 0; --stored) {
            arrived(retiring.index);
            retiring.advance(G.warp_slots);
        }
        if (lane_id() == 0) {  // whoever computes next lays its stages over the semaphores
            for (int slot = 0; slot < G.warp_slots; ++slot) drop_semaphore(full[slot]);
            fence_async_shared();
        }
    }
};

// Every thread of the block comes here; each communicating warp draws at most `draws` waves.
template <typename Globals>
TKT_DEVICE void dispatch(const Globals& G, int draws) {
    extern __shared__ __align__(1024) char shared_memory[];
    if (warp_id() < G.comm_warps) dispatch_warp<Globals>(G, shared_memory, draws).run();
}

// Returns when every row of a pad block has arrived (padding counts from the start) and may be read. A row was written
// by the async proxy; its writer waited until the write was performed, which orders it before the writer's own generic
// proxy, and then released. So TMA needs a fence after the acquire here, and the ordinary copies by index need none.
template <typename Globals>
struct dispatch_gate {
    const Globals& G;

    using entry = int2;  // source rank and token
    TKT_DEVICE entry look_up(int slot) const { return __ldg(G.pull_indices + slot); }
    TKT_DEVICE int row_of(entry found) const {
        const bool real = found.x >= 0;
        return (real ? found.x : G.gemm.guard.rank) * G.tokens[0].rows + (real ? found.y : 0);
    }
    TKT_DEVICE bool waits() const { return G.roles & kGated; }

    TKT_DEVICE void operator()(int pad_block) const {
        if (!(G.roles & kGated)) return;
        const int32_t* word = G.arrivals + pad_block;
        spin_until<wait_role::gate, wait_word::arrivals, 32>(
            G.gemm.guard, pad_block, G.gemm.pad, [&] { return look(word) >= G.gemm.pad; },
            [&] { return static_cast<int64_t>(look(word)); });
        if constexpr (!Globals::kIndexed) fence_async();
    }
};

// The tail of a launch, by one warp of each block after all of the block's work: the last block out seeds every word
// again, so that the next launch in the stream, or the next replay, finds them as this one did.
template <typename Globals>
TKT_DEVICE void leave(const Globals& G) {
    bool last = false;
    if (lane_id() == 0)
        last = add_acquire_release(G.queue + kBlocksDone, 1) == static_cast<int32_t>(gridDim.x) - 1;
    if (!__shfl_sync(0xffffffffu, last, 0)) return;
    const int blocks = __ldg(G.plan + kPlanBlocks);
    for (int block = lane_id(); block < blocks; block += kWarpThreads) G.arrivals[block] = __ldg(G.slack + block);
    if (lane_id() == 0) {
        G.queue[kNextWave] = 0;
        G.queue[kBlocksDone] = 0;
        G.gemm.dispenser[0] = 0;
        G.gemm.dispenser[1] = kNeverLast;
    }
}

}  // namespace tkt
