// Two ranks as two threads, each with its own machine, meeting at start barriers and running every mode: what the
// thread sanitizer watches. The artifact's own exports serve rank 0; rank 1 has a machine beside them.
#include <cstdio>
#include <vector>

#include "cpu/dispatch_gemm.cpp"

namespace {

constexpr int WORLD = 2, TOKENS = 24, HIDDEN = 64, COLS = 64, PAD = 32, BLOCKS = 2;
static_assert(TKT_WORLD == WORLD);

// Both ranks want every token once, so that each has two pad blocks: 24 real rows, of each source.
struct Rank {
    std::vector<uint16_t> x, weights, gathered, out;
    std::vector<int32_t> pull_indices, pull_tokens, pull_slots, block_expert, block_rows, arrivals, dispensers;
    uint64_t barrier[WORLD] = {};
    tkt_spin_report report{};
    tkt_globals G{};

    explicit Rank(int rank)
        : x(TOKENS * HIDDEN, 0x3f80), weights(HIDDEN * COLS, 0x3f80), gathered(BLOCKS * PAD * HIDDEN),
          out(BLOCKS * PAD * COLS), block_expert(BLOCKS, 0), block_rows(BLOCKS, TOKENS),
          arrivals(BLOCKS, PAD - TOKENS), dispensers(4) {
        for (int block = 0; block < BLOCKS; ++block)
            for (int row = 0; row < PAD; ++row) {
                const bool real = row < TOKENS;
                pull_indices.insert(pull_indices.end(), {real ? (rank + block) % WORLD : -1, real ? row : -1});
                if (!real) continue;
                pull_tokens.insert(pull_tokens.end(), {(rank + block) % WORLD, row});
                pull_slots.push_back(block * PAD + row);
            }
        G.rank = rank, G.world = WORLD, G.hidden = HIDDEN, G.cols = COLS, G.tokens = TOKENS, G.top_k = 1;
        G.local_experts = 1, G.pad = PAD, G.num_pad_blocks = BLOCKS;
        G.weights = weights.data(), G.gathered = gathered.data(), G.out = out.data();
        G.pull_indices = pull_indices.data(), G.pull_tokens = pull_tokens.data(), G.pull_slots = pull_slots.data();
        G.num_pull_tokens = int32_t(pull_slots.size());
        G.block_expert = block_expert.data(), G.block_rows = block_rows.data();
        G.arrivals = arrivals.data(), G.dispensers = dispensers.data();
        G.num_comp_blocks = 1, G.num_comm_blocks = 1, G.backoff = 16;
    }
};

Rank* ranks[WORLD];

void* run(void* argument) {
    Rank& mine = *static_cast<Rank*>(argument);
    tkt::Machine* beside = mine.G.rank ? tkt::Machine::open(program, 2, 1) : nullptr;
    const tkt_machine machine{2, 2, 1, 20000000000, nullptr, &mine.report};
    long bad = 0;
    for (int round = 1; round <= 30; ++round) {
        for (int token = 0; token < TOKENS * HIDDEN; ++token) mine.x[token] = round % 2 ? 0x3f80 : 0x4000;
        mine.G.start_sequence = 2 * round, mine.G.order = round % 3 % 2;
        mine.G.roles = TKT_COMMUNICATE | TKT_COMPUTE | TKT_GATED;
        tkt_result result{};
        if (beside) {
            tkt::Launch launch{mine.G, machine};
            bad += !tkt::device_barrier({launch, -1, -1, "host"}, mine.G.start_sequence);
            beside->run(launch, &result);
        } else {
            tkt_launch(&mine.G, &machine, &result);
        }
        bad += result.end != TKT_DONE;
        for (int block = 0; block < BLOCKS; ++block)
            for (int i = 0; i < TOKENS * COLS; ++i)
                bad += mine.out[block * PAD * COLS + i] != (round % 2 ? 0x4280 : 0x4300);  // 64 or 128
        bad += tkt_barrier(&mine.G, &machine, 2 * round + 1) != TKT_DONE;  // readers are done with x
    }
    delete beside;
    return reinterpret_cast<void*>(bad);
}

}  // namespace

int main() {
    for (int r = 0; r < WORLD; ++r) ranks[r] = new Rank(r);
    pthread_t threads[WORLD];
    for (Rank* rank : ranks)
        for (int r = 0; r < WORLD; ++r) rank->G.x[r] = ranks[r]->x.data(), rank->G.barrier[r] = ranks[r]->barrier;
    for (int r = 0; r < WORLD; ++r) pthread_create(&threads[r], nullptr, run, ranks[r]);
    long bad = 0;
    for (pthread_t thread : threads) {
        void* found;
        pthread_join(thread, &found);
        bad += reinterpret_cast<long>(found);
    }
    tkt_close();
    for (Rank* rank : ranks) delete rank;
    printf(bad ? "wrong: %ld\n" : "right\n", bad);
    return bad != 0;
}
