// SwiGLU on the CPU backend: silu(gate) · up of packed columns, of which sixteen are eight gates and the eight ups of the
// same output columns. On a register tile before it is stored, or as a launch of its own over stored rows.
#pragma once

#include "tile.hpp"
#include "wait.hpp"

namespace tkt {

enum glu_form { GLU_NONE = 0, GLU_FUSED = 1, GLU_SEPARATE = 2 };  // values of TKT_GLU
constexpr int GLU_COLS = 8;                                       // of gate, then of up
constexpr int NR_GLU = NR / 2;                                    // output columns of a register tile
static_assert(NR % (2 * GLU_COLS) == 0, "a gate and its up are in one register tile");

// e^x within 2 units of the last place, x between -87 and 87: 2^n times the exponential of what is left of x, at most
// half of log 2, by its Taylor series (the seventh term is below 2^-23).
inline fvec exponential(fvec x) {
    constexpr float SHIFT = 12582912.f;  // 1.5 · 2^23: adding it rounds to a whole number, which the low bits then hold
    const fvec shifted = x * 1.44269504f + SHIFT, n = shifted - SHIFT;
    const fvec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log 2 in two parts, the first of few bits
    fvec sum = r * (1.f / 720) + 1.f / 120;
    sum = sum * r + 1.f / 24;
    sum = sum * r + 1.f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.f;
    sum = sum * r + 1.f;
    return (fvec)((uvec)sum + ((uvec)shifted << 23));
}

// gate / (1 + e^-gate) · up; NaN stays NaN.
inline fvec silu_times(fvec gate, fvec up) {
    const fvec bound = fvec{} + 87.f;
    fvec x = -gate;
    x = x > bound ? bound : x;
    x = x < -bound ? -bound : x;
    return gate / (1.f + exponential(x)) * up;
}

// One row of packed columns, NR of them, as NR_GLU output columns.
inline void store_swiglu_row(bf16* to, const float* packed) {
    alignas(64) float gates[NR_GLU], ups[NR_GLU];
    for (int c = 0; c < NR_GLU; c += GLU_COLS) {
        memcpy(gates + c, packed + 2 * c, GLU_COLS * sizeof(float));
        memcpy(ups + c, packed + 2 * c + GLU_COLS, GLU_COLS * sizeof(float));
    }
    for (int c = 0; c < NR_GLU; c += LANES) {
        fvec gate, up;
        memcpy(&gate, gates + c, sizeof gate);
        memcpy(&up, ups + c, sizeof up);
        const hvec value = to_half(silu_times(gate, up));
        memcpy(to + c, &value, sizeof value);
    }
}

// Stores the first `rows` rows of a register tile of packed columns.
inline void store_swiglu(bf16* to, int64_t stride, const rt_fl& acc, int rows) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
        if (i >= rows) return;
        alignas(64) float packed[NR];
        memcpy(packed, acc.data[i], sizeof packed);
        store_swiglu_row(to + i * stride, packed);
    }
}

// By every thread of every block: rows that hold tokens are drawn a few at a time, and `G.packed` becomes `G.out`.
inline void glu_pass(const globals& G, const Warp& warp) {
    constexpr int ROWS = 8;  // of a draw; divides every pad
    const int all = G.num_pad_blocks * G.pad;
    for (int first; !warp.launch.stopped() &&
                    (first = __atomic_fetch_add(&G.dispensers[0], 1, __ATOMIC_RELAXED) * ROWS) < all;) {
        const int real = first / G.pad * G.pad + G.block_rows[first / G.pad];
        for (int row = first; row < first + ROWS && row < real; ++row) {
            const bf16* from = G.packed + int64_t(row) * G.cols;
            for (int col = 0; col < G.cols; col += NR) {
                alignas(64) float packed[NR];
                for (int v = 0; v < NR; v += LANES) {
                    const fvec value = to_float(load_half(from + col + v));
                    memcpy(packed + v, &value, sizeof value);
                }
                store_swiglu_row(G.out + (int64_t(row) * G.cols + col) / 2, packed);
            }
        }
    }
}

}  // namespace tkt
