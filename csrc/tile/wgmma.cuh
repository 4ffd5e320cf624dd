// Warpgroup tensor operations of sm_90a: m64 × N × k16 with both operands in shared memory, fp32 accumulators
// in registers. Instructions and descriptors only; pipelines live in csrc/gemm.
#pragma once

#include "rt.cuh"
#include "st.cuh"

namespace tkt {

namespace detail {

// A panel of 128-byte rows with the 128-byte swizzle. `leading` is the distance between panels of 64 columns and
// matters only where the reduction dimension runs down the rows; 8 rows are always 1024 bytes apart.
// PTX ISA, "Matrix descriptor": start >> 4 at bit 0, leading >> 4 at 16, stride >> 4 at 32, swizzle mode at 62.
TKT_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t leading) {
    const uint32_t low = ((address & 0x3ffff) >> 4) | ((leading >> 4) << 16);
    return (static_cast<uint64_t>((1024u >> 4) | (1u << 30)) << 32) | low;
}

// An instruction names its N / 2 accumulator registers one by one, so the lists are spelt in sixteens.
#define TKT_PLACES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TKT_PLACES_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TKT_PLACES_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TKT_PLACES_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TKT_PLACES_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TKT_PLACES_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TKT_PLACES_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TKT_PLACES_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TKT_SIXTEEN(o)                                                                                          \
    "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), \
        "+f"(d[o + 7]), "+f"(d[o + 8]), "+f"(d[o + 9]), "+f"(d[o + 10]), "+f"(d[o + 11]), "+f"(d[o + 12]),      \
        "+f"(d[o + 13]), "+f"(d[o + 14]), "+f"(d[o + 15])

template <int N, bool B_DOWN_ROWS>
struct wgmma;

// `accumulate` false starts a fresh sum, so accumulators are never zeroed by hand.
#define TKT_WGMMA(N, PLACES, REGISTERS, A, B, SCALE, TRANSPOSE)                                                 \
    template <bool B_DOWN_ROWS>                                                                                 \
    struct wgmma<N, B_DOWN_ROWS> {                                                                              \
        static TKT_DEVICE void issue(float* d, uint64_t a, uint64_t b, int accumulate) {                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #SCALE ", 0;\n"                                   \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" PLACES "}, %" #A ", %" #B  \
                         ", p, 1, 1, 0, %" #TRANSPOSE ";\n}"                                                    \
                         : REGISTERS                                                                            \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(B_DOWN_ROWS ? 1 : 0));                          \
        }                                                                                                       \
    };
#define TKT_PLACES_TO_32 TKT_PLACES_0
#define TKT_PLACES_TO_64 TKT_PLACES_0 ", " TKT_PLACES_1
#define TKT_PLACES_TO_96 TKT_PLACES_0 ", " TKT_PLACES_1 ", " TKT_PLACES_2
#define TKT_PLACES_TO_128 TKT_PLACES_0 ", " TKT_PLACES_1 ", " TKT_PLACES_2 ", " TKT_PLACES_3
#define TKT_PLACES_TO_160 TKT_PLACES_0 ", " TKT_PLACES_1 ", " TKT_PLACES_2 ", " TKT_PLACES_3 ", " TKT_PLACES_4
#define TKT_PLACES_TO_192 TKT_PLACES_0 ", " TKT_PLACES_1 ", " TKT_PLACES_2 ", " TKT_PLACES_3 ", " TKT_PLACES_4 ", " TKT_PLACES_5
#define TKT_PLACES_TO_224 TKT_PLACES_0 ", " TKT_PLACES_1 ", " TKT_PLACES_2 ", " TKT_PLACES_3 ", " TKT_PLACES_4 ", " TKT_PLACES_5 ", " TKT_PLACES_6
#define TKT_PLACES_TO_256 TKT_PLACES_0 ", " TKT_PLACES_1 ", " TKT_PLACES_2 ", " TKT_PLACES_3 ", " TKT_PLACES_4 ", " TKT_PLACES_5 ", " TKT_PLACES_6 ", " TKT_PLACES_7
#define TKT_REGISTERS_32 TKT_SIXTEEN(0)
#define TKT_REGISTERS_64 TKT_REGISTERS_32, TKT_SIXTEEN(16)
#define TKT_REGISTERS_96 TKT_REGISTERS_64, TKT_SIXTEEN(32)
#define TKT_REGISTERS_128 TKT_REGISTERS_96, TKT_SIXTEEN(48)
#define TKT_REGISTERS_160 TKT_REGISTERS_128, TKT_SIXTEEN(64)
#define TKT_REGISTERS_192 TKT_REGISTERS_160, TKT_SIXTEEN(80)
#define TKT_REGISTERS_224 TKT_REGISTERS_192, TKT_SIXTEEN(96)
#define TKT_REGISTERS_256 TKT_REGISTERS_224, TKT_SIXTEEN(112)
TKT_WGMMA(32, TKT_PLACES_TO_32, TKT_REGISTERS_32, 16, 17, 18, 19)
TKT_WGMMA(64, TKT_PLACES_TO_64, TKT_REGISTERS_64, 32, 33, 34, 35)
TKT_WGMMA(96, TKT_PLACES_TO_96, TKT_REGISTERS_96, 48, 49, 50, 51)
TKT_WGMMA(128, TKT_PLACES_TO_128, TKT_REGISTERS_128, 64, 65, 66, 67)
TKT_WGMMA(160, TKT_PLACES_TO_160, TKT_REGISTERS_160, 80, 81, 82, 83)
TKT_WGMMA(192, TKT_PLACES_TO_192, TKT_REGISTERS_192, 96, 97, 98, 99)
TKT_WGMMA(224, TKT_PLACES_TO_224, TKT_REGISTERS_224, 112, 113, 114, 115)
TKT_WGMMA(256, TKT_PLACES_TO_256, TKT_REGISTERS_256, 128, 129, 130, 131)

#undef TKT_WGMMA
#undef TKT_SIXTEEN

}  // namespace detail

namespace warpgroup {

// Before the first mma_async of a batch: orders this warpgroup's register accesses before the tensor cores'.
TKT_DEVICE void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TKT_DEVICE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// At most PENDING batches are still running.
template <int PENDING = 0>
TKT_DEVICE void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads or writes of accumulators across the waits above.
template <int ROWS, int COLS>
TKT_DEVICE void pin(rt_fl<ROWS, COLS>& tile) {
#pragma unroll
    for (int r = 0; r < ROWS / 16; ++r)
#pragma unroll
        for (int c = 0; c < COLS / 8; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(tile.v[r][c][i])::"memory");
}

// d (+)= a · bᵀ for one step of 16 along the reduction. `a` points at 64 rows of a panel, `b` at N rows of a
// panel; both advance 32 bytes a step.
template <int COLS>
TKT_DEVICE void mma_async_ABt(rt_fl<16, COLS>& d, uint32_t a, uint32_t b, int accumulate) {
    tkt::detail::wgmma<COLS, false>::issue(&d.v[0][0][0], tkt::detail::matrix_descriptor(a, 16),
                                           tkt::detail::matrix_descriptor(b, 16), accumulate);
}

// d (+)= a · b: `b` points at row k of the first of COLS / 64 panels, `panel_bytes` apart; it advances 16 rows
// (2048 bytes) a step.
template <int COLS>
TKT_DEVICE void mma_async_AB(rt_fl<16, COLS>& d, uint32_t a, uint32_t b, uint32_t panel_bytes, int accumulate) {
    tkt::detail::wgmma<COLS, true>::issue(&d.v[0][0][0], tkt::detail::matrix_descriptor(a, 16),
                                          tkt::detail::matrix_descriptor(b, panel_bytes), accumulate);
}

}  // namespace warpgroup
}  // namespace tkt
