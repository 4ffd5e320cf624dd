// Shared tiles and vectors. A tile is a row of panels, each ROWS × 64 bf16 with the 128-byte swizzle that TMA,
// wgmma and ldmatrix all understand; a vector is one token row, unswizzled.
#pragma once

#include "base.cuh"

namespace tkt {

template <typename T, int ROWS, int COLS>
struct alignas(1024) st {
    static_assert(sizeof(T) == 2 && ROWS % 8 == 0 && COLS % kPanelCols == 0);
    using type = T;
    static constexpr int rows = ROWS, cols = COLS;
    static constexpr int kPanels = COLS / kPanelCols;
    static constexpr int kPanelBytes = ROWS * kPanelRowBytes;
    static constexpr int kBytes = kPanels * kPanelBytes;

    T values[ROWS * COLS];

    TKT_DEVICE uint32_t address() const { return shared_address(values); }

    // Byte offset of a 16-byte piece (8 columns): its place in the row is xor-ed with the row modulo 8.
    static TKT_DEVICE constexpr uint32_t offset(int row, int col) {
        return (col / kPanelCols) * kPanelBytes + row * kPanelRowBytes +
               ((((col % kPanelCols) / 8) ^ (row % 8)) * 16);
    }
};

template <typename T, int LENGTH>
struct alignas(128) sv {
    static constexpr int length = LENGTH;
    static constexpr int kBytes = LENGTH * sizeof(T);
    T values[LENGTH];
};

template <int ROWS, int COLS>
using st_bf = st<bf16, ROWS, COLS>;
template <int LENGTH>
using sv_bf = sv<bf16, LENGTH>;

}  // namespace tkt
