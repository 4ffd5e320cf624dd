// The producer roles where activations stand anywhere in memory and a table says which row each slot is: a walker
// that publishes tasks and loads weights, and loaders that fetch each slot's row into the stage by its index.
#pragma once

#include "producer.cuh"

namespace tkt {

// When the walker publishes a tile's successor, and when the loaders ask for the successor's rows: late enough that a
// drawn answer is back, early enough that the table's is too.
struct indexed_steps {
    int all, draw, publish, look_up;
    TKT_DEVICE explicit indexed_steps(int steps)
        : all(steps), draw(steps / 2), publish(steps * 3 / 4), look_up(min(steps * 3 / 4 + 1, steps - 1)) {}
};

// One warp; its first lane issues. It never waits at the gate, so weights of a tile whose rows have not arrived are
// already on their way.
template <typename Config>
struct indexed_walker {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;
    static constexpr uint32_t kWeightBytes = geo::b_piece::kBytes;

    static TKT_DEVICE void publish(const globals& G, storage& smem, ring<geo::kTaskSlots>& slot, const task& t) {
        if (lane_id() == 0) {
            wait<wait_role::producer, wait_word::task_free>(smem.task_free[slot.index], slot.phase ^ 1, G.guard);
            smem.tasks[slot.index] = t;
            arrive(smem.task_full[slot.index]);
        }
        slot.advance();
    }

    static TKT_DEVICE void run(const globals& G, storage& smem, int unit, int num_units) {
        if (lane_id() == 0) {
            tma::prefetch_map(G.weights.maps[0]);
            tma::prefetch_map(G.outputs.maps[0]);
        }
        const indexed_steps steps(G.reduction / Config::RED_BLOCK);
        task_order<Config> order(G, unit, num_units);
        begin_roles(smem);
        ring<Config::STAGES> stage;
        ring<geo::kTaskSlots> slot;
        task t = order.next(0);
        publish(G, smem, slot, t);
        // A loop for each stretch: in one loop the compiler waits for a drawn answer at the loop's next turn.
        auto load = [&](int from, int to) {
            for (int step = from; step < to; ++step) {
                if (lane_id() == 0) {
                    semaphore& full = producer<Config>::acquire(G, smem, stage, kWeightBytes);
                    producer<Config>::load_weights(G, smem.stages[stage.index], full, t, step * Config::RED_BLOCK, 0);
                }
                stage.advance();
            }
            __syncwarp();
        };
        while (t.height != 0) {
            load(0, steps.draw);
            order.draw();
            load(steps.draw, steps.publish);
            const task next = order.next(0);
            publish(G, smem, slot, next);
            load(steps.publish, steps.all);
            t = next;
        }
        order.finish();
    }
};

// One of two warps, dealt the groups of four rows of a tile in turn. A quarter of a warp copies one row's 128 bytes of a
// step, so its eight lanes write eight different 16-byte columns of one line and never meet in a bank.
//
// What wgmma reads through the async proxy is written here through the generic one, so every lane, when its copies of a
// stage have landed, orders them before the async proxy, and only then does its warp arrive at the stage. That is
// kLoadDepth stages after the copies were asked for, lest each stage cost a trip to memory.
template <typename Config, typename Gate>
struct indexed_loader {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    using storage = shared_storage<Config>;
    static constexpr int kWarps = geo::kLoaderWarps;
    static constexpr int kPieceCopies = 16 / kWarps;                 // of a lane, in a piece of 64 rows
    static constexpr int kCopies = geo::kPieces * kPieceCopies;      // in a step of a tall tile
    static constexpr int kHeld = ceil_div(kCopies, 8);               // rows a lane looks up
    static constexpr int kBatch = 4;                             // copies whose addresses are made together
    using meeting = typename barrier_registry<Config::CONSUMER_WARPS, geo::kProducerWarps>::template loaders<kWarps>;
    static_assert(kWarps % 2 == 0, "the swizzle is the same for all groups of a warp");

    const globals& G;
    storage& smem;
    const Gate& gate;
    const int part;
    ring<Config::STAGES> stage, announced;
    ring<geo::kTaskSlots> slot;
    int pending = 0;  // stages asked for and not announced
    int row, height;  // of the next tile
    typename Gate::entry found[kHeld];  // of the next tile
    uint32_t rows[kCopies / 2];         // of this tile: copies 2 i and 2 i + 1 in 16 bits each

    TKT_DEVICE indexed_loader(const globals& G, storage& smem, const Gate& gate, int part)
        : G(G), smem(smem), gate(gate), part(part) {}

    TKT_DEVICE void announce() {
        if (lane_id() == 0) arrive(smem.stage_full[announced.index]);
        announced.advance();
    }

    // Everything asked for is announced: before a wait for something that this block's consumers may hold up.
    TKT_DEVICE void settle() {
        if (pending == 0) return;
        cp_async::wait<0>();
        fence_async_shared();
        __syncwarp();
        for (; pending > 0; --pending) announce();
    }

    // Copy i of a lane moves row lane / 8 of this group.
    TKT_DEVICE int group(int copy) const { return part + kWarps * copy; }

    // Reads the next task and asks for its rows: lane l for row l % 4 of group l / 4 and every eighth after it. Nothing
    // here waits for the answer.
    TKT_DEVICE void look_up() {
        if (!try_wait(smem.task_full[slot.index], slot.phase)) {
            settle();
            wait<wait_role::producer, wait_word::task_full>(smem.task_full[slot.index], slot.phase, G.guard);
        }
        // Through a shuffle, so that the compiler knows that the whole warp follows one height.
        row = smem.tasks[slot.index].row;
        height = __shfl_sync(0xffffffffu, static_cast<int>(smem.tasks[slot.index].height), 0);
        arrive(smem.task_free[slot.index]);
        slot.advance();
        if (height == 0) return;
        const int first = opaque(4 * group(lane_id() / 4) + lane_id() % 4);  // not kept from tile to tile
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const int below = first + 4 * kWarps * 8 * i;
            if (below < height) found[i] = gate.look_up(row + below);
        }
    }

    // The found rows become this tile's: each lane gets those of its own copies.
    TKT_DEVICE void take() {
        uint32_t mine[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) mine[i] = gate.row_of(found[i]);
        auto of_copy = [&](int i) { return __shfl_sync(0xffffffffu, mine[i / 8], i % 8 * 4 + lane_id() / 8); };
#pragma unroll
        for (int i = 0; i < kCopies; i += 2) rows[i / 2] = of_copy(i) | of_copy(i + 1) << 16;
    }

    TKT_DEVICE void load(int step, int pieces) {
        const char* from =
            reinterpret_cast<const char*>(G.activations.data) + step * Config::RED_BLOCK * 2 + lane_id() % 8 * 16;
        asm volatile("" : "+l"(from));  // one sum for all copies
        const uint32_t to = smem.stages[stage.index].a[0].address() +
                            geo::a_piece::offset(4 * part + lane_id() / 8, lane_id() % 8 * 8);
        const uint32_t row_bytes = G.reduction * 2;
#pragma unroll
        for (int first = 0; first < kCopies; first += kBatch) {
            if (first > 0 && first % kPieceCopies == 0 && first / kPieceCopies >= pieces) break;
            // A copy reads its address late and would hold up the next one made in the same register: hence several at
            // once, none kept unpacked over the steps.
            const char* at[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; i += 2) {
                const uint32_t two = opaque(rows[(first + i) / 2]);
                at[i] = from + static_cast<uint64_t>(two & 0xffff) * row_bytes;
                at[i + 1] = from + static_cast<uint64_t>(two >> 16) * row_bytes;
            }
            asm volatile("" : "+l"(at[0]), "+l"(at[1]), "+l"(at[2]), "+l"(at[3]));
#pragma unroll
            for (int i = 0; i < kBatch; ++i) cp_async::copy(to + (first + i) * kWarps * 4 * kPanelRowBytes, at[i]);
        }
        cp_async::commit();
    }

    TKT_DEVICE void load_steps(int from, int to, int pieces) {
#pragma unroll 1
        for (int step = from; step < to; ++step) {
            wait<wait_role::producer, wait_word::stage_free>(smem.stage_free[stage.index], stage.phase ^ 1, G.guard);
            load(step, pieces);
            stage.advance();
            if (pending < geo::kLoadDepth) {
                ++pending;
                continue;
            }
            cp_async::wait<geo::kLoadDepth>();
            fence_async_shared();
            __syncwarp();
            announce();
        }
    }

    TKT_DEVICE void run() {
        const indexed_steps steps(G.reduction / Config::RED_BLOCK);
        begin_roles(smem);
        look_up();
        while (height != 0) {
            take();
            const int pieces = height / geo::kPieceRows;
            if (gate.waits()) {
                settle();
                // A gate of many words may want a lane for each of them.
                if (part == 0 && (requires { typename Gate::whole_warp; } || lane_id() == 0))
                    for (int block = row / G.pad; block * G.pad < row + height; ++block) gate(block);
                __syncwarp();
                meeting::sync();
            }
            load_steps(0, steps.look_up, pieces);
            look_up();  // between two loops: in one, the compiler waits for the answer at the loop's next turn
            load_steps(steps.look_up, steps.all, pieces);
        }
        settle();
    }
};

}  // namespace tkt
