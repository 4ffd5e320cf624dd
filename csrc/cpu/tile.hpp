// The tile layer of the CPU backend: packed stage tiles, register tiles, and the few operations on them. All index
// arithmetic of layouts is here; what is loaded when, and by whom, is not.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace tkt {

using bf16 = uint16_t;

// The register tile of the micro-kernel: MR rows by NV vectors, chosen so that accumulators, one row of B and one
// broadcast fill the vector registers and cover the latency of the fused multiply-add.
#if defined(__AVX512F__)
constexpr int LANES = 16, MR = 8, NV = 2;
#elif defined(__AVX__)
constexpr int LANES = 8, MR = 4, NV = 2;
#else
constexpr int LANES = 4, MR = 4, NV = 4;
#endif
constexpr int NR = LANES * NV;

typedef float fvec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef bf16 hvec __attribute__((vector_size(LANES * 2)));

inline hvec load_half(const bf16* from) {
    hvec value;
    memcpy(&value, from, sizeof value);
    return value;
}

inline fvec to_float(hvec value) { return (fvec)(__builtin_convertvector(value, uvec) << 16); }

// Round to nearest even; NaN stays NaN.
inline hvec to_half(fvec value) {
    const uvec bits = (uvec)value;
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uvec nan = (uvec)(ivec)(value != value);
    return __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), hvec);
}

// A stage's A tile: rows of the reduction block, row-major fp32. The micro-kernel broadcasts from it, so that a strip
// of MR rows is contiguous as it stands.
template <int ROWS, int RED>
struct st_a {
    static_assert(ROWS % MR == 0, "ROW_BLOCK must be a multiple of the register tile's rows");
    alignas(64) float data[ROWS * RED];

    const float* strip(int index) const { return data + index * MR * RED; }
};

// A stage's B tile: panels of NR columns, each (RED, NR) fp32.
template <int RED, int COLS>
struct st_b {
    static_assert(COLS % NR == 0, "COL_BLOCK must be a multiple of the register tile's columns");
    alignas(64) float data[RED * COLS];

    float* panel(int index) { return data + index * RED * NR; }
    const float* panel(int index) const { return data + index * RED * NR; }
};

// The output tile between reduction steps: register tiles one after another, panel by panel.
template <int ROWS, int COLS>
struct st_acc {
    alignas(64) float data[ROWS * COLS];
};

struct rt_fl {
    fvec data[MR][NV];
};

// Loads `rows` rows of (.., stride) bf16 into an A tile. Rows beyond are left as they are: results of a row depend on
// that row only.
template <int ROWS, int RED>
void load(st_a<ROWS, RED>& tile, const bf16* from, int64_t stride, int rows) {
    static_assert(RED % LANES == 0, "RED_BLOCK must be a multiple of the vector's lanes");
    for (int r = 0; r < rows; ++r)
        for (int k = 0; k < RED; k += LANES) {
            const fvec value = to_float(load_half(from + r * stride + k));
            memcpy(tile.data + r * RED + k, &value, sizeof value);
        }
}

// Loads a B tile from weights with columns contiguous: (RED, stride).
template <int RED, int COLS>
void load_kn(st_b<RED, COLS>& tile, const bf16* from, int64_t stride) {
    for (int k = 0; k < RED; ++k)
        for (int n = 0; n < COLS; n += LANES) {
            const fvec value = to_float(load_half(from + k * stride + n));
            memcpy(tile.data + n / NR * (RED * NR) + k * NR + n % NR, &value, sizeof value);
        }
}

namespace detail {

template <int STEP, bool HIGH, int... I>
inline fvec interleave(fvec a, fvec b, std::integer_sequence<int, I...>) {
    // Lanes whose STEP bit is clear come from a, the others from b; LOW takes both from the clear half, HIGH from
    // the set half.
    return __builtin_shuffle(
        a, b, ivec{((I & STEP) ? LANES + (HIGH ? I : I - STEP) : (HIGH ? I + STEP : I))...});
}

// One stage of the butterfly: exchanges the off-diagonal STEP × STEP blocks.
template <int STEP>
inline void exchange(fvec (&square)[LANES]) {
    using lanes = std::make_integer_sequence<int, LANES>;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
        if (i & STEP) continue;
        const fvec low = interleave<STEP, false>(square[i], square[i + STEP], lanes{});
        const fvec high = interleave<STEP, true>(square[i], square[i + STEP], lanes{});
        square[i] = low;
        square[i + STEP] = high;
    }
}

inline void transpose(fvec (&square)[LANES]) {
    exchange<1>(square);
    exchange<2>(square);
    if constexpr (LANES >= 8) exchange<(LANES >= 8 ? 4 : 1)>(square);
    if constexpr (LANES >= 16) exchange<(LANES >= 16 ? 8 : 1)>(square);
}

}  // namespace detail

// Loads a B tile from weights with the reduction contiguous: (COLS, stride). Transposes LANES × LANES squares.
template <int RED, int COLS>
void load_nk(st_b<RED, COLS>& tile, const bf16* from, int64_t stride) {
    for (int n = 0; n < COLS; n += LANES)
        for (int k = 0; k < RED; k += LANES) {
            fvec square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) square[i] = to_float(load_half(from + (n + i) * stride + k));
            detail::transpose(square);
            float* to = tile.data + n / NR * (RED * NR) + k * NR + n % NR;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) memcpy(to + i * NR, &square[i], sizeof square[i]);
        }
}

inline void zero(rt_fl& acc) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) acc.data[i][v] = fvec{};
}

inline void load(rt_fl& acc, const float* from) { memcpy(&acc, from, sizeof acc); }

inline void store(float* to, const rt_fl& acc) { memcpy(to, &acc, sizeof acc); }

// acc += A strip (MR, RED) × B panel (RED, NR).
template <int RED>
inline void mma_AB(rt_fl& acc, const float* a, const float* b) {
#pragma GCC unroll 4
    for (int k = 0; k < RED; ++k) {
        fvec row[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) memcpy(&row[v], b + k * NR + v * LANES, sizeof row[v]);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const fvec spread = a[i * RED + k] - fvec{};
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v) acc.data[i][v] += spread * row[v];
        }
    }
}

// Stores the first `rows` rows of a register tile as bf16.
inline void store(bf16* to, int64_t stride, const rt_fl& acc, int rows) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
        if (i >= rows) return;
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) {
            const hvec value = to_half(acc.data[i][v]);
            memcpy(to + i * stride + v * LANES, &value, sizeof value);
        }
    }
}

}  // namespace tkt
