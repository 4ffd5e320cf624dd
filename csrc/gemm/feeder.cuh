// The producer's work in single steps, for a warp that also multiplies: where no warp can be spared, the first
// consumer warp refills each stage that it gives back.
#pragma once

#include "producer.cuh"

namespace tkt {

// All lanes of the feeding warp hold one and call it together. It runs STAGES steps ahead of the warp's own computing,
// over the ends of tiles, so a gate is waited for while the last steps of the tile before are not yet multiplied: what
// opens a gate must not depend on this block's earlier tiles. Between two steps every clock counts: whatever changes
// once a tile is prepared by `event`.
template <typename Config, typename Gate>
struct feeder {
    using geo = geometry<Config>;
    using loads = producer<Config>;

    const gemm_globals<Config>& G;
    shared_storage<Config>& smem;
    const Gate& gate;
    task_order<Config> order;
    ring<geo::kTaskSlots> slot;
    task loading{};
    uint32_t bytes = 0;    // of a step
    int k = 0;             // where the next step begins
    int until_event = 0;   // steps until the next task must be drawn, or begun
    bool drawn = true;     // the task after `loading`
    bool dry = false;

    TKT_DEVICE feeder(const gemm_globals<Config>& G, shared_storage<Config>& smem, const Gate& gate, int unit,
                      int num_units)
        : G(G), smem(smem), gate(gate), order(G, unit, num_units) {}

    // Publishes the next task, or the end of the walk, and waits until its rows may be read.
    TKT_DEVICE void begin() {
        loading = order.next(0);
        if (elect_lane()) {
            wait<wait_role::producer, wait_word::task_free>(smem.task_free[slot.index], slot.phase ^ 1, G.guard);
            smem.tasks[slot.index] = loading;
            arrive(smem.task_full[slot.index]);
        }
        slot.advance();
        dry = loading.height == 0;
        if (!dry && elect_lane())
            for (int block = loading.row / G.pad; block * G.pad < loading.row + loading.height; ++block) gate(block);
        bytes = loads::bytes(loading);
        k = 0;
        drawn = false;
    }

    // Half-way through a tile the next one is drawn; its answer travels meanwhile.
    TKT_DEVICE void event() {
        const int steps = G.reduction / Config::RED_BLOCK;
        if (dry) return;
        if (drawn) begin();
        if (dry) return;  // an answer that nobody waits for could come after the dispenser's next launch
        if (k == steps / 2 * Config::RED_BLOCK) {
            order.draw();
            drawn = true;
            until_event = steps - steps / 2;
        } else {
            until_event = steps / 2;
        }
    }

    // Refills the stage at this place of the ring, if the walk has another step. `phase` is the lap in which it was
    // last read: all warps have given it back, or will before they do what the feeding warp does next.
    template <bool FIRST_LAP = false>
    TKT_DEVICE void feed(uint32_t index, uint32_t phase) {
        if (until_event == 0) event();
        if (until_event == 0) return;
        if (elect_lane()) {
            semaphore& full = loads::template acquire<FIRST_LAP>(G, smem, index, phase, bytes);
            loads::load_activations(G, smem.stages[index], full, loading, k, 0);
            loads::load_weights(G, smem.stages[index], full, loading, k, 0);
        }
        __syncwarp();
        k += Config::RED_BLOCK;
        --until_event;
    }

    TKT_DEVICE void fill() {
        if (elect_lane()) loads::prefetch_maps(G);
#pragma unroll 1
        for (int index = 0; index < Config::STAGES; ++index) feed<true>(index, 0);
    }

    TKT_DEVICE void finish() { order.finish(); }
};

}  // namespace tkt
