// What every CPU artifact exports: its facts, launch, barrier and close. The source that includes this defines
// TKT_FAMILY before and `kernel` after; TKT_SHARED names its shared memory where that is more than the GEMM's. An artifact's machine is its own: artifacts in one process share nothing.
#pragma once

#include "gemm.hpp"
#include "machine.hpp"

#ifndef TKT_GLU
#define TKT_GLU 0
#endif

namespace tkt {

using config = gemm_config<TKT_ROW_BLOCK, TKT_COL_BLOCK, TKT_RED_BLOCK, TKT_STAGES, TKT_CONSUMER_WARPS,
                           TKT_WEIGHT_LAYOUT, static_cast<glu_form>(TKT_GLU)>;
#ifdef TKT_SHARED
using shared = TKT_SHARED<config>;
#else
using shared = gemm_shared<config>;
#endif

}  // namespace tkt

// Run by every thread of every block.
static void kernel(const tkt::globals& G, tkt::Warp& warp, tkt::shared& smem);

namespace {

constexpr tkt_facts facts = {TKT_ABI_VERSION,         sizeof(tkt_globals),
                             sizeof(tkt_machine),     sizeof(tkt_result),
                             sizeof(tkt_spin_report), TKT_WORLD,
                             TKT_ROW_BLOCK,           TKT_COL_BLOCK,
                             TKT_RED_BLOCK,           TKT_STAGES,
                             TKT_CONSUMER_WARPS,      tkt::config::SMEM_BYTES,
                             tkt::config::NUM_THREADS, TKT_FAMILY,
                             tkt::MR,                 tkt::NR,
                             TKT_GLU};

const tkt::Program program = {
    tkt::config::NUM_THREADS, sizeof(tkt::shared), [](void* smem) { static_cast<tkt::shared*>(smem)->prepare(); },
    [](tkt::Warp& warp, void* smem) { kernel(warp.launch.G, warp, *static_cast<tkt::shared*>(smem)); }};

pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
tkt::Machine* the_machine = nullptr;

// Whether the arguments fit this artifact.
bool fits(const tkt_globals& G, const tkt_machine& machine) {
    return G.world == TKT_WORLD && G.rank >= 0 && G.rank < G.world && machine.seats > 0 && G.backoff >= 0 &&
           G.num_comp_blocks >= 0 && G.num_comm_blocks >= 0 && G.num_comp_blocks + G.num_comm_blocks > 0 &&
           G.weight_layout == TKT_WEIGHT_LAYOUT && G.hidden > 0 && G.hidden % TKT_RED_BLOCK == 0 && G.cols > 0 &&
           G.cols % TKT_COL_BLOCK == 0 && G.pad > 0 && G.pad % TKT_ROW_BLOCK == 0 && G.pad % 8 == 0 &&
           G.top_k > 0 && G.num_pad_blocks >= 0 && G.dispensers && (TKT_GLU != tkt::GLU_SEPARATE || G.packed) &&
           tkt::shared::fits(G);
}

int launch_locked(const tkt_globals& G, const tkt_machine& machine, tkt_result* result) {
    if (the_machine && the_machine->seats() != machine.seats) {
        delete the_machine;
        the_machine = nullptr;
    }
    if (!the_machine) the_machine = tkt::Machine::open(program, machine.seats, G.rank);
    if (!the_machine) return TKT_NO_THREADS;
    tkt::Launch launch{G, machine};
    if (G.start_sequence && !tkt::device_barrier({launch, -1, -1, "host"}, G.start_sequence))
        return launch.end.load();
    the_machine->run(launch, result);
    return result->end;
}

}  // namespace

extern "C" {

const tkt_facts* tkt_describe(void) { return &facts; }

int tkt_launch(const tkt_globals* globals, const tkt_machine* machine, tkt_result* result) {
    *result = {0, 0, TKT_BAD_ARGUMENT};
    if (!fits(*globals, *machine)) return TKT_BAD_ARGUMENT;
    pthread_mutex_lock(&one_at_a_time);
    result->end = launch_locked(*globals, *machine, result);
    pthread_mutex_unlock(&one_at_a_time);
    return result->end;
}

int tkt_barrier(const tkt_globals* globals, const tkt_machine* machine, uint64_t sequence) {
    if (globals->world != TKT_WORLD) return TKT_BAD_ARGUMENT;
    tkt::Launch launch{*globals, *machine};
    return tkt::device_barrier({launch, -1, -1, "host"}, sequence) ? TKT_DONE : launch.end.load();
}

// Ends the machine's threads. The artifact may be unloaded afterwards, or launched again.
void tkt_close(void) {
    pthread_mutex_lock(&one_at_a_time);
    delete the_machine;
    the_machine = nullptr;
    pthread_mutex_unlock(&one_at_a_time);
}

}  // extern "C"
