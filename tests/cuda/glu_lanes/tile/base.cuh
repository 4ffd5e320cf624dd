// Stands for csrc/tile/base.cuh where the lanes of a warp are threads: the same names, and a shuffle that meets.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>

#define TKT_DEVICE inline
#define __align__(n) alignas(n)

struct uint4 {
    uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace tkt {

constexpr int kWarpThreads = 32, kPanelCols = 64, kPanelRowBytes = 128;

struct bf16 {
    uint16_t bits;
};

inline thread_local int the_lane;
inline int lane_id() { return the_lane; }
inline uint32_t shared_address(const void*) { return 0; }
inline uint32_t opaque(uint32_t value) { return value; }

inline uint32_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return rounded(low) | rounded(high) << 16; }

inline std::barrier<> meeting(32);
inline uint32_t said[32];

}  // namespace tkt

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
    tkt::said[tkt::lane_id()] = value;
    tkt::meeting.arrive_and_wait();
    const uint32_t heard = tkt::said[tkt::lane_id() ^ mask];
    tkt::meeting.arrive_and_wait();
    return heard;
}
