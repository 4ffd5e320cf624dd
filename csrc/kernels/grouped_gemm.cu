// The grouped_gemm family: the GEMM template with empty hooks, one entry a variant, chosen wholly by defines.
//
//   define               default  values          meaning
//   TKT_MAIN_LOOP        1        0 1 2           0 mma.sync, 1 wgmma (warpgroups share a tile), 2 wgmma ping-pong
//   TKT_ROW_BLOCK        128      64 128 192 256  rows of a tile; at most 64, or a multiple of 64
//   TKT_COL_BLOCK        256      64 .. 256       columns of a tile
//   TKT_RED_BLOCK        64       32 64 128       reduction depth of a stage; K is a multiple (32: mma.sync only)
//   TKT_STAGES           4        2 ..            pipeline stages
//   TKT_CONSUMER_WARPS   8        4 8 12 16       warps that multiply; wgmma: multiples of 4
//   TKT_WARP_M, _WARP_N  16, CB   multiples of 16 mma.sync only: tile of one warp
//   TKT_PRODUCER_WARPS   1        0 1             mma.sync only: 0, the first consumer warp feeds the ring as well
//   TKT_CLUSTER          1        1 2             wgmma only: blocks that share an operand by in-cluster multicast
//   TKT_OUT_SLOTS        2        1 2 3 4         wgmma only: output slots of a warpgroup (ping-pong: of all), 64 rows of a panel
//   TKT_MMA_DEPTH        1        0 1             wgmma only: batches queued behind the running one
//   TKT_WEIGHT_LAYOUT    1        0 1             0 (E, K, N), 1 (E, N, K)
//   TKT_KEEP_ACTIVATIONS, _WEIGHTS, _OUTPUTS   0   0 1 2   L2: 0 normal, 1 evict first, 2 evict last
//   TKT_DRAW             0        0 1             tasks by 0 static stride, 1 atomic dispenser
//   TKT_PRODUCER_REGISTERS, TKT_CONSUMER_REGISTERS   wgmma only: setmaxnreg of the roles
//
// Tile rows move in pieces of 64 (a smaller ROW_BLOCK is one piece); a piece divides the problem's pad, a tile need
// not: an expert's pieces are dealt evenly over as few tiles as hold them.
//
// Launch: grid = any multiple of TKT_CLUSTER up to the SM count, block = 32 × (consumer warps + 4, or with
// mma.sync + TKT_PRODUCER_WARPS), dynamic shared memory = the value of `tktune_grouped_gemm_facts`, argument = gemm_globals by value.
#include "../gemm/build_config.cuh"
#include "../gemm/grouped_gemm.cuh"

using config = tkt::build_config;

// Read by the host from the module: shared memory bytes, threads, bytes of the globals, blocks of a cluster.
extern "C" __device__ int32_t tktune_grouped_gemm_facts[4] = {
    sizeof(tkt::shared_storage<config>), tkt::geometry<config>::kThreads, sizeof(tkt::gemm_globals<config>),
    config::CLUSTER};

extern "C" __global__ void __launch_bounds__(tkt::geometry<config>::kThreads, 1)
#if TKT_CLUSTER > 1
    __cluster_dims__(TKT_CLUSTER, 1, 1)
#endif
        tktune_grouped_gemm(const __grid_constant__ tkt::gemm_globals<config> G) {
    tkt::grouped_gemm<config>(G, tkt::no_gate{}, tkt::no_epilogue{}, blockIdx.x / TKT_CLUSTER,
                              gridDim.x / TKT_CLUSTER);
}
