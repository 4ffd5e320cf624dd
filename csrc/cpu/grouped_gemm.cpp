// The family grouped_gemm on the CPU backend: every block computes, rows are already in place.
#define TKT_FAMILY "grouped_gemm"
#include "artifact.hpp"

static void kernel(const tkt::globals& G, tkt::Warp& warp, tkt::shared& smem) {
    warp.role = "gemm";
    tkt::grouped_gemm<tkt::config>(G, tkt::no_gate{}, tkt::no_epilogue{}, warp, smem);
}
