// The lanes of one warp as threads: a tile of accumulators is dealt to them in fragment order, the finish is applied, and
// the result written to memory by the kernel's own code. Arguments: columns of the tile, columns of the matrix, where the
// tile begins. Element (r, c) of the accumulators is 1000 r + c; the stand-in for silu(gate) · up is gate + up / 1024.
// Prints what is wrong, or "right".
#include <cstdio>
#include <thread>
#include <vector>

#include "gemm/glu.cuh"
#include "tile/mma.cuh"

namespace {

constexpr int ROWS = 32, MATRIX_ROWS = 40;
constexpr uint16_t UNTOUCHED = 0x7fe5;
int wrong = 0;

float element(int row, int col) { return 1000.f * row + col; }

template <int COLS, typename Finish>
void try_tile(int matrix_cols, int first_col) {
    std::vector<tkt::bf16> matrix(MATRIX_ROWS * matrix_cols, tkt::bf16{UNTOUCHED});
    std::vector<std::thread> warp;
    for (int lane = 0; lane < 32; ++lane)
        warp.emplace_back([&, lane] {
            tkt::the_lane = lane;
            tkt::rt_fl<ROWS, COLS> acc;
            for (int r = 0; r < ROWS / 16; ++r)
                for (int c = 0; c < COLS / 8; ++c)
                    for (int i = 0; i < 4; ++i)
                        acc.v[r][c][i] = element(16 * r + lane / 4 + i / 2 * 8, 8 * c + lane % 4 * 2 + i % 2);
            constexpr int kFold = Finish::kFold;
            tkt::warp::store<COLS / kFold, Finish>(matrix.data(), matrix_cols, acc, 4, first_col / kFold);
        });
    for (std::thread& lane : warp) lane.join();
    const int begin = first_col / Finish::kFold, end = begin + COLS / Finish::kFold;
    for (int row = 0; row < MATRIX_ROWS; ++row)
        for (int col = 0; col < matrix_cols; ++col) {
            const bool mine = row >= 4 && row < 4 + ROWS && col >= begin && col < end;
            float value = 0;
            if (mine && Finish::kFold == 1) value = element(row - 4, col - begin);
            if (mine && Finish::kFold == 2) {
                const int j = col - begin, gate = j / 8 * 16 + j % 8;
                value = element(row - 4, gate) + element(row - 4, gate + 8) / 1024;
            }
            const uint16_t wanted = mine ? tkt::pack_bf16(value, 0) & 0xffff : UNTOUCHED;
            if (matrix[row * matrix_cols + col].bits != wanted && wrong++ < 3)
                printf("columns %d of %d at %d: (%d, %d) is %x, not %x\n", COLS, matrix_cols, first_col, row, col,
                       matrix[row * matrix_cols + col].bits, wanted);
        }
}

struct plain : tkt::as_they_are {
    static constexpr int kFold = 1;
};

// In the middle of a wide matrix, and at the end of one that drops the last eight columns.
template <int COLS>
void try_both() {
    try_tile<COLS, tkt::swiglu>(COLS, COLS / 2);
    try_tile<COLS, tkt::swiglu>(COLS / 2 - 8 + 16, 32);
    try_tile<COLS, plain>(COLS + 24, 16);
}

}  // namespace

int main() {
    try_both<16>();
    try_both<32>();
    try_both<48>();
    try_both<64>();
    try_both<96>();
    try_both<256>();
    puts(wrong ? "wrong" : "right");
    return wrong != 0;
}
