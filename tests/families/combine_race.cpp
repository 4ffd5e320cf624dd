// Two ranks as two threads, each with its own machine, combining what their GEMMs leave in both forms: what the thread
// sanitizer watches. The artifact's own exports serve rank 0; rank 1 has a machine beside them.
#include <cstdio>
#include <vector>

#include "cpu/gemm_combine.cpp"

namespace {

// One expert a rank; every token picks both, so that each rank holds a row of all tokens: its own first.
constexpr int WORLD = 2, TOKENS = 24, HIDDEN = 64, COLS = 64, PAD = 32, ROWS = WORLD * TOKENS, BLOCKS = 2;
constexpr int GROUPS = 2, STRIDE = BLOCKS * GROUPS, COUNTERS = tkt::FINISHED + STRIDE;
static_assert(TKT_WORLD == WORLD && ROWS <= BLOCKS * PAD);

struct Rank {
    std::vector<uint16_t> gathered, weights, rows, staging, y;
    std::vector<int32_t> pull_tokens, pull_slots, block_expert, block_rows, dispensers, counters;
    std::vector<int32_t> push_expected, final_contrib, owners, owner_slots, push_jobs, pull_jobs;
    std::vector<float> topk_weights;
    std::vector<uint64_t> watermarks, landed;
    uint64_t barrier[WORLD] = {};
    tkt_spin_report report{};
    tkt_combine C{};
    tkt_globals G{};

    explicit Rank(int rank)
        : gathered(BLOCKS * PAD * HIDDEN, 0x3f80), weights(HIDDEN * COLS, rank ? 0x4000 : 0x3f80),
          rows(BLOCKS * PAD * COLS), staging(WORLD * TOKENS * COLS), y(TOKENS * COLS), block_expert(BLOCKS, 0),
          block_rows{PAD, ROWS - PAD}, dispensers(4), counters(COUNTERS), push_expected(WORLD, TOKENS),
          final_contrib(TOKENS * WORLD, 1), topk_weights(WORLD * TOKENS * WORLD, 0.5f), watermarks(WORLD),
          landed(WORLD * STRIDE) {
        for (int place = 0; place < ROWS; ++place) {
            pull_tokens.insert(pull_tokens.end(), {(rank + place / TOKENS) % WORLD, place % TOKENS});
            for (int x = 0; x < WORLD; ++x) pull_slots.push_back(x == rank ? place : -1);
            for (int group = 0; group < GROUPS; ++group) push_jobs.push_back(place * GROUPS + group);
        }
        for (int token = 0; token < TOKENS; ++token)
            for (int x = 0; x < WORLD; ++x) {
                owners.push_back(x);
                owner_slots.push_back((rank - x + WORLD) % WORLD * TOKENS + token);
                pull_jobs.push_back(token * GROUPS + x);
            }
        G.rank = rank, G.world = WORLD, G.hidden = HIDDEN, G.cols = COLS, G.tokens = TOKENS, G.top_k = WORLD;
        G.local_experts = 1, G.pad = PAD, G.num_pad_blocks = BLOCKS;
        G.weights = weights.data(), G.gathered = gathered.data(), G.out = rows.data();
        G.pull_tokens = pull_tokens.data(), G.pull_slots = pull_slots.data(), G.num_pull_tokens = ROWS;
        G.block_expert = block_expert.data(), G.block_rows = block_rows.data(), G.dispensers = dispensers.data();
        G.num_comp_blocks = 2, G.num_comm_blocks = 1, G.backoff = 16, G.combine = &C;
        C.bytes = sizeof C, C.signal_groups = GROUPS, C.rows_in_flight = 2, C.num_reduce_blocks = 1;
        C.topk_weights = topk_weights.data(), C.push_expected = push_expected.data();
        C.final_contrib = final_contrib.data(), C.owners = owners.data(), C.owner_slots = owner_slots.data();
        C.y = y.data(), C.counters = counters.data(), C.num_counters = COUNTERS, C.landed_stride = STRIDE;
    }
};

Rank* ranks[WORLD];

void* run(void* argument) {
    Rank& mine = *static_cast<Rank*>(argument);
    tkt::Machine* beside = mine.G.rank ? tkt::Machine::open(program, 3, 1) : nullptr;
    const tkt_machine machine{3, 2, 1, 20000000000, nullptr, &mine.report};
    long bad = 0;
    for (int round = 1; round <= 30; ++round) {
        const bool pull = round % 3 == 0;
        for (uint16_t& value : mine.gathered) value = round % 2 ? 0x3f80 : 0x4000;
        mine.C.form = pull ? TKT_FORM_PULL : TKT_FORM_PREREDUCE;
        mine.C.jobs = pull ? mine.pull_jobs.data() : mine.push_jobs.data();
        mine.C.num_jobs = int(pull ? mine.pull_jobs.size() : mine.push_jobs.size());
        mine.C.epoch = mine.G.start_sequence = 2 * round;
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
        for (uint16_t value : mine.y) bad += value != (round % 2 ? 0x42c0 : 0x4340);  // half of 64 + 128: 96; or 192
        for (uint16_t& value : mine.y) value = 0;
    }
    delete beside;
    return reinterpret_cast<void*>(bad);
}

}  // namespace

int main() {
    for (int r = 0; r < WORLD; ++r) ranks[r] = new Rank(r);
    pthread_t threads[WORLD];
    for (Rank* rank : ranks)
        for (int r = 0; r < WORLD; ++r) {
            rank->G.barrier[r] = ranks[r]->barrier;
            rank->C.rows[r] = ranks[r]->rows.data(), rank->C.staging[r] = ranks[r]->staging.data();
            rank->C.watermarks[r] = ranks[r]->watermarks.data(), rank->C.landed[r] = ranks[r]->landed.data();
        }
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
