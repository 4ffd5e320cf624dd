// Which tile a block computes next: a walk over experts shared by all blocks, cut into tasks, dealt by stride or
// drawn from a dispenser. Only the producer walks; the other roles read what it publishes.
#pragma once

#include "config.cuh"

namespace tkt {

// The walk keeps a window of 32 experts in the lanes of the producer warp; task numbers of one block only grow,
// so the window only moves forward. An expert's row pieces are dealt evenly over as few tiles as hold them, the
// taller tiles first: five pieces in tiles of up to three make 3 + 2, since a low tile costs its weights all the
// same.
template <typename Config>
struct task_order {
    using geo = geometry<Config>;
    using globals = gemm_globals<Config>;
    static constexpr uint32_t kAll = 0xffffffffu;

    const globals& G;
    const int num_units;  // a unit is a block, or a cluster of two
    int window = 0;       // first expert in the lanes
    int window_task = 0;  // its first task
    int next_task;        // by stride
    int drawn;            // first lane, by dispenser: its answer, counted from the first task that it gives out
    bool dealt;           // the next task is one by stride
    int run, first_row, pieces, tasks_through;  // of this lane's entry

    TKT_DEVICE task_order(const globals& G, int unit, int num_units)
        : G(G), num_units(num_units), next_task(unit), drawn(unit - num_units), dealt(unit < num_units) {
        load_window();
    }

    // The dispenser gives out the tasks after the first waves, which are dealt by stride: neighbours in the order share
    // operands, and blocks of neighbouring numbers get them cheaper. A unit of a higher number only draws.
    TKT_DEVICE int first_drawn() const { return (1 + G.turn_back) * num_units; }

    // Each unit begins with the task of its own number. The dispenser's answer travels while the block still loads its
    // current tile. A stride that turns back after each wave evens out a walk that goes from long to short.
    TKT_DEVICE void draw() {
        if constexpr (Config::DRAW == task_draw::dispenser) {
            dealt = dealt && next_task + num_units < first_drawn();
            if (dealt) {
                next_task += num_units;
                return;
            }
            // Not an addition: the compiler shuffles that one's answer to the lanes at once, and so waits for it here.
            if (lane_id() == 0)
                asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
                             : "=r"(drawn)
                             : "l"(__cvta_generic_to_global(G.dispenser))
                             : "memory");
        } else {
            // From place p of a wave to the mirrored place of the next.
            next_task += G.turn_back ? 2 * (num_units - next_task % num_units) - 1 : num_units;
        }
    }

    // An entry of the walk is an expert's rows times a run of columns. In one word, since registers are few: the expert,
    // the first column tile, and how many.
    static TKT_DEVICE int run_of(int expert, int columns) {
        return expert << 22 | columns >> 16 << 11 | (columns & 0xffff);
    }
    static TKT_DEVICE int expert_of(int run) { return run >> 22; }
    static TKT_DEVICE int first_col(int run) { return run >> 11 & 0x7ff; }
    static TKT_DEVICE int col_blocks(int run) { return run & 0x7ff; }
    // Tasks of a row tile whose columns go to the blocks of a cluster in twos.
    static TKT_DEVICE int col_pairs(int run) { return ceil_div(col_blocks(run), 2); }

    // How an expert's pieces become tiles: `tall` tiles of `low_pieces` + 1 pieces, then `low` tiles.
    struct tiling {
        int tall, low, low_pieces;
        TKT_DEVICE explicit tiling(int pieces) {
            const int tiles = ceil_div(pieces, geo::kPieces);
            low_pieces = tiles > 0 ? pieces / tiles : 0;
            tall = pieces - tiles * low_pieces;
            low = tiles - tall;
        }
        TKT_DEVICE int tiles() const { return tall + low; }
        TKT_DEVICE int pairs() const { return tall / 2 + low / 2; }
        TKT_DEVICE int singles() const { return tall % 2 + low % 2; }
        TKT_DEVICE int pieces_of(int tile) const { return low_pieces + (tile < tall); }
        TKT_DEVICE int pieces_before(int tile) const { return tile * low_pieces + min(tile, tall); }
    };

    TKT_DEVICE void load_window() {
        pieces = run = 0;
        if (window + lane_id() < G.num_experts) {
            const int4 entry = __ldg(reinterpret_cast<const int4*>(G.walk) + window + lane_id());
            run = run_of(entry.x, entry.w ? entry.w : ceil_div<int>(G.cols, Config::COL_BLOCK));
            first_row = entry.y;
            pieces = ceil_div(entry.z, geo::kPieceRows);
        }
        const tiling t(pieces);
        tasks_through = Config::CLUSTER == 1
                            ? t.tiles() * col_blocks(run)
                            : t.pairs() * col_blocks(run) + t.singles() * col_pairs(run);
#pragma unroll
        for (int step = 1; step < kWarpThreads; step *= 2) {
            const int other = __shfl_up_sync(kAll, tasks_through, step);
            if (lane_id() >= step) tasks_through += other;
        }
    }

    // Row group by row group, columns inside a group, rows inside a column: neighbours in the order share a
    // weight tile, and a group's activations stay in L2 for the next columns.
    TKT_DEVICE void raster(int index, int rows, int cols, int& row, int& col) const {
        const int tall = G.raster_rows > 0 && G.raster_rows < rows ? G.raster_rows : rows;
        const int group = index / (tall * cols);
        const int height = min(tall, rows - group * tall);
        const int inside = index - group * tall * cols;
        col = inside / height;
        row = group * tall + inside - col * height;
    }

    // All lanes call; all get the same task. `rank` is this block's place in its cluster.
    TKT_DEVICE task next(int rank) {
        int wanted = next_task;
        if (Config::DRAW == task_draw::dispenser && !dealt) wanted = first_drawn() + __shfl_sync(kAll, drawn, 0);
        uint32_t holders = __ballot_sync(kAll, wanted < window_task + tasks_through);
        while (holders == 0) {
            window_task += __shfl_sync(kAll, tasks_through, kWarpThreads - 1);
            window += kWarpThreads;
            if (window >= G.num_experts) return task{0, 0, 0, 0, task::share_none};
            load_window();
            holders = __ballot_sync(kAll, wanted < window_task + tasks_through);
        }
        const int lane = __ffs(holders) - 1;
        const int through_previous = __shfl_sync(kAll, tasks_through, (lane + 31) % kWarpThreads);
        int index = wanted - window_task - (lane == 0 ? 0 : through_previous);
        const tiling t(__shfl_sync(kAll, pieces, lane));
        const int row_of_expert = __shfl_sync(kAll, first_row, lane);
        const int of = __shfl_sync(kAll, run, lane);

        int tile, col, share = task::share_none;
        if constexpr (Config::CLUSTER == 1) {
            raster(index, t.tiles(), col_blocks(of), tile, col);
        } else {
            // Two tiles of equal height share a weight tile; a tile that is left over goes to both blocks as two
            // columns that share activations. So the two blocks of a cluster always have equal work.
            const int paired = t.pairs() * col_blocks(of);
            if (index < paired) {
                raster(index, t.pairs(), col_blocks(of), tile, col);
                tile = 2 * tile + rank + (tile >= t.tall / 2 ? t.tall % 2 : 0);
                share = task::share_b;
            } else {
                index -= paired;
                const int single = index / col_pairs(of);
                tile = single == 0 && t.tall % 2 == 1 ? t.tall - 1 : t.tiles() - 1;
                col = 2 * (index - single * col_pairs(of)) + rank;
                share = task::share_a;
            }
        }
        return task{row_of_expert + t.pieces_before(tile) * geo::kPieceRows, (first_col(of) + col) * Config::COL_BLOCK,
                    static_cast<int16_t>(expert_of(of)),
                    static_cast<int16_t>(t.pieces_of(tile) * geo::kPieceRows), share};
    }

    // The last unit to finish leaves the dispenser ready for the next launch.
    TKT_DEVICE void finish() {
        if constexpr (Config::DRAW == task_draw::dispenser) {
            if (lane_id() == 0 && atomicAdd(G.dispenser + 1, 1) == num_units - 1) {
                G.dispenser[0] = 0;
                G.dispenser[1] = 0;
            }
        }
    }
};

}  // namespace tkt
