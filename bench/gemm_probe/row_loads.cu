// How fast rows by index reach shared memory, beside tensor work or alone: copies of 16 bytes a lane, or tensor boxes of
// one row, by 1 to 4 warps. Data and stages are dummies; nothing is multiplied that anyone reads.
//
//   TKT_LOADERS 1 .. 4 warps; TKT_BOXES 0: cp.async, 1: TMA boxes of 1 x 64
#include "../../csrc/tile/cp_async.cuh"
#include "../../csrc/tile/tile.cuh"

#ifndef TKT_LOADERS
#define TKT_LOADERS 2
#endif
#ifndef TKT_BOXES
#define TKT_BOXES 0
#endif

namespace {

using namespace tkt;
constexpr int kStages = 4, kRows = 128, kGroups = kRows / 4, kCopies = (kGroups + TKT_LOADERS - 1) / TKT_LOADERS;
using a_tile = st_bf<64, 64>;
using b_tile = st_bf<256, 64>;

struct globals {
    gl<bf16, st_bf<8, 64>> rows;  // (R, K); its box is one row of 64 columns
    const int32_t* index;         // (blocks, 128)
    const char* weights;          // 32 KB a block and step
    int64_t* clocks;              // (blocks, 2): loaders, consumers
    int32_t steps, tile_steps, multiplies, weighs;
};

struct storage {
    struct {
        a_tile a[2];
        b_tile b;
    } stages[kStages];
    semaphore full[kStages], weighed[kStages];
};

}  // namespace

extern "C" __device__ int32_t row_loads_facts[4] = {sizeof(storage), 384, sizeof(globals), 1};

extern "C" __global__ void __launch_bounds__(384, 1) row_loads(const __grid_constant__ globals G) {
    extern __shared__ __align__(1024) char memory[];
    storage& smem = *reinterpret_cast<storage*>(memory);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof smem.stages / 16); i += blockDim.x)
        reinterpret_cast<int4*>(memory)[i] = make_int4(0, 0, 0, 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            init_semaphore(smem.full[s], TKT_LOADERS);
            init_semaphore(smem.weighed[s], 1);
        }
        publish_semaphores();
    }
    fence_async_shared();
    __syncthreads();
    const spin_guard guard{nullptr, nullptr, 2000000, 0};
    const int64_t begin = clock64();
    const int warp = warp_id();
    if (warp < 8) {
        if (!G.multiplies) return;
        rt_fl<16, 256> acc;
        for (int step = 0; step < G.steps; ++step) {
            const auto& from = smem.stages[step % kStages];
            warpgroup::mma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                warpgroup::mma_async_ABt(acc, from.a[warp / 4].address() + 32 * k, from.b.address() + 32 * k,
                                         step > 0 || k > 0);
            warpgroup::mma_commit();
            warpgroup::mma_wait<1>();
        }
        warpgroup::mma_wait<0>();
        warpgroup::pin(acc);
        if (threadIdx.x == 0) G.clocks[2 * blockIdx.x + 1] = clock64() - begin;
        if (acc.v[0][0][0] == 1.5f) G.clocks[2 * blockIdx.x + 1] = 0;
        return;
    }
    const int part = warp - 8;
    if (part >= TKT_LOADERS) return;
    const int32_t* index = G.index + blockIdx.x * kRows;
    const char* data = reinterpret_cast<const char*>(G.rows.data);
    const char* from[kCopies];
    int32_t mine[2];  // boxes: rows of this lane
    for (int step = 0; step < G.steps; ++step) {
        const int stage = step % kStages, lap = step / kStages;
        if (step % G.tile_steps == 0) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int group = min(part + TKT_LOADERS * i, kGroups - 1);
                from[i] = data + static_cast<int64_t>(index[4 * group + lane_id() / 8]) * G.rows.cols * 2 + lane_id() % 8 * 16;
            }
            mine[0] = index[(part * (kRows / TKT_LOADERS) + lane_id()) % kRows];
            mine[1] = index[(part * (kRows / TKT_LOADERS) + 32 + lane_id()) % kRows];
        }
        if (G.weighs && part == 0 && lane_id() == 0) {
            if (lap > 0) wait<wait_role::producer, wait_word::stage_full>(smem.weighed[stage], (lap - 1) & 1, guard);
            tma::expect_bytes(smem.weighed[stage], b_tile::kBytes);
            tma::load_bytes(&smem.stages[stage].b, G.weights + (blockIdx.x % 12 * 64 + step % 64) * 4096,
                            b_tile::kBytes, smem.weighed[stage]);
        }
        __syncwarp();
#if TKT_BOXES
        constexpr int kEach = kRows / TKT_LOADERS;
        if (lap > 0) wait<wait_role::producer, wait_word::stage_full>(smem.full[stage], (lap - 1) & 1, guard);
        const bool elected = elect_lane();
        if (elected) tma::expect_bytes(smem.full[stage], kEach * 128);
        const uint32_t to = smem.stages[stage].a[0].address() + part * kEach * 128;
        const int col = step % G.tile_steps * 64;
#pragma unroll 1
        for (int base = 0; base < kEach; base += 8) {
            int32_t row[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) row[i] = __shfl_sync(0xffffffffu, base < 32 ? mine[0] : mine[1], base % 32 + i);
            if (elected) {
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    tma::detail::load_box<tma::keep::normal>(to + (base + i) * 128, G.rows.maps[0], col, row[i],
                                                             smem.full[stage]);
            }
            __syncwarp();
        }
#else
        const uint32_t to = smem.stages[stage].a[0].address() + a_tile::offset(4 * part + lane_id() / 8, lane_id() % 8 * 8);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            if (kGroups % TKT_LOADERS && part + TKT_LOADERS * i >= kGroups) break;
            cp_async::copy<128>((to ^ (TKT_LOADERS * i % 2 * 64)) + i * TKT_LOADERS * 512, from[i]);
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) from[i] += 128;
        cp_async::commit();
        cp_async::wait<2>();
#endif
    }
    cp_async::wait<0>();
#if TKT_BOXES
    for (int s = 0; s < kStages; ++s) {
        const int last = (G.steps - 1 - s) / kStages;
        wait<wait_role::producer, wait_word::stage_full>(smem.full[s], last & 1, guard);
    }
#endif
    if (G.weighs && part == 0 && lane_id() == 0)
        for (int s = 0; s < kStages; ++s)
            wait<wait_role::producer, wait_word::stage_full>(smem.weighed[s], ((G.steps - 1 - s) / kStages) & 1, guard);
    __syncwarp();
    if (part == 0 && lane_id() == 0) G.clocks[2 * blockIdx.x] = clock64() - begin;
}
