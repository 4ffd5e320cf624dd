// The family gemm_combine on the CPU backend: the lowest blocks compute and announce what has landed, the others form
// weighted sums of landed rows; blocks whose tiles run out join them, and the highest ones sum the partial rows.
#include "gemm_combine.hpp"
#define TKT_FAMILY "gemm_combine"
#define TKT_SHARED combine_shared
#include "artifact.hpp"

static void kernel(const tkt::globals& G, tkt::Warp& warp, tkt::shared& smem) {
    const bool computes = warp.block < G.num_comp_blocks;
    if (computes) {
        if (!(G.roles & TKT_COMPUTE)) return;
        warp.role = "gemm";
        if (G.roles & TKT_GATED)
            tkt::grouped_gemm<tkt::config>(G, tkt::no_gate{}, tkt::combine_epilogue<tkt::config>{G}, warp, smem);
        else
            tkt::grouped_gemm<tkt::config>(G, tkt::no_gate{}, tkt::no_epilogue{}, warp, smem);
    }
    if (!(G.roles & TKT_COMMUNICATE)) return;
    warp.role = "combine";
    if (computes) {  // row slots overlay the rings that others of the block may still read
        arrive(smem.left);
        if (!wait(warp, smem.left, 1, "gemm_left", 0)) return;
    }
    if (G.combine->form == TKT_FORM_PULL) {
        tkt::combine_jobs(G, warp, tkt::pull_form<tkt::config>{G});
        return;
    }
    if (!tkt::combine_jobs(G, warp, tkt::push_form<tkt::config>{G, warp, smem})) return;
    if (warp.block < G.num_comp_blocks + G.num_comm_blocks - G.combine->num_reduce_blocks) return;
    warp.role = "reduce";
    tkt::reduce(G, warp);
}
