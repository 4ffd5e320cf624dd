// The dispatch role: resident blocks draw waves of rows and fetch each from the rank that has it. Gathered: a row is
// stored to every local slot that wants it. Indexed: it is stored once, to its place among all ranks' tokens, and this
// rank's own rows stay where they are. The gate is on the other side. The role waits for no block and no rank, so that
// whoever waits for it is always served.
#pragma once

#include "dispatch_config.cuh"
#include "row_ring.cuh"

namespace tkt {

struct pad_blocks {
    int first, count;
};

// How a team of warps of one block brings rows: where its semaphores and slots lie, and what each warp may have open.
struct row_team {
    char* semaphores;
    char* rows;
    int slots, pieces, unread, pending;
};

// One warp of a team. Items are the slots of the head, then the tokens that are wanted, each for its
// slots beyond the head (indexed: no head, and own tokens need no fetching). Slot by slot the first pad blocks are complete soonest; token by token no row is fetched
// twice.
//
// A row moves in pieces. A piece in flight holds a slot from the issue of its load until its stores have read it; a row
// counts as arrived when the stores of its last piece, and so of all, are performed, which is later. So there are four
// places: loaded, stored, freed, retired. The first lane issues and waits; lanes look up destinations and count arrivals.
template <typename Globals>
struct dispatch_warp {
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr bool kIndexed = Globals::kIndexed;
    static constexpr int kPrefetched = 128;  // items ahead of the queue whose tables are brought to L2

    const Globals& G;
    const row_team team;
    semaphore* const full;  // of this warp's slots
    char* const rows;
    const uint32_t piece_bytes;
    const pad_blocks until; // where some are given, their rows are all that this warp is here for
    const int head;         // items below are slots
    const int num_items;
    int draws;              // waves this warp may still take
    int ahead = 0;          // first lane: the next wave to take, drawn while the one before it is fetched
    int first = 0;          // item of lane 0 in the current wave
    uint32_t waiting = 0;   // lanes whose item of the current wave is not fetched yet
    int2 request{-1, -1};
    int held = 0;           // lane n % 32: the item of piece n
    int held_row = 0;       // lane n % 32: indexed: where that item's row goes
    slot_place loading, storing;
    int loaded = 0, stored = 0, freed = 0, retired = 0;  // pieces

    TKT_DEVICE dispatch_warp(const Globals& G, const row_team& team, int warp, int draws, pad_blocks until)
        : G(G),
          team(team),
          full(reinterpret_cast<semaphore*>(team.semaphores) + warp * team.slots),
          rows(team.rows + static_cast<int64_t>(warp) * team.slots * (G.gemm.reduction * 2 / team.pieces)),
          piece_bytes(G.gemm.reduction * 2 / team.pieces),
          until(until),
          head(kIndexed ? 0 : min(G.head, __ldg(G.plan + kPlanRows))),
          num_items(head < __ldg(G.plan + kPlanRows) ? head + __ldg(G.plan + kPlanTokens) : head),
          draws(draws) {}

    TKT_DEVICE char* place(int slot) const { return rows + slot * piece_bytes; }
    TKT_DEVICE bool first_piece(int piece) const { return (piece & (team.pieces - 1)) == 0; }
    TKT_DEVICE bool last_piece(int piece) const { return first_piece(piece + 1); }
    TKT_DEVICE const int32_t* slots_of(int item) const {
        return G.pull_slots + static_cast<int64_t>(item - head) * G.top_k;
    }
    TKT_DEVICE int fan(int item) const { return item < head ? 1 : G.top_k; }
    TKT_DEVICE int destination(int item, int x) const {
        if (x >= fan(item)) return -1;
        if (item < head) return item;
        const int slot = __ldg(slots_of(item) + x);
        return slot < head ? -1 : slot;
    }

    TKT_DEVICE bool complete() const {
        const bool there = lane_id() >= until.count || look(G.arrivals + until.first + lane_id()) >= G.gemm.pad;
        return __ballot_sync(kAll, there) == kAll;
    }

    // Only a wave that will be taken: its rows would be lost otherwise. Nobody needs the answer for a while.
    TKT_DEVICE void draw_ahead() {
        if (draws > 0 && lane_id() == 0) ahead = atomicAdd(G.queue + kNextWave, 1);
    }

    // Sees to it that a lane of the wave has a row to fetch; padding slots have none. False when the queue is dry.
    TKT_DEVICE bool draw() {
        while (waiting == 0) {
            if (draws == 0) return false;
            first = __shfl_sync(kAll, ahead, 0) * G.wave;
            if (first >= num_items) {
                draws = 0;
                return false;
            }
            --draws;
            if (until.count > 0 && complete()) draws = 0;  // this wave is the last
            draw_ahead();
            const int item = first + lane_id();
            request = make_int2(-1, -1);
            bool known = true;
            if (lane_id() < G.wave && item < num_items) {
                request = __ldg(item < head ? G.pull_indices + item : G.pull_tokens + (item - head));
                // Asked for now, its line is near when the row is here.
                if (!kIndexed && item >= head) known = __ldg(slots_of(item)) >= -1;
                if (item >= head && item + kPrefetched < num_items) {
                    prefetch(G.pull_tokens + (item - head + kPrefetched));
                    if (!kIndexed) prefetch(slots_of(item + kPrefetched));
                }
                if (kIndexed && request.x == G.gemm.guard.rank) request.x = -1;
            }
            waiting = __ballot_sync(kAll, request.x >= 0 && known);
        }
        return true;
    }

    TKT_DEVICE void load() {
        const int lane = __ffs(waiting) - 1;
        const int source = __shfl_sync(kAll, request.x, lane), token = __shfl_sync(kAll, request.y, lane);
        if (lane_id() == loaded % kWarpThreads) {
            held = first + lane;
            held_row = source * G.tokens[source].rows + token;
        }
        if (lane_id() == 0) {
            const char* from = reinterpret_cast<const char*>(G.tokens[source].at(token, 0));
            tma::expect_bytes(full[loading.index], piece_bytes);
            tma::load_bytes(place(loading.index), from + (loaded & (team.pieces - 1)) * piece_bytes, piece_bytes,
                            full[loading.index]);
        }
        if (last_piece(loaded)) waiting &= waiting - 1;
        ++loaded;
        loading.advance(team.slots);
    }

    TKT_DEVICE void store_to(int64_t row_index) const {
        if (lane_id() != 0) return;
        char* const row = reinterpret_cast<char*>(G.gathered + row_index * G.gemm.reduction);
        tma::store_bytes(row + (stored & (team.pieces - 1)) * piece_bytes, place(storing.index), piece_bytes);
    }

    TKT_DEVICE void store() {
        const int entry = stored % kWarpThreads;
        if constexpr (kIndexed) {
            store_to(__shfl_sync(kAll, held_row, entry));
        } else {
            const int item = __shfl_sync(kAll, held, entry);
            for (int base = 0; base < fan(item); base += kWarpThreads) {
                const int to = destination(item, base + lane_id());
                // Rolled and warp-uniform: the copy engine's operands live in uniform registers.
#pragma unroll 1
                for (uint32_t left = __ballot_sync(kAll, to >= 0); left; left &= left - 1)
                    store_to(__shfl_sync(kAll, to, __ffs(left) - 1));
            }
        }
        if (lane_id() == 0) tma::commit();
        ++stored;
        storing.advance(team.slots);
    }

    // Slots whose stores have read them are free; whether the rows are there to be seen is another matter.
    TKT_DEVICE void free_slots(int unread) {
        wait_read(unread);
        freed = stored - unread;
    }

    // The full wait: a row counts as arrived when its stores are performed. By the lane that issued them; the others'
    // releases follow it through the warp's barrier.
    TKT_DEVICE void retire(int pending) {
        wait_performed(pending);
        freed = max(freed, stored - pending);
        for (; retired < stored - pending; ++retired)
            if (last_piece(retired)) arrived(retired % kWarpThreads);
    }

    TKT_DEVICE void arrived(int entry) const {
        const int item = __shfl_sync(kAll, held, entry);
        for (int base = 0; base < fan(item); base += kWarpThreads) {
            const int to = destination(item, base + lane_id());
            if (to >= 0) add_release(G.arrivals + to / G.gemm.pad, 1);
        }
    }

    // Whether the next piece to store is here already: the first lane's word.
    TKT_DEVICE bool here() const { return slot_filled(full, storing); }

    TKT_DEVICE void run() {
        draw_ahead();
        open_slots(full, team.slots);
        for (;;) {
            while (loaded - freed < team.slots && (!first_piece(loaded) || draw())) load();
            if (stored == loaded) break;
            if (stored - retired > team.pending) retire(team.pending);
            if (stored > retired && !here()) {  // nothing better to do than to count what was stored
                retire(0);
                continue;
            }
            wait<wait_role::communicate, wait_word::stage_full>(full[storing.index], storing.phase, G.gemm.guard);
            __syncwarp();
            store();
            if (stored - freed > team.unread) free_slots(team.unread);
        }
        retire(0);
        close_slots(full, team.slots);
    }
};

// Every thread of the block comes here, before it computes; each of the first `warps` warps draws at most `draws` waves, and
// none when the blocks `until`, if any, are complete.
template <typename Globals>
TKT_DEVICE void dispatch(const Globals& G, int warps, int draws, pad_blocks until) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int warp = warp_id();
    if (warp >= warps) return;
    const row_team team{shared_memory,         shared_memory + kSlotReserveBytes, G.warp_slots, G.pieces,
                        G.unread,              G.pending};
    dispatch_warp<Globals>(G, team, warp, draws, until).run();
}

// By warp `warp` of those that bring rows beside a block's computing, in the memory that the GEMM leaves.
template <typename Globals>
TKT_DEVICE void dispatch_beside(const Globals& G, int warp, int gemm_bytes) {
    extern __shared__ __align__(1024) char shared_memory[];
    if (warp < 0 || warp >= G.beside) return;
    char* const memory = shared_memory + (gemm_bytes + 127) / 128 * 128;
    const row_team team{memory,          memory + kBesideReserveBytes, G.beside_slots, G.beside_pieces,
                        G.beside_unread, G.beside_pending};
    dispatch_warp<Globals>(G, team, warp, 0x7fffffff, pad_blocks{0, 0}).run();
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
        G.queue[kNextPush] = 0;
        G.queue[kBlocksDone] = 0;
        G.gemm.dispenser[0] = 0;
        G.gemm.dispenser[1] = kNeverLast;
    }
}

}  // namespace tkt
