// Warp-level tensor operations for every architecture: ldmatrix, mma.sync m16n8k16, and what a warp does with
// its register tiles.
#pragma once

#include "rt.cuh"
#include "st.cuh"

namespace tkt {

namespace detail {

TKT_DEVICE void ldmatrix(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
TKT_DEVICE void ldmatrix_transposed(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
TKT_DEVICE void stmatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
TKT_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace detail

namespace warp {

template <int ROWS, int COLS>
TKT_DEVICE void zero(rt_fl<ROWS, COLS>& tile) {
#pragma unroll
    for (int r = 0; r < ROWS / 16; ++r)
#pragma unroll
        for (int c = 0; c < COLS / 8; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) tile.v[r][c][i] = 0.f;
}

// Where lane l points, for a 16 × 16 piece at (row, col) of a shared tile (both multiples of 16), so that the four
// 8 × 8 matrices arrive in this order: rows 0-7 and 8-15 of columns 0-7, then both of columns 8-15. With ACROSS
// the two matrices of rows 0-7 come first. The swizzle of `st::offset` is split so that what depends on the lane
// is one register and a step along the columns is one xor.
template <typename Tile, bool ACROSS = false>
TKT_DEVICE uint32_t piece_address(uint32_t base, int row, int col) {
    const int lane = lane_id();
    const int lane_row = ACROSS ? lane % 8 + lane / 16 * 8 : lane % 16, half = ACROSS ? lane / 8 % 2 : lane / 16;
    const uint32_t of_lane = lane_row * Tile::kRowBytes + (half ^ Tile::turn(lane % 8)) * 16;
    return base + (col / Tile::kWide) * Tile::kPanelBytes + row * Tile::kRowBytes + (of_lane ^ (col % Tile::kWide) * 2);
}

// Strip `strip` of the left operand of `mma`: the 16 × 16 piece at (row, col) of the shared tile.
template <int ROWS, typename Tile>
TKT_DEVICE void load_strip(rt_bf<ROWS, 16>& to, int strip, const Tile& from, int row, int col) {
    tkt::detail::ldmatrix(to.v[strip][0], piece_address<Tile>(from.address(), row, col));
}

// Sixteen columns of the right operand, 16 deep. `load_right` reads a tile whose rows are those columns,
// `load_right_transposed` one whose rows are the reduction. Either way each column of eight ends up in two
// neighbouring registers, as mma.sync wants them; another order would cost a move for every operand.
template <typename Tile>
TKT_DEVICE void load_right(rt_bf<16, 16>& to, const Tile& from, int row, int col) {
    tkt::detail::ldmatrix(to.v[0][0], piece_address<Tile, true>(from.address(), row, col));
}
template <typename Tile>
TKT_DEVICE void load_right_transposed(rt_bf<16, 16>& to, const Tile& from, int row, int col) {
    tkt::detail::ldmatrix_transposed(to.v[0][0], piece_address<Tile>(from.address(), row, col));
}

// d[:, col : col+16] += a · b.
template <int ROWS, int COLS>
TKT_DEVICE void mma(rt_fl<ROWS, COLS>& d, const rt_bf<ROWS, 16>& a, const rt_bf<16, 16>& b, int col) {
#pragma unroll
    for (int r = 0; r < ROWS / 16; ++r) {
        tkt::detail::mma(d.v[r][col / 8], a.v[r][0], b.v[0][0][0], b.v[0][0][1]);
        tkt::detail::mma(d.v[r][col / 8 + 1], a.v[r][0], b.v[0][0][2], b.v[0][0][3]);
    }
}

// Rounds COLS columns from `from_col` of 16-row strip `strip` of the finished tile to bf16 and puts them at (row, col) of the
// shared one. Each piece is finished where it is rounded, so that few registers hold finished ones.
template <int COLS, typename Finish = as_they_are, typename Acc, typename Tile>
TKT_DEVICE void store(Tile& to, const Acc& from, int strip, int from_col, int row, int col) {
    const uint32_t base = opaque(to.address());  // beside a full set of accumulators addresses have no room
#pragma unroll
    for (int c = 0; c < COLS / 16; ++c) {
        const auto& left = Finish::piece(from, strip, from_col / 8 + 2 * c);
        const auto& right = Finish::piece(from, strip, from_col / 8 + 2 * c + 1);
        tkt::detail::stmatrix(piece_address<Tile>(base, row, col + 16 * c), pack_bf16(left[0], left[1]),
                              pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                              pack_bf16(right[2], right[3]));
    }
}

// Word j of lane q of each quad of lanes goes to place q of lane j.
TKT_DEVICE void transpose_in_quads(uint32_t (&w)[4]) {
    const bool odd = lane_id() & 1, high = lane_id() & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        w[i] = odd ? other : w[i];
        w[i + 1] = odd ? w[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
        w[i] = high ? other : w[i];
        w[i + 2] = high ? w[i + 2] : other;
    }
}

// Rounds the COLS columns of a finished register tile to bf16 and writes them to global memory at (row, col), 16 bytes a
// lane: a quad turns four words of eight columns into four runs of eight columns. Columns beyond the matrix are dropped;
// rows are the caller's.
template <int COLS, typename Finish = as_they_are, typename Acc>
TKT_DEVICE void store(bf16* to, int cols, const Acc& from, int row, int col) {
    const int quad = lane_id() % 4;
    auto put = [&](int r, int c, uint32_t (&w)[4]) {
        transpose_in_quads(w);
        if (c < cols)
            *reinterpret_cast<uint4*>(to + static_cast<int64_t>(r) * cols + c) = make_uint4(w[0], w[1], w[2], w[3]);
    };
#pragma unroll
    for (int strip = 0; strip < Acc::rows / 16; ++strip) {
        const int top = row + 16 * strip + lane_id() / 4;
#pragma unroll
        for (int c = 0; c + 32 <= COLS; c += 32)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t w[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const auto& piece = Finish::piece(from, strip, c / 8 + i);
                    w[i] = pack_bf16(piece[2 * half], piece[2 * half + 1]);
                }
                put(top + 8 * half, col + c + 8 * quad, w);
            }
        if constexpr (COLS % 32 >= 16) {  // sixteen columns more: both halves of the strip in one turn
            constexpr int kNext = COLS / 32 * 4;
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const auto& piece = Finish::piece(from, strip, kNext + i % 2);
                w[i] = pack_bf16(piece[i / 2 * 2], piece[i / 2 * 2 + 1]);
            }
            put(top + 8 * (quad / 2), col + 8 * kNext + 8 * (quad % 2), w);
        }
        if constexpr (COLS % 16 != 0) {  // eight more: two lanes of a quad write, one for each half
            constexpr int kLast = COLS / 8 - 1;
            const auto& last = Finish::piece(from, strip, kLast);
            uint32_t w[4] = {pack_bf16(last[0], last[1]), pack_bf16(last[2], last[3]), 0, 0};
            put(top + 8 * (quad % 2), quad < 2 ? col + 8 * kLast : cols, w);
        }
    }
}

}  // namespace warp
}  // namespace tkt
