// The grouped GEMM with hooks that write down when each tile's first load may be issued and when its output is there.
// For looking at how blocks share the work; the entry is one more argument block than the family's.
#include "../../csrc/gemm/build_config.cuh"
#include "../../csrc/gemm/grouped_gemm.cuh"

using config = tkt::build_config;

namespace {

constexpr int kMost = 256;  // events of a block and kind

struct timeline_globals {
    tkt::gemm_globals<config> gemm;
    int64_t* events;  // (2, blocks, kMost) nanoseconds of the global timer: gates, then announcements
    int32_t* counts;  // (2, blocks)
    int32_t stride;   // place of a block among the units: block · stride modulo the grid; 1 as it is
    int32_t unused;
};

TKT_DEVICE int64_t nanoseconds() {
    int64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

struct log {
    const timeline_globals& G;
    int kind;
    mutable int written = 0;
    TKT_DEVICE void put() const {
        const int place = kind * gridDim.x + blockIdx.x;
        if (written < kMost) G.events[place * kMost + written] = nanoseconds();
        G.counts[place] = ++written;
    }
};
struct logging_gate : log {
    TKT_DEVICE void operator()(int) const { put(); }
};
struct logging_epilogue : log {
    TKT_DEVICE void operator()(int, int) const { put(); }
};

}  // namespace

extern "C" __device__ int32_t tktune_grouped_gemm_facts[4] = {
    sizeof(tkt::shared_storage<config>), tkt::geometry<config>::kThreads, sizeof(tkt::gemm_globals<config>),
    config::CLUSTER};

extern "C" __global__ void __launch_bounds__(tkt::geometry<config>::kThreads, 1)
    tktune_timeline(const __grid_constant__ timeline_globals G) {
    tkt::grouped_gemm<config>(G.gemm, logging_gate{{G, 0}}, logging_epilogue{{G, 1}},
                              blockIdx.x * G.stride % gridDim.x, gridDim.x);
}
