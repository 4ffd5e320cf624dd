// The grouped GEMM template: one block's work, producer beside consumers, with two hooks. It knows nothing of
// communication: `gate` says when a row block may be read, `epilogue` that an output tile has landed.
#pragma once

#include "glu.hpp"
#include "tile.hpp"
#include "wait.hpp"

namespace tkt {

// ROW_BLOCK: rows of a task, a divisor of pad. COL_BLOCK: its columns. RED_BLOCK: depth of one pipeline stage. GLU: what
// becomes of finished tiles.
template <int ROWS, int COLS, int RED, int STAGES, int WARPS, int LAYOUT, glu_form FORM = GLU_NONE>
struct gemm_config {
    static constexpr glu_form GLU = FORM;
    static constexpr int ROW_BLOCK = ROWS;
    static constexpr int COL_BLOCK = COLS;
    static constexpr int RED_BLOCK = RED;
    static constexpr int PIPELINE_STAGES = STAGES;
    static constexpr int CONSUMER_WARPS = WARPS;
    static constexpr int NUM_THREADS = WARPS + 1;
    static constexpr int WEIGHT_LAYOUT = LAYOUT;  // 0: (experts, hidden, cols); 1: (experts, cols, hidden)
    static constexpr int TASK_RING = 2;
    static constexpr int SMEM_BYTES = STAGES * (ROWS * RED + RED * COLS) * 4 + ROWS * COLS * 4;
};

// One output tile. `rows` of its rows are real; 0 when the tile is padding only. row < 0 ends the work.
struct task {
    int row, pad_block, col, expert, rows;
    std::atomic<int> stored;  // consumers that have stored their part
};

// A block's shared memory.
template <typename Config>
struct gemm_shared {
    semaphore inputs_arrived[Config::PIPELINE_STAGES], inputs_finished[Config::PIPELINE_STAGES];
    semaphore task_ready[Config::TASK_RING], task_done[Config::TASK_RING];
    task tasks[Config::TASK_RING];
    st_a<Config::ROW_BLOCK, Config::RED_BLOCK> a[Config::PIPELINE_STAGES];
    st_b<Config::RED_BLOCK, Config::COL_BLOCK> b[Config::PIPELINE_STAGES];
    st_acc<Config::ROW_BLOCK, Config::COL_BLOCK> acc;

    // Whether a launch's arguments fit this memory and what lives in it.
    static bool fits(const globals&) { return true; }

    void prepare() {
        for (semaphore& bar : inputs_arrived) init_semaphore(bar, 1);
        for (semaphore& bar : inputs_finished) init_semaphore(bar, Config::CONSUMER_WARPS);
        for (semaphore& bar : task_ready) init_semaphore(bar, 1);
        for (semaphore& bar : task_done) init_semaphore(bar, Config::CONSUMER_WARPS);
        for (task& entry : tasks) entry.stored.store(0, std::memory_order_relaxed);
    }
};

// Hooks that do nothing.
struct no_gate {
    bool operator()(int) const { return true; }
};
struct no_epilogue {
    void operator()(int, int) const {}
};

constexpr int NEXT_WAVE = 0, NEXT_TASK = 1;  // words of globals.dispensers

// Fills `entry` with the next task; false when there is none left.
template <typename Config>
bool draw_task(const globals& G, task& entry) {
    const int tiles = G.pad / Config::ROW_BLOCK, rows = G.num_pad_blocks * tiles, cols = G.cols / Config::COL_BLOCK;
    const int id = __atomic_fetch_add(&G.dispensers[NEXT_TASK], 1, __ATOMIC_RELAXED);
    if (id >= rows * cols) return false;
    entry.row = G.raster == TKT_RASTER_COLS ? id % rows : id / cols;
    entry.col = G.raster == TKT_RASTER_COLS ? id / rows : id % cols;
    entry.pad_block = entry.row / tiles;
    entry.expert = G.block_expert[entry.pad_block];
    const int left = G.block_rows[entry.pad_block] - entry.row % tiles * Config::ROW_BLOCK;
    entry.rows = left < 0 ? 0 : left < Config::ROW_BLOCK ? left : Config::ROW_BLOCK;
    return true;
}

template <typename Config>
void load_b(st_b<Config::RED_BLOCK, Config::COL_BLOCK>& tile, const globals& G, int expert, int red, int col) {
    const bf16* weights = G.weights + int64_t(expert) * G.hidden * G.cols;
    if constexpr (Config::WEIGHT_LAYOUT == 0)
        load_kn(tile, weights + int64_t(red) * Config::RED_BLOCK * G.cols + col * Config::COL_BLOCK, G.cols);
    else
        load_nk(tile, weights + int64_t(col) * Config::COL_BLOCK * G.hidden + red * Config::RED_BLOCK, G.hidden);
}

// Consumer `warp`'s share of `total` register tiles: as even as can be. A share of fewer tiles is never larger than
// the same consumer's share of more.
template <int WARPS>
struct share {
    int begin, count;
    constexpr share(int total, int warp)
        : begin(total / WARPS * warp + (warp < total % WARPS ? warp : total % WARPS)),
          count(total / WARPS + (warp < total % WARPS)) {}
};

// Stores a finished register tile, whose columns begin at `col` of the GEMM's.
template <typename Config>
void store_finished(const globals& G, int64_t row, int col, const rt_fl& acc, int rows) {
    if constexpr (Config::GLU == GLU_FUSED)
        store_swiglu(G.out + (row * G.cols + col) / 2, G.cols / 2, acc, rows);
    else
        store((Config::GLU == GLU_SEPARATE ? G.packed : G.out) + row * G.cols + col, G.cols, acc, rows);
}

// One consumer's part of a reduction step: a run of the register tiles that hold real rows, panel by panel, so that
// a half-filled tile is shared as evenly as a full one. Between steps they rest in the consumer's own part of
// `acc` (its share of a full tile): consumers may be a task apart.
template <typename Config>
void multiply(gemm_shared<Config>& smem, const globals& G, const task& now, int stage, int warp, bool first,
              bool last) {
    constexpr int RED = Config::RED_BLOCK, PANELS = Config::COL_BLOCK / NR, STRIPS = Config::ROW_BLOCK / MR;
    const int strips = (now.rows + MR - 1) / MR;
    const share<Config::CONSUMER_WARPS> mine(strips * PANELS, warp), room(STRIPS * PANELS, warp);
    for (int i = 0; i < mine.count; ++i) {
        const int panel = (mine.begin + i) / strips, strip = (mine.begin + i) % strips;
        float* part = smem.acc.data + (room.begin + i) * (MR * NR);
        rt_fl acc;
        if (first)
            zero(acc);
        else
            load(acc, part);
        mma_AB<RED>(acc, smem.a[stage].strip(strip), smem.b[stage].panel(panel));
        if (last) {
            const int64_t row = int64_t(now.row) * Config::ROW_BLOCK + strip * MR;
            const int col = now.col * Config::COL_BLOCK + panel * NR;
            store_finished<Config>(G, row, col, acc, now.rows - strip * MR);
        } else {
            store(part, acc);
        }
    }
}

// Draws tasks until none is left. Every thread of the block calls it; it returns early when the launch must stop.
template <typename Config, typename Gate, typename Epilogue>
void grouped_gemm(const globals& G, const Gate& gate, const Epilogue& epilogue, const Warp& warp,
                  gemm_shared<Config>& smem) {
    constexpr int STAGES = Config::PIPELINE_STAGES, RING = Config::TASK_RING;
    const int steps = G.hidden / Config::RED_BLOCK;
    uint32_t fill = 0;  // stages filled so far

    if (warp.index == Config::CONSUMER_WARPS) {
        // ---------- producer: draws tasks and packs their tiles into the stage ring ----------
        for (uint32_t drawn = 0;; ++drawn) {
            task& now = smem.tasks[drawn % RING];
            if (!wait(warp, smem.task_done[drawn % RING], drawn / RING, "task_done", drawn % RING)) return;
            if (warp.launch.stopped()) return;
            if (!draw_task<Config>(G, now)) now.row = -1;
            const int row = now.row, col = now.col, expert = now.expert, rows = now.rows, pad_block = now.pad_block;
            arrive(smem.task_ready[drawn % RING]);
            if (row < 0) return;
            if (rows == 0) continue;

            if (!gate(pad_block)) return;  // hook 1: the rows have arrived

            const bf16* from = G.gathered + int64_t(row) * Config::ROW_BLOCK * G.hidden;
            for (int red = 0; red < steps; ++red, ++fill) {
                const int stage = fill % STAGES;
                if (!wait(warp, smem.inputs_finished[stage], fill / STAGES, "stage_free", stage)) return;
                load(smem.a[stage], from + red * Config::RED_BLOCK, G.hidden, rows);
                load_b<Config>(smem.b[stage], G, expert, red, col);
                arrive(smem.inputs_arrived[stage]);
            }
        }
    } else {
        // ---------- consumers: multiply what is in the ring ----------
        for (uint32_t taken = 0;; ++taken) {
            task& now = smem.tasks[taken % RING];
            if (!wait(warp, smem.task_ready[taken % RING], taken / RING + 1, "task_ready", taken % RING)) return;
            if (now.row < 0) return;
            for (int red = 0; now.rows > 0 && red < steps; ++red, ++fill) {
                const int stage = fill % STAGES;
                if (!wait(warp, smem.inputs_arrived[stage], fill / STAGES + 1, "stage_full", stage)) return;
                multiply(smem, G, now, stage, warp.index, red == 0, red == steps - 1);
                arrive(smem.inputs_finished[stage]);
            }
            // The last consumer to have stored its part speaks for the tile.
            if (now.stored.fetch_add(1, std::memory_order_acq_rel) == Config::CONSUMER_WARPS - 1) {
                now.stored.store(0, std::memory_order_relaxed);
                epilogue(now.pad_block, now.col);  // hook 2: the tile has landed
            }
            arrive(smem.task_done[taken % RING]);
        }
    }
}

}  // namespace tkt
