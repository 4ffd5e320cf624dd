// Register tiles: a ROWS × COLS matrix held by one warp in the fragment order of the tensor cores.
#pragma once

#include "base.cuh"

namespace tkt {

template <typename T, int ROWS, int COLS>
struct rt;

// fp32 accumulators. Lane l holds, of each 16 × 8 piece, row l/4 in [0],[1] and row l/4+8 in [2],[3], columns
// 2(l%4) and the next. mma.sync and wgmma share this order; in a warpgroup each warp holds its own 16 rows.
template <int ROWS, int COLS>
struct rt<float, ROWS, COLS> {
    static_assert(ROWS % 16 == 0 && COLS % 8 == 0);
    static constexpr int rows = ROWS, cols = COLS;
    float v[ROWS / 16][COLS / 8][4];
};

// Whoever stores accumulators takes them piece by piece, 16 × 8, through a Finish: this one leaves them as they are.
struct as_they_are {
    template <typename Acc>
    static TKT_DEVICE const float (&piece(const Acc& acc, int r, int c))[4] {
        return acc.v[r][c];
    }
};

// bf16 operands, two to a register: of each 16 × 16 piece the four 8 × 8 matrices that one ldmatrix.x4 brings.
template <int ROWS, int COLS>
struct rt<bf16, ROWS, COLS> {
    static_assert(ROWS % 16 == 0 && COLS % 16 == 0);
    static constexpr int rows = ROWS, cols = COLS;
    uint32_t v[ROWS / 16][COLS / 16][4];
};

template <int ROWS, int COLS>
using rt_fl = rt<float, ROWS, COLS>;
template <int ROWS, int COLS>
using rt_bf = rt<bf16, ROWS, COLS>;

}  // namespace tkt
