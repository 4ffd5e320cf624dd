// The family dispatch_gemm on the CPU backend: the lowest blocks compute, the others pull rows from peers and then
// join the GEMM. Where silu(gate) · up is separate, a second launch of the role `finish` makes it.
#define TKT_FAMILY "dispatch_gemm"
#include "artifact.hpp"
#include "dispatch.hpp"

static void kernel(const tkt::globals& G, tkt::Warp& warp, tkt::shared& smem) {
    if (G.roles & TKT_FINISH) {
        warp.role = "finish";
        tkt::glu_pass(G, warp);
        return;
    }
    if (warp.block >= G.num_comp_blocks && (G.roles & TKT_COMMUNICATE)) {
        warp.role = "dispatch";
        tkt::dispatch(G, warp);
    }
    if (!(G.roles & TKT_COMPUTE)) return;
    warp.role = "gemm";
    if (G.roles & TKT_GATED)
        tkt::grouped_gemm<tkt::config>(G, tkt::dispatch_gate{G, warp}, tkt::no_epilogue{}, warp, smem);
    else
        tkt::grouped_gemm<tkt::config>(G, tkt::no_gate{}, tkt::no_epilogue{}, warp, smem);
}
