// Builds the tables of every rank with csrc/comm/plan.cuh, all ranks at once and plan after plan, each rank starting
// the next plan as soon as it is done with the last.
//
//   main IN OUT     IN: world, tokens, top_k, experts, pad, capacity, id_bytes, blocks, plans, seed, own_in_place, whether
//                   rows are pushed, a rank that is slow or -1, how patient waits of the first plan
//                   are (0: as long as it takes); then the ids [plan][rank][token][x]. OUT: [plan][rank] tables as `outcome` lists them. All int32.
#include "comm/push_plan.cuh"

namespace {

int32_t head[14];
int world, tokens, top_k, experts, pad, capacity, id_bytes, blocks, plans;
std::vector<int32_t> given;

struct rank_memory {
    tkt::plan_globals G{};
    std::vector<char> region, ids;
    std::vector<int32_t> counted, tables;
    std::vector<std::vector<int32_t>> shared;
    int32_t status[2] = {0, 0};
    uint64_t state[2] = {0, 0};
    lanes::meeting end;
    std::vector<int32_t> said;
};
std::vector<rank_memory> ranks;

// One array after another in `tables`, 8 words that nobody may write between them.
struct carver {
    std::vector<int32_t>& words;
    int at = 0;
    template <typename T>
    void take(T*& pointer, int count, bool second_pass) {
        if (second_pass) pointer = reinterpret_cast<T*>(words.data() + at);
        at += count + 8;
    }
};

int carve(rank_memory& r, bool second_pass) {
    carver c{r.tables};
    const int local = experts / world, pad_blocks = capacity / pad, all = world * tokens;
    tkt::plan_globals& G = r.G;
    c.take(G.words, 3, second_pass);
    c.take(G.counts, local, second_pass);
    c.take(G.base, local, second_pass);
    c.take(G.walk, 4 * local, second_pass);
    c.take(G.pull_indices, 2 * capacity, second_pass);
    c.take(G.block_expert, pad_blocks, second_pass);
    c.take(G.slack, pad_blocks, second_pass);
    c.take(G.own_slack, pad_blocks, second_pass);
    c.take(G.arrivals, pad_blocks, second_pass);
    c.take(G.slots, all * top_k, second_pass);
    c.take(G.pull_tokens, 2 * all, second_pass);
    c.take(G.pull_slots, all * top_k, second_pass);
    c.take(G.job_order, all, second_pass);
    c.take(G.queue, 3, second_pass);
    c.take(G.dispenser, 2, second_pass);
    if (head[11]) {
        const int counters = (world - 1) * pad_blocks;
        c.take(G.push_plan, world + 2, second_pass);
        c.take(G.push_tokens, all, second_pass);
        c.take(G.push_blocks, all * top_k, second_pass);
        c.take(G.push_expected, counters, second_pass);
        c.take(G.missing, counters, second_pass);
        c.take(G.gate_sources, pad_blocks, second_pass);
    }
    return c.at;
}

constexpr int32_t kUntouched = -77;

void give_ids(int rank, int plan) {
    rank_memory& r = ranks[rank];
    const size_t count = static_cast<size_t>(tokens) * top_k;
    const int32_t* from = given.data() + (static_cast<size_t>(plan) * world + rank) * count;
    for (size_t i = 0; i < count; ++i) {
        if (id_bytes == 8) reinterpret_cast<int64_t*>(r.ids.data())[i] = from[i];
        if (id_bytes == 4) reinterpret_cast<int32_t*>(r.ids.data())[i] = from[i];
    }
}

}  // namespace

namespace lanes {
void body() {
    rank_memory& r = ranks[now->rank];
    for (int plan = 0; plan < plans; ++plan) {
        tkt::push_plan_builder(r.G, r.shared[blockIdx.x].data()).run();
        if (r.end.arrived == r.end.size - 1) {  // the launch ends with its last thread
            r.said.insert(r.said.end(), r.status, r.status + 2);
            r.said.insert(r.said.end(), r.tables.begin(), r.tables.end());
            r.status[0] = r.status[1] = 0;
            std::fill(r.tables.begin(), r.tables.end(), kUntouched);
            for (auto& memory : r.shared) std::fill(memory.begin(), memory.end(), kUntouched);
            if (plan + 1 < plans) give_ids(now->rank, plan + 1);
            r.G.guard.patience = 0;
            if (r.state[0] != static_cast<uint64_t>(plan) + 1) fail("the count of plans is wrong");
        }
        meet(r.end);
    }
}
}  // namespace lanes

int main(int, char** arguments) {
    FILE* in = std::fopen(arguments[1], "rb");
    if (!in || std::fread(head, 4, 14, in) != 14) return 2;
    world = head[0], tokens = head[1], top_k = head[2], experts = head[3], pad = head[4], capacity = head[5];
    id_bytes = head[6], blocks = head[7], plans = head[8];
    given.resize(static_cast<size_t>(plans) * world * tokens * top_k);
    if (std::fread(given.data(), 4, given.size(), in) != given.size()) return 2;
    std::fclose(in);

    const int local = experts / world;
    ranks.resize(world);
    for (int rank = 0; rank < world; ++rank) {
        rank_memory& r = ranks[rank];
        const size_t ids_bytes = (8ull * world * tokens * top_k + 15) / 16 * 16;
        const size_t row = (experts + tkt::kCountQuad - 1) / tkt::kCountQuad * tkt::kCountQuad;
        r.region.resize(tkt::plan_region::kIds + ids_bytes + (head[11] ? 8 * world * blocks * row : 0));
        r.ids.resize(8ull * tokens * top_k);
        r.counted.assign(static_cast<size_t>(blocks) * experts * (tkt::kKinds + (head[11] ? 1 : 0)), kUntouched);
        r.tables.assign(carve(r, false), kUntouched);
        r.shared.assign(blocks, std::vector<int32_t>(tkt::plan_shared_words(world, local), kUntouched));
        r.end.size = blocks * tkt::kPlanThreads;
        give_ids(rank, 0);
    }
    for (int rank = 0; rank < world; ++rank) {
        rank_memory& r = ranks[rank];
        carve(r, true);
        for (int peer = 0; peer < world; ++peer) r.G.region[peer] = ranks[peer].region.data();
        r.G.ids = r.ids.data();
        r.G.state = r.state;
        r.G.counted = r.counted.data();
        r.G.status = r.status;
        r.G.guard.rank = rank;
        r.G.guard.patience = head[13];
        r.G.world = world, r.G.tokens = tokens, r.G.top_k = top_k, r.G.experts = experts, r.G.pad = pad;
        r.G.capacity = capacity, r.G.id_bytes = id_bytes, r.G.never_last = 1 << 20, r.G.own_in_place = head[10];
    }

    lanes::chance.seed(head[9]);
    lanes::slow = head[12];
    lanes::launch(world, blocks, tkt::kPlanThreads);
    return lanes::write(arguments[2], ranks, plans);
}
