// SwiGLU as a finish: silu(gate) · up of packed columns, sixteen of which are eight gates and the eight ups of the same
// output columns. A piece of accumulators is eight columns wide, so a thread holds a gate and its up at the same place of
// two neighbouring pieces, and what it makes of them is again a piece: it leaves as any other.
#pragma once

#include "../tile/rt.cuh"

namespace tkt {

constexpr int kGluColumns = 8;  // of gate, then of up

// gate / (1 + e^-gate) · up: two looks into the special-function unit, each within 2 units of the last place. Where
// e^-gate overflows, the quotient is zero.
TKT_DEVICE float silu_times(float gate, float up) {
    float power, quotient;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(gate * -1.44269504f));  // log2 e
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.f + power));
    return gate * quotient * up;
}

struct swiglu {
    static constexpr int kFold = 2;
    struct four {
        float v[4];
        TKT_DEVICE float operator[](int i) const { return v[i]; }
    };
    template <typename Acc>
    static TKT_DEVICE four piece(const Acc& acc, int r, int c) {
        static_assert(Acc::cols % (2 * kGluColumns) == 0, "a gate and its up are in one tile");
        four out;
#pragma unroll
        for (int i = 0; i < 4; ++i) out.v[i] = silu_times(acc.v[r][2 * c][i], acc.v[r][2 * c + 1][i]);
        return out;
    }
};

}  // namespace tkt
