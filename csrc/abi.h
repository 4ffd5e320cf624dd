// The C ABI of shared artifacts: what a rank process passes to a kernel that was built as a shared object.
// Plain C types only; every struct is mirrored once in tktune/families/abi.py and its size is checked at load.
#ifndef TKTUNE_ABI_H
#define TKTUNE_ABI_H

#include <stdint.h>

#define TKT_ABI_VERSION 2
#define TKT_MAX_WORLD 8
#define TKT_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// How a launch ended.
enum tkt_end { TKT_DONE = 0, TKT_ABORTED = 1, TKT_SPIN_LIMIT = 2, TKT_BAD_ARGUMENT = 3, TKT_NO_THREADS = 4 };

// What the wait that gave up saw. Lives in the driver-owned control page; `set` is written last.
typedef struct {
    int32_t set;
    int32_t rank;
    int32_t block;
    char role[16];
    char word[24];
    int32_t index;  // which word of that name
    int64_t expected;
    int64_t seen;
} tkt_spin_report;

// The machine a launch runs on: seats stand for SMs.
typedef struct {
    int32_t seats;         // blocks that can be resident at once
    int32_t seating;       // 0: lowest block first; 1: highest first; 2: shuffled by seating_seed
    uint64_t seating_seed;
    int64_t spin_limit_ns;
    volatile uint32_t* abort_word;
    tkt_spin_report* report;
} tkt_machine;

enum tkt_order { TKT_ORDER_SLOT = 0, TKT_ORDER_TOKEN = 1 };
enum tkt_raster { TKT_RASTER_ROWS = 0, TKT_RASTER_COLS = 1 };
enum tkt_roles { TKT_COMMUNICATE = 1, TKT_COMPUTE = 2, TKT_GATED = 4, TKT_FINISH = 8 };

// Which side forms the weighted sums of gemm_combine: the rank that holds the rows, or the rank that holds the token.
enum tkt_form { TKT_FORM_PREREDUCE = 0, TKT_FORM_PULL = 1 };

// What gemm_combine reads and writes beside tkt_globals, whose `out` is rows[rank]. Words only grow, but for `counters`,
// which the launch's tail zeroes. G = signal_groups: a pad block is announced in so many runs of columns.
typedef struct {
    int32_t bytes;              // sizeof(tkt_combine), so that both sides speak of one layout
    int32_t form;               // tkt_form
    int32_t signal_groups;
    int32_t rows_in_flight;     // jobs a thread holds at once
    int32_t num_reduce_blocks;  // the highest blocks, which sum partial rows in the end
    int32_t num_jobs;
    uint64_t epoch;             // greater with every launch, the same on all ranks
    const int32_t* jobs;        // (num_jobs): item * G + group; an item is a pull token (prereduce) or an own token
    const float* topk_weights;  // (world, tokens, top_k)
    const int32_t* push_expected;  // (world): pull tokens of each rank
    const int32_t* final_contrib;  // (tokens, world): whether that rank holds rows of that own token
    const int32_t* owners;         // (tokens, top_k): the rank that holds each assignment of own tokens
    const int32_t* owner_slots;    // (tokens, top_k): its slot there
    uint16_t* y;                   // (tokens, cols): the weighted sums
    int32_t* counters;             // 48 + num_pad_blocks * G, zero between launches
    int32_t num_counters;
    int32_t landed_stride;              // words of one rank among `landed`, at least its pad blocks * G
    uint16_t* rows[TKT_MAX_WORLD];      // each rank's expert rows, (P, cols); symmetric
    uint16_t* staging[TKT_MAX_WORLD];   // on each rank, (world, tokens, cols): plane d is written by rank d only
    uint64_t* watermarks[TKT_MAX_WORLD];  // on each rank, (world): rank d, and nobody else, says that its plane is whole
    uint64_t* landed[TKT_MAX_WORLD];      // on each rank, (world, landed_stride): block * G + group of rank d has landed
} tkt_combine;

// Everything one launch reads and writes. Row-major; P = num_pad_blocks * pad rows; bf16 is uint16_t.
typedef struct {
    int32_t rank, world;
    int32_t hidden, cols, tokens, top_k, local_experts, pad;
    int32_t num_pad_blocks;
    int32_t weight_layout;              // 0: (experts, hidden, cols); 1: (experts, cols, hidden)
    const uint16_t* x[TKT_MAX_WORLD];   // each rank's token rows, (tokens, hidden); symmetric
    const uint16_t* weights;
    uint16_t* gathered;                 // (P, hidden)
    uint16_t* out;                      // (P, cols); with SwiGLU (P, cols / 2)
    uint16_t* packed;                   // (P, cols): outputs of a GEMM whose SwiGLU is a launch of its own; else null
    const int32_t* pull_indices;        // (P, 2): source rank, source token; -1 on padding
    const int32_t* block_expert;        // (num_pad_blocks)
    const int32_t* block_rows;          // (num_pad_blocks): real rows, pad - slack
    const int32_t* pull_tokens;         // (num_pull_tokens, 2): tokens this rank wants, in pull order
    const int32_t* pull_slots;          // (num_pull_tokens, top_k): their slots here, -1 where none
    int32_t num_pull_tokens;
    int32_t* arrivals;                  // (num_pad_blocks), seeded with slack; re-seeded by the launch's tail
    int32_t* dispensers;                // (4): next wave, next task, blocks done, spare; zeroed by the tail
    uint64_t* barrier[TKT_MAX_WORLD];   // (world) words on each rank; word s is written by rank s only
    uint64_t start_sequence;            // 0: no start barrier; else meet all ranks at this number first
    int32_t num_comp_blocks, num_comm_blocks;
    int32_t order, raster, backoff;     // backoff: pauses before a wait starts to yield
    int32_t roles;                      // which roles run, and whether compute is gated; TKT_FINISH runs alone
    const tkt_combine* combine;         // gemm_combine only; else null
} tkt_globals;

typedef struct {
    int64_t time_ns;  // from the end of the start barrier to the last block's end
    int64_t cpu_ns;   // CPU time of all threads of this launch
    int32_t end;      // tkt_end
} tkt_result;

// What an artifact states of itself: its compile-time choices.
typedef struct {
    int32_t abi_version;
    int32_t globals_bytes, machine_bytes, result_bytes, report_bytes;
    int32_t world, row_block, col_block, red_block, stages, consumer_warps;
    int32_t smem_bytes, threads_per_block;
    char family[24];
    int32_t strip_rows, panel_cols;  // the register tile: ROW_BLOCK and COL_BLOCK are multiples of them
    int32_t glu;                     // SwiGLU: 0 none, 1 on register tiles, 2 a launch of its own
} tkt_facts;

TKT_EXPORT const tkt_facts* tkt_describe(void);
TKT_EXPORT int tkt_launch(const tkt_globals* globals, const tkt_machine* machine, tkt_result* result);
TKT_EXPORT int tkt_barrier(const tkt_globals* globals, const tkt_machine* machine, uint64_t sequence);
TKT_EXPORT void tkt_close(void);

#ifdef __cplusplus
}
#endif

#endif
