// What `tktune doctor` measures a machine with: how fast so many SMs move rows through the link and within a device,
// and how long a signal takes. One artifact a world serves every way, row length and number of SMs.
//
//   define     default  values  meaning
//   TKT_WORLD  2        1 .. 8  ranks
//
// Entries, arguments by value:
//   tktune_link_probe       probe_globals; grid = SMs to use, block = 512; dynamic shared memory = the device's whole
//                           opt-in size, so that every block has an SM of its own
//   tktune_link_probe_meet  meeting; one warp
//   tktune_link_probe_echo  echo_globals; one warp
#ifndef TKT_WORLD
#define TKT_WORLD 2
#endif
#include "../comm/probe.cuh"

static_assert(1 <= TKT_WORLD && TKT_WORLD <= TKT_MAX_WORLD);

// Read by the host from the module: least shared memory bytes, threads, bytes of the globals, blocks of a cluster.
extern "C" __device__ int32_t tktune_link_probe_facts[4] = {tkt::kProbeReserveBytes, tkt::kProbeThreads,
                                                            sizeof(tkt::probe_globals), 1};
// Ranks, bytes of the other entries' arguments.
extern "C" __device__ int32_t tktune_link_probe_world[3] = {TKT_WORLD, sizeof(tkt::meeting<TKT_WORLD>),
                                                            sizeof(tkt::echo_globals)};

extern "C" __global__ void __launch_bounds__(tkt::kProbeThreads, 1)
    tktune_link_probe(const __grid_constant__ tkt::probe_globals G) {
    extern __shared__ __align__(1024) char shared_memory[];
    if (G.way == tkt::kProbePlain && G.warp_slots <= tkt::kProbeMostUnroll / 2)
        tkt::probe_plain<tkt::kProbeMostUnroll / 2>(G);
    else if (G.way == tkt::kProbePlain)
        tkt::probe_plain<tkt::kProbeMostUnroll>(G);
    else if (tkt::warp_id() < G.warps)
        tkt::probe_bulk(G, shared_memory, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(32, 1)
    tktune_link_probe_meet(const __grid_constant__ tkt::meeting<TKT_WORLD> M) {
    tkt::device_barrier(M);
}

extern "C" __global__ void __launch_bounds__(32, 1)
    tktune_link_probe_echo(const __grid_constant__ tkt::echo_globals E) {
    if (threadIdx.x == 0) tkt::echo(E);
}
