// Tensor and bulk copies through a peer's memory: a matrix is brought from the peer and pushed to it, once through TMA
// descriptors of its memory and once as 1-D bulk rows.
#include "tile/tile.cuh"

namespace {

using tile = tkt::st_bf<64, 64>;
using matrix = tkt::gl<tkt::bf16, tile>;

struct globals {
    matrix own, peer;                // the source matrices
    matrix brought, pushed;          // own and the peer's: where this rank's tensor copies go
    char* bulk_brought;              // own
    char* bulk_pushed;               // the peer's
    tkt::spin_guard guard;
};

}  // namespace

extern "C" __device__ int32_t tktune_dispatch_p2p_facts[4] = {2 * sizeof(tile) + 16384 + 1024, 32, sizeof(globals), 1};

extern "C" __global__ void __launch_bounds__(32, 1) tktune_dispatch_p2p(const __grid_constant__ globals G) {
    extern __shared__ __align__(1024) char shared_memory[];
    tile& buffer = *reinterpret_cast<tile*>(shared_memory);
    char* row = shared_memory + 2 * sizeof(tile);
    tkt::semaphore& landed = *reinterpret_cast<tkt::semaphore*>(shared_memory + 2 * sizeof(tile) + 16384);
    if (threadIdx.x != 0) return;
    tkt::init_semaphore(landed, 1);
    tkt::publish_semaphores();
    uint32_t phase = 0;
    const auto wait_landed = [&] {
        tkt::wait<tkt::wait_role::communicate, tkt::wait_word::stage_full>(landed, phase, G.guard);
        phase ^= 1;
    };
#pragma unroll 1
    for (int way = 0; way < 2; ++way)
#pragma unroll 1
        for (int r = 0; r < G.own.rows; r += 64)
#pragma unroll 1
            for (int c = 0; c < G.own.cols; c += 64) {
                tkt::tma::expect_bytes(landed, tile::kBytes);
                tkt::tma::load_async(buffer, way ? G.own : G.peer, {r, c}, landed);
                wait_landed();
                tkt::tma::store_async(way ? G.pushed : G.brought, buffer, {r, c});
                tkt::tma::commit();
                tkt::tma::store_async_wait<0>();
            }
    const uint32_t bytes = G.own.cols * 2;
#pragma unroll 1
    for (int way = 0; way < 2; ++way)
#pragma unroll 1
        for (int r = 0; r < G.own.rows; ++r) {
            const int64_t at = static_cast<int64_t>(r) * bytes;
            tkt::tma::expect_bytes(landed, bytes);
            tkt::tma::load_bytes(row, reinterpret_cast<const char*>((way ? G.own : G.peer).data) + at, bytes, landed);
            wait_landed();
            tkt::tma::store_bytes((way ? G.bulk_pushed : G.bulk_brought) + at, row, bytes);
            tkt::tma::commit();
            tkt::tma::store_async_wait<0>();
        }
}
