// What the mma.sync main loop can hope for: clocks of m16n8k16 products alone, of ldmatrix alone, and of both in the
// ratio of a 64 × 64 and of a 64 × 32 warp tile, with as many warps an SM as the launch has. Measures, computes nothing.
#include "../../csrc/tile/tile.cuh"

namespace {

constexpr int kRounds = 512;

// A slice of a warp tile of 64 × 16 · CHUNKS: the products of `products`, the fragments of `fetches`.
template <int CHUNKS, bool PRODUCTS, bool FETCHES>
__device__ void run(int64_t* clocks, float* sink) {
    __shared__ tkt::st_bf<64, 64> tile;
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) tile.values[i].bits = 0x3c00 + i % 97 + 128 * (i % 2);
    __syncthreads();
    tkt::rt_fl<64, 16 * CHUNKS> acc;
    tkt::warp::zero(acc);
    tkt::rt_bf<64, 16> a[2];
    tkt::rt_bf<16, 16> b[2][CHUNKS];
    auto fetch = [&](int at) {
#pragma unroll
        for (int strip = 0; strip < 4; ++strip) tkt::warp::load_strip(a[at], strip, tile, 16 * strip, 16 * at);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            tkt::warp::load_right(b[at][chunk], tile, 16 * chunk, 16 * at + 32);
    };
    fetch(0);
    fetch(1);
    __syncthreads();
    const int64_t start = clock64();
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
        for (int at = 0; at < 2; ++at) {
            if (FETCHES) fetch(1 - at);
            if (PRODUCTS) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) tkt::warp::mma(acc, a[at], b[at][chunk], 16 * chunk);
            }
        }
    }
    float sum = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 2 * CHUNKS; ++c) sum += acc.v[r][c][0] + acc.v[r][c][3];
    // Every fragment is used, else its fetch would be left out.
#pragma unroll
    for (int at = 0; at < 2; ++at)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int strip = 0; strip < 4; ++strip) sum += a[at].v[strip][0][i];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) sum += b[at][chunk].v[0][0][i];
        }
    const int64_t end = clock64();
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = end - start;
    if (sum == 1.25f) *sink = sum;
}

}  // namespace

#define PIPES(NAME, CHUNKS, PRODUCTS, FETCHES)                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME(int64_t* clocks, float* sink) { \
        run<CHUNKS, PRODUCTS, FETCHES>(clocks, sink);                                       \
    }
PIPES(products_64, 4, true, false)
PIPES(fetches_64, 4, false, true)
PIPES(both_64, 4, true, true)
PIPES(both_48, 3, true, true)
PIPES(both_32, 2, true, true)
