// A kernel that waits for a word nobody writes, with the tile layer's bounded spin: what the abort word and the
// spin limit are tried on.
#include "tile/tile.cuh"

namespace {

struct globals {
    const volatile int32_t* word;
    tkt::spin_guard guard;
    int32_t wanted;
};

}  // namespace

extern "C" __device__ int32_t tktune_waiting_facts[4] = {0, 32, sizeof(globals), 1};

extern "C" __global__ void __launch_bounds__(32, 1) tktune_waiting(const __grid_constant__ globals G) {
    if (threadIdx.x != 0) return;
    tkt::spin_until<tkt::wait_role::gate, tkt::wait_word::arrivals, 100>(
        G.guard, 7, G.wanted, [&] { return *G.word >= G.wanted; }, [&] { return static_cast<int64_t>(*G.word); });
}
