// Shared tiles and vectors. A tile is a row of panels, each ROWS × 64 bf16 with the 128-byte swizzle that TMA,
// wgmma and ldmatrix all understand (a tile of 32 columns is one panel of 64-byte rows with the 64-byte swizzle, which
// TMA and ldmatrix understand); a vector is one token row, unswizzled.
#pragma once

#include "base.cuh"

namespace tkt {

template <typename T, int ROWS, int COLS>
struct alignas(1024) st {
    static_assert(sizeof(T) == 2 && ROWS % 8 == 0 && (COLS % kPanelCols == 0 || COLS == kPanelCols / 2));
    using type = T;
    static constexpr int rows = ROWS, cols = COLS;
    static constexpr int kWide = COLS < kPanelCols ? COLS : kPanelCols;  // columns of a panel
    static constexpr int kRowBytes = kWide * 2;                          // of a panel
    static constexpr int kPanels = COLS / kWide;
    static constexpr int kPanelBytes = ROWS * kRowBytes;
    static constexpr int kBytes = kPanels * kPanelBytes;

    T values[ROWS * COLS];

    TKT_DEVICE uint32_t address() const { return shared_address(values); }

    // What the swizzle xors into the place of a 16-byte piece: the number of its 128-byte line, modulo the pieces of
    // a row. So eight rows of one piece column always lie in eight different groups of four banks.
    static TKT_DEVICE constexpr int turn(int row) { return row * kRowBytes / 128 % (kRowBytes / 16); }

    // Byte offset of a 16-byte piece (8 columns).
    static TKT_DEVICE constexpr uint32_t offset(int row, int col) {
        return (col / kWide) * kPanelBytes + row * kRowBytes + ((((col % kWide) / 8) ^ turn(row)) * 16);
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
