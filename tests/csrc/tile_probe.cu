// Uses what the GEMM does not: shared vectors, 1-D bulk copies, peers' views, collective stores. Only compiled.
#include "../../csrc/tile/tile.cuh"

namespace {

constexpr int kLength = 4096, kWorld = 2;

struct globals {
    tkt::pgl<tkt::gl<tkt::bf16>, kWorld> tokens;
    tkt::gl<tkt::bf16> gathered;
    tkt::spin_guard guard;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1) tile_probe(const __grid_constant__ globals G, int peer) {
    __shared__ tkt::sv_bf<kLength> row;
    __shared__ tkt::semaphore arrived;
    if (threadIdx.x == 0) {
        tkt::init_semaphore(arrived, 1);
        tkt::publish_semaphores();
        tkt::tma::expect_bytes(arrived, row.kBytes);
        tkt::tma::load_bytes(&row, G.tokens[peer].at(blockIdx.x, 0), row.kBytes, arrived);
        tkt::wait<tkt::wait_role::communicate, tkt::wait_word::signal>(arrived, 0, G.guard);
        tkt::tma::store_bytes(G.gathered.at(blockIdx.x, 0), &row, row.kBytes);
        tkt::tma::commit();
        tkt::tma::store_async_wait<0>();
    }
    tkt::barrier_registry<8>::consumers::sync();
    tkt::rt_fl<16, 64> tile;
    tkt::warp::zero(tile);
    tkt::group<8>::store(G.gathered, tile, {static_cast<int>(blockIdx.x) * 128, 0});
}
