// The bulk part of the link probe: persistent blocks that move whole rows through shared memory, as the dispatch role
// does it. A launch moves a fixed number of rows and waits for no block and no rank.
#pragma once

#include "signals.cuh"

namespace tkt {

// bulk: shared memory holds whole rows on their way, as the dispatch role does it. plain: loads and stores of threads.
constexpr int32_t kProbeBulk = 0, kProbePlain = 1;

constexpr int kProbeReserveBytes = 2048;  // semaphores before the row slots
constexpr int kProbeMostPending = 8;

// The launch arguments; the host mirrors this layout (tktune/families/cuda/probe_globals.py).
struct probe_globals {
    const char* from;      // row i is read at i & from_mask
    char* to;              // store number j goes to row (j * stride) & to_mask
    spin_guard guard;
    int32_t way;
    int32_t items;         // rows that the launch reads; 16-byte pieces when plain
    int32_t fan;           // stores a row
    uint32_t stride;       // odd, so that the first to_mask + 1 stores all differ
    uint32_t from_mask, to_mask;
    uint32_t row_bytes;
    int32_t warps;         // of a block, that copy in bulk
    int32_t warp_slots;    // rows on their way, a warp; 16-byte pieces of a thread when plain (4 or 8)
    int32_t pending;       // of them, whose stores may be under way while the next are loaded
};

namespace detail {

// At most `pending` of this thread's bulk groups are still writing.
TKT_DEVICE void wait_for_groups(int pending) {
    switch (pending) {
        case 0: tma::store_async_wait<0>(); break;
        case 1: tma::store_async_wait<1>(); break;
        case 2: tma::store_async_wait<2>(); break;
        case 3: tma::store_async_wait<3>(); break;
        case 4: tma::store_async_wait<4>(); break;
        case 5: tma::store_async_wait<5>(); break;
        case 6: tma::store_async_wait<6>(); break;
        case 7: tma::store_async_wait<7>(); break;
        default: tma::store_async_wait<kProbeMostPending>(); break;
    }
}

}  // namespace detail

// Rows are dealt to the warps of all blocks in turn. By one warp; the first lane issues and waits. A slot is held from
// the issue of its load until its stores are performed. `memory`: the reserve, then the slots of all warps.
TKT_DEVICE void probe_bulk(const probe_globals& G, char* memory, int block) {
    semaphore* const full = reinterpret_cast<semaphore*>(memory) + warp_id() * G.warp_slots;
    char* const rows = memory + kProbeReserveBytes + warp_id() * G.warp_slots * static_cast<int>(G.row_bytes);
    const bool leader = lane_id() == 0;
    if (leader) {
        for (int slot = 0; slot < G.warp_slots; ++slot) init_semaphore(full[slot], 1);
        publish_semaphores();
    }
    __syncwarp();

    const int step = gridDim.x * G.warps;
    int loading = block * G.warps + warp_id(), storing = loading;  // items
    int load_slot = 0, store_slot = 0, loaded = 0, stored = 0;
    uint32_t phase = 0;
    for (;;) {
        while (loaded + stored < G.warp_slots && loading < G.items) {
            if (leader) {
                tma::expect_bytes(full[load_slot], G.row_bytes);
                tma::load_bytes(rows + load_slot * G.row_bytes,
                                G.from + static_cast<int64_t>(loading & G.from_mask) * G.row_bytes, G.row_bytes,
                                full[load_slot]);
            }
            if (++load_slot == G.warp_slots) load_slot = 0;
            loading += step;
            ++loaded;
        }
        if (loaded == 0) break;
        wait<wait_role::communicate, wait_word::stage_full>(full[store_slot], phase, G.guard);
        __syncwarp();
        const uint32_t first = static_cast<uint32_t>(storing) * G.fan;
#pragma unroll 1
        for (int x = 0; x < G.fan; ++x) {
            const uint32_t row = ((first + x) * G.stride) & G.to_mask;
            if (leader)
                tma::store_bytes(G.to + static_cast<int64_t>(row) * G.row_bytes, rows + store_slot * G.row_bytes,
                                 G.row_bytes);
        }
        if (leader) tma::commit();
        if (++store_slot == G.warp_slots) {
            store_slot = 0;
            phase ^= 1;
        }
        storing += step;
        --loaded;
        ++stored;
        if (stored > G.pending) {
            if (leader) detail::wait_for_groups(G.pending);
            __syncwarp();
            --stored;
        }
    }
    if (leader) detail::wait_for_groups(0);
}

}  // namespace tkt
