// The GEMM template's contract with its hooks: the gate is asked before a row block's first load and once a task with
// rows; the epilogue is called once a tile, after the whole tile has landed; a gate that says no ends the block.
// Also the two B loads against each other. Prints one line and exits 1 on the first broken promise.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/gemm.hpp"
#include "cpu/machine.hpp"

namespace {

using config = tkt::gemm_config<32, 64, 64, 3, 3, 0>;
using shared = tkt::gemm_shared<config>;

constexpr int PAD = 64, BLOCKS = 5, HIDDEN = 256, COLS = 192, SEATS = 3;
constexpr int REAL[BLOCKS] = {64, 1, 0, 33, 32};
constexpr int TILES = PAD / config::ROW_BLOCK, COL_BLOCKS = COLS / config::COL_BLOCK;

std::atomic<int> gates[BLOCKS], epilogues[BLOCKS][COL_BLOCKS], early{0};
int refused_block = -1;
std::vector<tkt::bf16> rows(BLOCKS* PAD* HIDDEN, 0x3f80), weights(HIDDEN* COLS, 0x3f80), out(BLOCKS* PAD* COLS);

void promise(bool kept, const char* what) {
    if (kept) return;
    printf("broken: %s\n", what);
    exit(1);
}

struct counting_gate {
    bool operator()(int pad_block) const {
        gates[pad_block].fetch_add(1);
        return pad_block != refused_block;
    }
};

// 256 ones times 256 ones is 256 = 0x4380 everywhere: a tile has landed when its real rows hold that. Tiles of one pad
// block and column are told apart by how often the epilogue has come: all are complete when the last one comes.
struct checking_epilogue {
    void operator()(int pad_block, int col) const {
        if (epilogues[pad_block][col].fetch_add(1) != TILES - 1) return;
        for (int r = 0; r < REAL[pad_block]; ++r)
            for (int c = 0; c < config::COL_BLOCK; ++c)
                if (out[(pad_block * PAD + r) * COLS + col * config::COL_BLOCK + c] != 0x4380) early.fetch_add(1);
    }
};

const tkt::Program program = {config::NUM_THREADS, sizeof(shared),
                              [](void* smem) { static_cast<shared*>(smem)->prepare(); },
                              [](tkt::Warp& warp, void* smem) {
                                  tkt::grouped_gemm<config>(warp.launch.G, counting_gate{}, checking_epilogue{}, warp,
                                                            *static_cast<shared*>(smem));
                              }};

void test_loads_agree() {
    constexpr int RED = 64, NCOLS = 128;
    static tkt::st_b<RED, NCOLS> one, two;
    std::vector<tkt::bf16> kn(RED * NCOLS), nk(RED * NCOLS);
    for (int k = 0; k < RED; ++k)
        for (int n = 0; n < NCOLS; ++n) kn[k * NCOLS + n] = nk[n * RED + k] = tkt::bf16(k * NCOLS + n);
    tkt::load_kn(one, kn.data(), NCOLS);
    tkt::load_nk(two, nk.data(), RED);
    promise(!memcmp(one.data, two.data, sizeof one.data), "a B tile is the same from both weight layouts");
}

}  // namespace

int main() {
    test_loads_agree();
    int32_t expert[BLOCKS] = {}, real[BLOCKS], dispensers[4] = {};
    for (int b = 0; b < BLOCKS; ++b) real[b] = REAL[b];
    tkt_globals G{};
    G.world = 1, G.hidden = HIDDEN, G.cols = COLS, G.pad = PAD, G.num_pad_blocks = BLOCKS, G.local_experts = 1;
    G.weights = weights.data(), G.gathered = rows.data(), G.out = out.data();
    G.block_expert = expert, G.block_rows = real, G.dispensers = dispensers;
    G.num_comp_blocks = SEATS, G.backoff = 16;
    tkt::Machine* machine = tkt::Machine::open(program, SEATS, 0);
    promise(machine, "a machine of three seats opens");
    for (int round = 1; round <= 20; ++round) {
        for (auto& block : epilogues)
            for (auto& count : block) count.store(0);
        out.assign(out.size(), 0);
        tkt::Launch launch{G, tkt_machine{SEATS, 2, uint64_t(round), 10000000000, nullptr, nullptr}};
        tkt_result result;
        machine->run(launch, &result);
        promise(result.end == TKT_DONE, "the launch ends");
        for (int b = 0; b < BLOCKS; ++b) {
            const int with_rows = (REAL[b] + config::ROW_BLOCK - 1) / config::ROW_BLOCK;
            promise(gates[b] == round * with_rows * COL_BLOCKS, "the gate is asked once a task that has rows");
            for (auto& count : epilogues[b]) promise(count == TILES, "the epilogue comes once a tile");
        }
        promise(early == 0, "the epilogue comes after the tile has landed");
        for (int b = 0; b < BLOCKS; ++b)
            for (int r = REAL[b]; r < PAD; ++r)
                for (int c = 0; c < COLS; ++c) promise(!out[(b * PAD + r) * COLS + c], "padding is not written");
    }
    refused_block = 3;
    tkt::Launch launch{G, tkt_machine{SEATS, 0, 0, 50000000, nullptr, nullptr}};
    tkt_result result;
    machine->run(launch, &result);
    promise(result.end == TKT_SPIN_LIMIT, "consumers of a producer that left give up");
    refused_block = -1;
    tkt::Launch again{G, tkt_machine{SEATS, 0, 0, 10000000000, nullptr, nullptr}};
    machine->run(again, &result);
    promise(result.end == TKT_DONE, "the machine serves on");
    delete machine;
    printf("kept\n");
}
