// A small fusion on one GPU that tests the two hooks: communication blocks deliver activations late and in another
// order than they are needed, and read outputs as soon as the epilogue has announced them. Not a family.
#include "../../csrc/gemm/build_config.cuh"
#include "../../csrc/gemm/grouped_gemm.cuh"

using config = tkt::build_config;

namespace {

struct probe_globals {
    tkt::gemm_globals<config> gemm;
    const uint4* source;        // (pad blocks · pad, K) bf16: what the activations should become
    uint4* activations;         // the GEMM's input, poisoned before the launch
    const uint4* outputs;
    uint4* outputs_seen;        // what a reader saw right after the announcement
    int32_t* arrivals;          // (pad blocks)
    int32_t* gate_calls;        // (pad blocks)
    int32_t* announced;         // (pad blocks)
    const int32_t* expected;    // (pad blocks): announcements that each will get
    int32_t num_pad_blocks;
    int32_t num_comp_blocks;
    int32_t withheld;           // a pad block that is never delivered, or -1
    int32_t delay_ns;
};

TKT_DEVICE int32_t load_acquire(const int32_t* word) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
TKT_DEVICE void add_release(int32_t* word) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(word) : "memory");
}

struct arrival_gate {
    const probe_globals& P;
    TKT_DEVICE void operator()(int pad_block) const {
        atomicAdd(P.gate_calls + pad_block, 1);
        auto ready = [&] { return load_acquire(P.arrivals + pad_block) > 0; };
        tkt::spin_until<tkt::wait_role::gate, tkt::wait_word::arrivals, 32>(P.gemm.guard, pad_block, 1, ready,
                                                                            [] { return 0; });
        tkt::fence_async();
    }
};

struct announcing_epilogue {
    const probe_globals& P;
    TKT_DEVICE void operator()(int pad_block, int) const { add_release(P.announced + pad_block); }
};

TKT_DEVICE void copy_rows(uint4* to, const uint4* from, int pad_block, int pad, int cols) {
    const int64_t first = static_cast<int64_t>(pad_block) * pad * cols / 8, count = static_cast<int64_t>(pad) * cols / 8;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[first + i] = __ldcg(from + first + i);
}

TKT_DEVICE void communicate(const probe_globals& P, int index, int num_blocks) {
    const int pad = P.gemm.pad;
    for (int turn = index; turn < P.num_pad_blocks; turn += num_blocks) {
        const int block = P.num_pad_blocks - 1 - turn;
        if (block == P.withheld) continue;
        __nanosleep(P.delay_ns);
        copy_rows(P.activations, P.source, block, pad, P.gemm.reduction);
        __threadfence();
        __syncthreads();  // the whole block is this role
        if (threadIdx.x == 0) add_release(P.arrivals + block);
    }
    for (int block = index; block < P.num_pad_blocks; block += num_blocks) {
        auto ready = [&] { return load_acquire(P.announced + block) >= P.expected[block]; };
        tkt::spin_until<tkt::wait_role::communicate, tkt::wait_word::signal, 64>(
            P.gemm.guard, block, P.expected[block], ready, [&] { return load_acquire(P.announced + block); });
        copy_rows(P.outputs_seen, P.outputs, block, pad, P.gemm.cols);
    }
}

}  // namespace

extern "C" __device__ int32_t tktune_grouped_gemm_facts[4] = {
    sizeof(tkt::shared_storage<config>), tkt::geometry<config>::kThreads, sizeof(tkt::gemm_globals<config>),
    config::CLUSTER};

extern "C" __global__ void __launch_bounds__(tkt::geometry<config>::kThreads, 1)
#if TKT_CLUSTER > 1
    __cluster_dims__(TKT_CLUSTER, 1, 1)
#endif
        tktune_hook_probe(const __grid_constant__ probe_globals P) {
    if (static_cast<int>(blockIdx.x) < P.num_comp_blocks)
        tkt::grouped_gemm<config>(P.gemm, arrival_gate{P}, announcing_epilogue{P}, blockIdx.x / TKT_CLUSTER,
                                  P.num_comp_blocks / TKT_CLUSTER);
    else
        communicate(P, blockIdx.x - P.num_comp_blocks, gridDim.x - P.num_comp_blocks);
}
