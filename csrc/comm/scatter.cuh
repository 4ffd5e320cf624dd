// The scatter role: where rows are gathered by slot and pushed once, a rank's communicating blocks store each staged row,
// and each own one, to every local slot that wants it. It waits for rows that peers push, and the push role waits for
// nothing, so that whoever waits for a slot is always served.
#pragma once

#include "dispatch.cuh"
#include "push_config.cuh"

namespace tkt {

// One warp of a communicating block. Items are the tokens that are wanted here, in pull order, which is also the order of
// every peer's pushes. A row in flight holds a slot from the issue of its load until its stores have read it, and counts as
// arrived when they are performed, which is later: it is loaded, stored, freed, retired. Before a wait for a row that is
// not staged yet everything in flight is finished: a gate may wait for it.
template <typename Globals>
struct scatter_warp {
    static constexpr uint32_t kAll = 0xffffffffu;

    const Globals& G;
    const int me, tokens;
    semaphore* const full;  // of this warp's slots
    char* const rows;
    const uint32_t row_bytes;
    const int num_items, unread, pending;
    const uint64_t sequence;
    int draws;             // waves this warp may still take
    int ahead = 0;         // first lane: the next wave to take, drawn while the one before it is scattered
    int first = 0;         // item of lane 0 in the current wave
    uint32_t waiting = 0;  // lanes whose item of the current wave is not loaded yet
    int row_index = 0;     // of this lane's item among all ranks' tokens
    int held = 0;          // lane n % 32: the item of row n
    slot_place loading, storing;
    int loaded = 0, stored = 0, freed = 0, retired = 0;  // rows

    TKT_DEVICE scatter_warp(const Globals& G, char* memory, int draws)
        : G(G),
          me(G.gemm.guard.rank),
          tokens(G.tokens[0].rows),
          full(reinterpret_cast<semaphore*>(memory) + warp_id() * G.warp_slots),
          rows(memory + kSlotReserveBytes + static_cast<int64_t>(warp_id()) * G.warp_slots * G.gemm.reduction * 2),
          row_bytes(G.gemm.reduction * 2),
          num_items(__ldg(G.plan + kPlanTokens)),
          unread(min(G.unread, G.warp_slots - 1)),
          pending(G.pending),
          sequence(*G.sequence),
          draws(draws) {}

    TKT_DEVICE char* row(int slot) const { return rows + slot * row_bytes; }
    TKT_DEVICE int destination(int item, int x) const {
        return x < G.top_k ? __ldg(G.pull_slots + static_cast<int64_t>(item) * G.top_k + x) : -1;
    }

    // Only a wave that will be taken: its rows would be lost otherwise. Nobody needs the answer for a while.
    TKT_DEVICE void draw_ahead() {
        if (draws > 0 && lane_id() == 0) ahead = atomicAdd(G.queue + kNextWave, 1);
    }

    // Sees to it that a lane of the wave has a row. False when the queue is dry.
    TKT_DEVICE bool draw() {
        if (waiting) return true;
        if (draws == 0) return false;
        --draws;
        first = __shfl_sync(kAll, ahead, 0) * G.wave;
        if (first >= num_items) {
            draws = 0;
            return false;
        }
        draw_ahead();
        const int item = first + lane_id();
        const bool mine = lane_id() < G.wave && item < num_items;
        if (mine) {
            const int2 request = __ldg(G.pull_tokens + item);
            row_index = request.x * tokens + request.y;
            prefetch(G.pull_slots + static_cast<int64_t>(item) * G.top_k);  // looked up when the row is here
        }
        waiting = __ballot_sync(kAll, mine);
        return true;
    }

    TKT_DEVICE int next_row() const { return __shfl_sync(kAll, row_index, __ffs(waiting) - 1); }
    TKT_DEVICE bool own(int row) const { return row / tokens == me; }
    TKT_DEVICE const uint64_t* word(int row) const { return G.flags[me] + row; }

    TKT_DEVICE bool staged(int row) const {
        bool there = own(row);
        if (!there && lane_id() == 0) there = look_at_peers(word(row)) >= sequence;
        return __shfl_sync(kAll, there, 0);
    }
    // Half as long as a gate would wait for the slots of this row: the report must name the row.
    TKT_DEVICE void await_staged(int row) const {
        spin_guard guard = G.gemm.guard;
        guard.limit_kilo_ns = (guard.limit_kilo_ns + 1) / 2;
        if (lane_id() == 0)
            spin_until<wait_role::communicate, wait_word::flag, 64>(
                guard, row, static_cast<int64_t>(sequence), [&] { return look_at_peers(word(row)) >= sequence; },
                [&] { return static_cast<int64_t>(look_at_peers(word(row))); });
        __syncwarp();
    }

    // The copy engine reads what the peer's has written: hence the fence behind the look at its flag.
    TKT_DEVICE void load(int row_of_item) {
        const int lane = __ffs(waiting) - 1;
        waiting &= waiting - 1;
        if (lane_id() == loaded % kWarpThreads) held = first + lane;
        if (lane_id() == 0) {
            if (!own(row_of_item)) fence_async();
            tma::expect_bytes(full[loading.index], row_bytes);
            tma::load_bytes(row(loading.index), G.sections[me].at(row_of_item, 0), row_bytes, full[loading.index]);
        }
        ++loaded;
        loading.advance(G.warp_slots);
    }

    TKT_DEVICE void store() {
        const int item = __shfl_sync(kAll, held, stored % kWarpThreads);
        for (int base = 0; base < G.top_k; base += kWarpThreads) {
            const int to = destination(item, base + lane_id());
            // Rolled and warp-uniform: the copy engine's operands live in uniform registers.
#pragma unroll 1
            for (uint32_t left = __ballot_sync(kAll, to >= 0); left; left &= left - 1) {
                const int64_t there = __shfl_sync(kAll, to, __ffs(left) - 1);
                if (lane_id() == 0)
                    tma::store_bytes(G.gathered + there * G.gemm.reduction, row(storing.index), row_bytes);
            }
        }
        if (lane_id() == 0) tma::commit();
        ++stored;
        storing.advance(G.warp_slots);
    }

    // Slots whose stores have read them are free; whether the rows are there to be seen is another matter.
    TKT_DEVICE void free_slots() {
        wait_read(unread);
        freed = stored - unread;
    }

    // The full wait, by the lane that issued the stores; the others' releases follow it through the warp's barrier.
    TKT_DEVICE void retire(int open) {
        wait_performed(open);
        freed = max(freed, stored - open);
        for (; retired < stored - open; ++retired) arrived(retired % kWarpThreads);
    }

    TKT_DEVICE void arrived(int entry) const {
        const int item = __shfl_sync(kAll, held, entry);
        for (int base = 0; base < G.top_k; base += kWarpThreads) {
            const int to = destination(item, base + lane_id());
            if (to >= 0) add_release(G.arrivals + to / G.gemm.pad, 1);
        }
    }

    TKT_DEVICE bool here() const { return slot_filled(full, storing); }

    // Stores one more loaded row; or, while it is not here, counts what was stored.
    TKT_DEVICE void advance() {
        if (stored - retired > pending) retire(pending);
        if (stored > retired && !here()) return retire(0);
        wait<wait_role::communicate, wait_word::stage_full>(full[storing.index], storing.phase, G.gemm.guard);
        __syncwarp();
        store();
        if (stored - freed > unread) free_slots();
    }

    TKT_DEVICE void run() {
        draw_ahead();
        open_slots(full, G.warp_slots);
        for (;;) {
            const bool next = loaded - freed < G.warp_slots && draw();
            if (next) {
                const int row = next_row();
                const bool there = staged(row), idle = retired == loaded;  // who has rows in flight sees to those first
                if (!there && idle) await_staged(row);
                if (there || idle) {
                    load(row);
                    continue;
                }
            }
            if (stored < loaded)
                advance();
            else if (retired < stored)
                retire(0);
            else if (!next)
                break;
        }
        close_slots(full, G.warp_slots);
    }
};

}  // namespace tkt
