// The GEMM template alone with rows by index: what the indexed loader costs when every row is there. Not a family.
//
// Entry tktune_grouped_gemm, argument by value: gemm_globals (`activations`: all rows, (rows, K)), then the address of
// the table slot -> row. Launch and defines: csrc/kernels/grouped_gemm.cu.
#include "../../csrc/gemm/build_config.cuh"
#include "../../csrc/gemm/grouped_gemm.cuh"

using config = tkt::build_config;

struct probe_globals {
    tkt::gemm_globals<config> gemm;
    const int32_t* rows;
};

extern "C" __device__ int32_t tktune_grouped_gemm_facts[4] = {
    sizeof(tkt::shared_storage<config>), tkt::geometry<config>::kThreads, sizeof(tkt::gemm_globals<config>),
    config::CLUSTER};

extern "C" __global__ void __launch_bounds__(tkt::geometry<config>::kThreads, 1)
    tktune_grouped_gemm(const __grid_constant__ probe_globals P) {
    tkt::grouped_gemm<config>(P.gemm, tkt::table_gate{P.rows}, tkt::no_epilogue{}, blockIdx.x, gridDim.x);
}
