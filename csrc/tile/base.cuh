// Scalars, places in the launch and the few PTX one-liners every other header needs. No tiles, no memory movement.
#pragma once

#include <stdint.h>

#define TKT_DEVICE __device__ __forceinline__

namespace tkt {

constexpr int kWarpThreads = 32;
constexpr int kPanelCols = 64;       // bf16 columns of one 128-byte swizzled panel
constexpr int kPanelRowBytes = 128;  // bytes of one panel row

// Storage only: arithmetic happens in fp32 registers or in the tensor cores.
struct bf16 {
    uint16_t bits;
};

TKT_DEVICE int lane_id() { return threadIdx.x % kWarpThreads; }

// The shuffle tells the compiler that the value is the same in the whole warp, so role branches stay uniform.
TKT_DEVICE int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / kWarpThreads, 0); }

// True in one lane of a converged warp, the same each time. The compiler then knows that one lane runs the branch, and
// passes operands that must be uniform (the copy engine's) directly instead of in a loop over the lanes.
TKT_DEVICE bool elect_lane() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected;
}

TKT_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// The global timer in units of 1024 ns: one register, and it wraps only after an hour.
TKT_DEVICE uint32_t kilo_nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return static_cast<uint32_t>(t >> 10);
}

// Makes the compiler forget how a value was made, so that it recomputes it instead of keeping it in a register.
TKT_DEVICE uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Round to nearest even; `low` lands in the lower half, which is the lower column.
TKT_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <typename T>
TKT_DEVICE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// A place in a ring of slots and the phase its barrier will complete: the only phase bookkeeping there is.
// Who waits for a full slot waits on `phase`; who waits for a free slot waits on `phase ^ 1`, so that the
// first lap never blocks.
template <int SLOTS>
struct ring {
    uint32_t index = 0;
    uint32_t phase = 0;

    TKT_DEVICE void advance() {
        if (++index == SLOTS) {
            index = 0;
            phase ^= 1;
        }
    }
    TKT_DEVICE void advance(uint32_t steps) {
        const uint32_t place = index + steps;
        phase ^= (place / SLOTS) & 1;
        index = place % SLOTS;
    }
};

}  // namespace tkt
