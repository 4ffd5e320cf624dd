// The config of a build, from its defines (csrc/kernels/grouped_gemm.cu says what each means). Families that
// contain the GEMM include this and add their own defines.
#pragma once

#include "config.cuh"
#include "glu.cuh"
#include "hooks.cuh"

#ifndef TKT_MAIN_LOOP
#define TKT_MAIN_LOOP 1
#endif
#ifndef TKT_ROW_BLOCK
#define TKT_ROW_BLOCK 128
#endif
#ifndef TKT_COL_BLOCK
#define TKT_COL_BLOCK (TKT_MAIN_LOOP == 0 ? 128 : 256)
#endif
#ifndef TKT_RED_BLOCK
#define TKT_RED_BLOCK 64
#endif
#ifndef TKT_STAGES
#define TKT_STAGES (TKT_MAIN_LOOP == 0 ? 3 : 4)
#endif
#ifndef TKT_CONSUMER_WARPS
#define TKT_CONSUMER_WARPS 8
#endif
#ifndef TKT_WARP_M
#define TKT_WARP_M 16
#endif
#ifndef TKT_WARP_N
#define TKT_WARP_N TKT_COL_BLOCK
#endif
#ifndef TKT_PRODUCER_WARPS
#define TKT_PRODUCER_WARPS 1
#endif
#ifndef TKT_CLUSTER
#define TKT_CLUSTER 1
#endif
#ifndef TKT_OUT_SLOTS
#define TKT_OUT_SLOTS 2
#endif
#ifndef TKT_MMA_DEPTH
#define TKT_MMA_DEPTH 1
#endif
#ifndef TKT_WEIGHT_LAYOUT
#define TKT_WEIGHT_LAYOUT 1
#endif
#ifndef TKT_ACTIVATIONS
#define TKT_ACTIVATIONS 0
#endif
#ifndef TKT_KEEP_ACTIVATIONS
#define TKT_KEEP_ACTIVATIONS 0
#endif
#ifndef TKT_KEEP_WEIGHTS
#define TKT_KEEP_WEIGHTS 0
#endif
#ifndef TKT_KEEP_OUTPUTS
#define TKT_KEEP_OUTPUTS 0
#endif
#ifndef TKT_DRAW
#define TKT_DRAW 0
#endif
#ifndef TKT_GLU
#define TKT_GLU 0
#endif
#ifndef TKT_PRODUCER_REGISTERS
#define TKT_PRODUCER_REGISTERS (TKT_CONSUMER_WARPS <= 8 ? 40 : 56)
#endif
#ifndef TKT_CONSUMER_REGISTERS
#define TKT_CONSUMER_REGISTERS (TKT_CONSUMER_WARPS <= 8 ? 232 : 152)
#endif

namespace tkt {

struct build_config {
    static constexpr int ROW_BLOCK = TKT_ROW_BLOCK, COL_BLOCK = TKT_COL_BLOCK, RED_BLOCK = TKT_RED_BLOCK;
    static constexpr int STAGES = TKT_STAGES, CONSUMER_WARPS = TKT_CONSUMER_WARPS;
    static constexpr int WARP_M = TKT_WARP_M, WARP_N = TKT_WARP_N, PRODUCER_WARPS = TKT_PRODUCER_WARPS;
    static constexpr int CLUSTER = TKT_CLUSTER, OUT_SLOTS = TKT_OUT_SLOTS, MMA_DEPTH = TKT_MMA_DEPTH;
    static constexpr int PRODUCER_REGISTERS = TKT_PRODUCER_REGISTERS;
    static constexpr int CONSUMER_REGISTERS = TKT_CONSUMER_REGISTERS;
    static constexpr auto MAIN_LOOP = static_cast<main_loop>(TKT_MAIN_LOOP);
    static constexpr auto WEIGHT_LAYOUT = static_cast<weight_layout>(TKT_WEIGHT_LAYOUT);
    static constexpr auto ACTIVATIONS = static_cast<activation_rows>(TKT_ACTIVATIONS);
    static constexpr auto DRAW = static_cast<task_draw>(TKT_DRAW);
    static constexpr auto KEEP_ACTIVATIONS = static_cast<tma::keep>(TKT_KEEP_ACTIVATIONS);
    static constexpr auto KEEP_WEIGHTS = static_cast<tma::keep>(TKT_KEEP_WEIGHTS);
    static constexpr auto KEEP_OUTPUTS = static_cast<tma::keep>(TKT_KEEP_OUTPUTS);
#if TKT_GLU == 1
    using Finish = swiglu;
#else
    using Finish = no_finish;
#endif
};

}  // namespace tkt
