// Row slots of a warp in shared memory, through which the copy engine moves rows, and its waits for the stores from them. What is
// moved, and who is told of it, is the roles' affair.
#pragma once

#include "signals.cuh"

namespace tkt {

constexpr int kMostOpen = 8;  // stores of one warp that may be under way when it goes on

// Calls `wait` with the number that the copy engine's waits want at compile time: `open`, at most MOST.
template <int N>
struct groups {
    static constexpr int value = N;
};
template <int MOST, typename Wait>
TKT_DEVICE void at_most(int open, const Wait& wait) {
    if constexpr (MOST > 0) {
        if (open < MOST) return at_most<MOST - 1>(open, wait);
    }
    wait(groups<MOST>{});
}

// A warp's place in its ring, whose number of slots is known at run time only.
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

// By a whole warp, of whose row slots `full` are the semaphores: a load completes one, and the first lane issues and waits.
TKT_DEVICE void open_slots(semaphore* full, const int32_t& slots) {
    if (lane_id() == 0) {
        for (int slot = 0; slot < slots; ++slot) init_semaphore(full[slot], 1);
        publish_semaphores();
    }
    __syncwarp();
}
TKT_DEVICE void close_slots(semaphore* full, const int32_t& slots) {
    if (lane_id() == 0) {  // whoever computes next lays its stages over the semaphores
        for (int slot = 0; slot < slots; ++slot) drop_semaphore(full[slot]);
        fence_async_shared();
    }
}
// Whether what is loaded to this slot is here already: the first lane's word.
TKT_DEVICE bool slot_filled(semaphore* full, slot_place slot) {
    return __shfl_sync(0xffffffffu, test_wait(full[slot.index], slot.phase), 0);
}

// At most `open` groups of stores have not read their slot yet, or are not performed yet.
TKT_DEVICE void wait_read(int open) {
    if (lane_id() == 0) at_most<kMostOpen>(open, [](auto n) { tma::store_async_read_wait<n.value>(); });
    __syncwarp();
}
TKT_DEVICE void wait_performed(int open) {
    if (lane_id() == 0) at_most<kMostOpen>(open, [](auto n) { tma::store_async_wait<n.value>(); });
    __syncwarp();
}

}  // namespace tkt
