// Builds the combine tables of every rank with csrc/comm/combine_plan.cuh, all ranks at once and plan after plan, each
// rank starting the next plan as soon as it is done with the last, over schedules from a file.
//
//   main IN OUT     IN: the head below; then for each [plan][rank] a schedule: words, counts, base, slots, pull tokens,
//                   pull slots, job order (whole arrays), weights. OUT: [plan][rank] tables in the order of `carve`.
#include "comm/blocks.cuh"
#include "comm/combine_plan.cuh"

namespace {

int32_t head[13];
int world, tokens, top_k, local, pad, form, own_last, groups, passes, group_tiles, blocks, plans;

struct schedule {
    std::vector<int32_t> words, counts, base, slots, pull_tokens, pull_slots, job_order, weights;
};
struct rank_memory {
    tkt::combine_plan_globals G{};
    std::vector<char> region;
    std::vector<schedule> given;
    std::vector<int32_t> tables, said;
    std::vector<std::vector<int32_t>> shared;
    uint64_t state[2] = {0, 0};
    lanes::meeting end;
};
std::vector<rank_memory> ranks;

constexpr int32_t kUntouched = -77;

// One array after another in `tables`, 8 words that nobody may write between them.
int carve(rank_memory& r) {
    int at = 0;
    auto take = [&](auto*& pointer, int count) {
        if (!r.tables.empty()) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(r.tables.data() + at);
        at += count + 8;
    };
    tkt::combine_plan_globals& G = r.G;
    take(G.plan, 2), take(G.experts, 2 * local), take(G.walk, 4 * passes * local);
    take(G.jobs, world * tokens * groups), take(G.push_expected, world), take(G.recv_from, world);
    take(G.final_contrib, tokens * world), take(G.owners, tokens * top_k), take(G.owner_slots, tokens * top_k);
    take(G.everyones, world * tokens * top_k);
    return at;
}

void give(rank_memory& r, int plan) {
    const schedule& s = r.given[plan];
    tkt::combine_plan_globals& G = r.G;
    G.words = s.words.data(), G.counts = s.counts.data(), G.base = s.base.data(), G.slots = s.slots.data();
    G.pull_tokens = reinterpret_cast<const int2*>(s.pull_tokens.data()), G.pull_slots = s.pull_slots.data();
    G.job_order = s.job_order.data(), G.topk_weights = reinterpret_cast<const float*>(s.weights.data());
}

void read(std::FILE* in, std::vector<int32_t>& to, size_t count) {
    to.resize(count);
    if (count && std::fread(to.data(), 4, count, in) != count) lanes::fail("a short file");
}

}  // namespace

namespace lanes {
void body() {
    rank_memory& r = ranks[now->rank];
    for (int plan = 0; plan < plans; ++plan) {
        tkt::combine_planner(r.G, r.shared[blockIdx.x].data()).run();
        if (r.end.arrived == r.end.size - 1) {  // the launch ends with its last thread
            r.said.insert(r.said.end(), r.tables.begin(), r.tables.end());
            std::fill(r.tables.begin(), r.tables.end(), kUntouched);
            for (auto& memory : r.shared) std::fill(memory.begin(), memory.end(), kUntouched);
            if (plan + 1 < plans) give(r, plan + 1);
            if (r.state[0] != static_cast<uint64_t>(plan) + 1) fail("the count of plans is wrong");
        }
        meet(r.end);
    }
}
}  // namespace lanes

int main(int, char** arguments) {
    std::FILE* in = std::fopen(arguments[1], "rb");
    if (!in || std::fread(head, 4, 13, in) != 13) return 2;
    world = head[0], tokens = head[1], top_k = head[2], local = head[3], pad = head[4], form = head[5], own_last = head[6];
    groups = head[7], passes = head[8], group_tiles = head[9], blocks = head[10], plans = head[11];
    const size_t all = static_cast<size_t>(world) * tokens;
    ranks.resize(world);
    for (rank_memory& r : ranks) r.given.resize(plans);
    for (int plan = 0; plan < plans; ++plan)
        for (rank_memory& r : ranks) {
            schedule& s = r.given[plan];
            read(in, s.words, 3), read(in, s.counts, local), read(in, s.base, local), read(in, s.slots, all * top_k);
            read(in, s.pull_tokens, 2 * all), read(in, s.pull_slots, all * top_k), read(in, s.job_order, all);
            read(in, s.weights, static_cast<size_t>(tokens) * top_k);
        }
    std::fclose(in);

    for (int rank = 0; rank < world; ++rank) {
        rank_memory& r = ranks[rank];
        r.region.resize(tkt::combine_region::kPlanes + 16 * all * top_k);
        r.tables.assign(carve(r), kUntouched);
        r.shared.assign(blocks, std::vector<int32_t>(tkt::combine_plan_shared_words(world, tokens, pad, blocks), kUntouched));
        r.end.size = blocks * tkt::kCombinePlanThreads;
        carve(r);
        give(r, 0);
        r.G.state = r.state, r.G.guard.rank = rank;
        r.G.world = world, r.G.tokens = tokens, r.G.top_k = top_k, r.G.local_experts = local, r.G.pad = pad;
        r.G.form = form, r.G.own_last = own_last, r.G.groups = groups, r.G.passes = passes, r.G.group_tiles = group_tiles;
    }
    for (rank_memory& r : ranks)
        for (int peer = 0; peer < world; ++peer) r.G.region[peer] = ranks[peer].region.data();

    lanes::chance.seed(head[12]);
    lanes::launch(world, blocks, tkt::kCombinePlanThreads);
    return lanes::write(arguments[2], ranks, plans);
}
