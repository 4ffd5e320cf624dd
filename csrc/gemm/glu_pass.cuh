// SwiGLU as a launch of its own, for a GEMM that wrote its packed columns: one read and one write of memory, over the
// rows that hold tokens, as the plan on the device says.
#pragma once

#include "glu.cuh"

namespace tkt {

// The launch arguments; the host mirrors this layout (tktune/families/dispatch_gemm/glu_cuda.py).
struct glu_pass_globals {
    const bf16* packed;        // (capacity, 2 · cols): the GEMM's outputs
    bf16* out;                 // (capacity, cols)
    const int32_t* rows;       // one word: rows in use, padding included
    const int2* pull_indices;  // (rows): source rank and token of a row; -1 on padding
    int32_t cols;              // a multiple of kGluColumns
    int32_t unused;
};

namespace detail {

TKT_DEVICE float low_half(uint32_t two) { return __uint_as_float(two << 16); }
TKT_DEVICE float high_half(uint32_t two) { return __uint_as_float(two & 0xffff0000u); }

TKT_DEVICE uint32_t silu_times(uint32_t gates, uint32_t ups) {
    return pack_bf16(tkt::silu_times(low_half(gates), low_half(ups)), tkt::silu_times(high_half(gates), high_half(ups)));
}

}  // namespace detail

// A warp takes a run of 256 output columns of a row at a time, and each lane eight of them: 32 bytes in, 16 out.
TKT_DEVICE void glu_pass(const glu_pass_globals& G) {
    const int groups = G.cols / kGluColumns, runs = ceil_div(groups, kWarpThreads);
    const int all = __ldg(G.rows) * runs, warps = gridDim.x * (blockDim.x / kWarpThreads);
    for (int item = blockIdx.x * (blockDim.x / kWarpThreads) + warp_id(); item < all; item += warps) {
        const int row = item / runs, group = item % runs * kWarpThreads + lane_id();
        if (__ldg(G.pull_indices + row).x < 0 || group >= groups) continue;
        const int64_t at = static_cast<int64_t>(row) * groups + group;
        const uint4* from = reinterpret_cast<const uint4*>(G.packed) + 2 * at;
        const uint4 gates = __ldg(from), ups = __ldg(from + 1);
        reinterpret_cast<uint4*>(G.out)[at] =
            make_uint4(detail::silu_times(gates.x, ups.x), detail::silu_times(gates.y, ups.y),
                       detail::silu_times(gates.z, ups.z), detail::silu_times(gates.w, ups.w));
    }
}

}  // namespace tkt
