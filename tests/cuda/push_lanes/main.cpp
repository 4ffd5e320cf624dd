// Runs the push role, the scatter role and the gate (csrc/comm) on all ranks at once over tables from a file: at each
// flag, at each complete pad block and behind each gate, the rows it speaks of are in place; at the end exactly the wanted
// rows are, and what a launch needs again is as the next one expects it. Then the next launch, with other rows.
// INDEXED: rows are pushed and no more; else they are scattered to their slots, by blocks beyond the first PUSH ones at once.
//
//   main TABLES BLOCKS WARPS SLOTS PENDING UNREAD WAVE SEED PUSH
#include "comm/push.cuh"

namespace {

constexpr int kWorld = RANKS, kLaunches = 3;
constexpr uint16_t kNobody = 0xffff;

struct config {
    static constexpr auto ACTIVATIONS = static_cast<tkt::activation_rows>(INDEXED);
};
using globals = tkt::push_globals<config, kWorld>;

struct rank_tables {
    std::vector<int32_t> plan, push_plan, tokens, blocks, expected, gate_sources, pull_indices, pull_tokens, pull_slots, slack;
    std::vector<int32_t> missing, arrivals;
    std::vector<uint16_t> sections, gathered;
    std::vector<uint64_t> flags;
    int32_t queue[3] = {}, dispenser[2] = {};
    uint64_t sequence = 0;
    int gates = 0;
    globals G;
};

rank_tables of[kWorld];
int tokens, hidden, pad, top_k, blocks, warps, pushing, launch;
bool leaving;

size_t section() { return static_cast<size_t>(tokens) * hidden; }

uint16_t value(int source, int token, int col) {
    return static_cast<uint16_t>((launch * 977 + source * 7919 + token * 31 + col * 3 + 1) & 0x7fff);
}

bool in_place(const rank_tables& r, int source, int token) {
    const uint16_t* row = r.sections.data() + source * section() + static_cast<size_t>(token) * hidden;
    for (int c = 0; c < hidden; ++c)
        if (row[c] != value(source, token, c)) return false;
    return true;
}

// What the GEMM reads of a slot.
bool readable(const rank_tables& r, int slot) {
    const int source = r.pull_indices[2 * slot], token = r.pull_indices[2 * slot + 1];
    if (INDEXED || source < 0) return source < 0 || in_place(r, source, token);
    for (int c = 0; c < hidden; ++c)
        if (r.gathered[static_cast<size_t>(slot) * hidden + c] != value(source, token, c)) return false;
    return true;
}

void check_slots(const rank_tables& r, int block, const char* what) {
    for (int slot = block * pad; slot < (block + 1) * pad; ++slot)
        if (!readable(r, slot)) lanes::fail(what);
}

void arrived(int32_t* word) {
    for (const rank_tables& r : of) {
        const ptrdiff_t at = word - r.arrivals.data();
        if (at < 0 || at >= static_cast<ptrdiff_t>(r.arrivals.size())) continue;
        if (*word > pad) lanes::fail("a pad block counts more rows than it has");
        if (*word == pad) check_slots(r, static_cast<int>(at), "a block is complete without its rows");
    }
}

// Rows of `source` that stand in this pad block.
void check_block(const rank_tables& r, int block, int source, const char* what) {
    for (int slot = block * pad; slot < (block + 1) * pad; ++slot) {
        const int from = r.pull_indices[2 * slot];
        if (from == source && !in_place(r, from, r.pull_indices[2 * slot + 1]))
            lanes::fail(what);
    }
}

void announced(uint64_t* word, uint64_t sequence) {
    for (rank_tables& r : of) {
        const ptrdiff_t at = word - r.flags.data();
        if (at < 0 || at >= static_cast<ptrdiff_t>(r.flags.size())) continue;
        const int place = static_cast<int>(at);
        const int block = place / kWorld, source = INDEXED ? place % kWorld : place / tokens;
        if (&of[lanes::now->of->block / blocks] != &of[source]) lanes::fail("a rank writes another's flag");
        if (sequence != of[source].sequence) lanes::fail("a flag of another launch");
        if (*word >= sequence) lanes::fail("a flag is raised twice");
        if (!INDEXED) {
            if (!in_place(r, source, place % tokens)) lanes::fail("a flag before its row");
            return;
        }
        if (!(r.gate_sources[block] >> source & 1)) lanes::fail("a flag that nobody waits for");
        check_block(r, block, source, "a flag before its rows");
        return;
    }
    lanes::fail("a flag that is none");
}

void check_end() {
    if (!lanes::unseen.empty()) lanes::fail("stores that no fence made visible");
    lanes::counted.clear();
    for (int me = 0; me < kWorld; ++me) {
        const rank_tables& r = of[me];
        if (r.gates != static_cast<int>(r.gate_sources.size())) lanes::fail("a gate never opened");
        std::vector<bool> wanted(static_cast<size_t>(kWorld) * tokens);
        for (size_t slot = 0; slot < r.pull_indices.size() / 2; ++slot)
            if (r.pull_indices[2 * slot] >= 0)
                wanted[r.pull_indices[2 * slot] * tokens + r.pull_indices[2 * slot + 1]] = true;
        for (int s = 0; s < kWorld; ++s)
            for (int t = 0; t < tokens; ++t) {
                if (s == me || wanted[s * tokens + t]) {
                    if (!in_place(r, s, t)) lanes::fail("a row is wrong at the end");
                    continue;
                }
                const uint16_t* row = r.sections.data() + s * section() + static_cast<size_t>(t) * hidden;
                for (int c = 0; c < hidden; ++c)
                    if (row[c] != kNobody) lanes::fail("a row was pushed that nobody wants");
            }
        for (size_t at = 0; at < r.flags.size(); ++at) {
            const bool waits = INDEXED ? r.gate_sources[at / kWorld] >> at % kWorld & 1
                                       : wanted[at] && static_cast<int>(at) / tokens != me;
            if (waits != (r.flags[at] == r.sequence)) lanes::fail("a flag is not what its gate waits for");
        }
        if (r.missing != r.expected) lanes::fail("counters are not ready for the next launch");
        for (size_t slot = 0; slot < r.pull_indices.size() / 2; ++slot) {
            if (!readable(r, static_cast<int>(slot))) lanes::fail("a slot is wrong at the end");
            if (!INDEXED && r.pull_indices[2 * slot] < 0 && r.gathered[slot * hidden] != kNobody)
                lanes::fail("padding was written");
        }
        if (!INDEXED)
            for (int count : r.arrivals)
                if (count != pad) lanes::fail("a pad block is not complete");
    }
}

// A store to this rank's own slots is seen here when it is performed; one to a peer may take longer to be seen there.
void perform(const lanes::copy& one) {
    const auto* to = reinterpret_cast<const uint16_t*>(one.to);
    for (const rank_tables& r : of)
        if (to >= r.gathered.data() && to < r.gathered.data() + r.gathered.size()) {
            std::memcpy(one.to, one.from, one.bytes);
            return;
        }
    lanes::keep(one);
}

}  // namespace

std::vector<std::vector<char>> memory;

namespace lanes {
void body() {
    const int block = now->of->block;
    rank_tables& r = of[block / blocks];
    if (leaving) {
        tkt::leave(r.G);
    } else if (now->of->index < warps) {
        if constexpr (kWorld > 1)
            if (INDEXED || block % blocks < pushing)
                tkt::push_warp<globals>(r.G, memory[block].data(), 0x7fffffff).run();
        if constexpr (!INDEXED) tkt::scatter_warp<globals>(r.G, memory[block].data(), 0x7fffffff).run();
    } else {
        for (size_t b = 0; b < r.gate_sources.size(); ++b) {
            const tkt::gate_of_pushed<globals> gate{r.G};
            if (INDEXED || now->number == 0) gate(static_cast<int>(b));
            __syncwarp();
            if (now->number) continue;
            check_slots(r, static_cast<int>(b), "a gate opened before its rows");
            ++r.gates;
        }
    }
}
}  // namespace lanes

int main(int, char** arguments) {
    FILE* file = std::fopen(arguments[1], "rb");
    if (!file) return 2;
    const std::vector<int32_t> head = lanes::table(file);  // tokens, hidden, pad, top_k, world
    tokens = head[0], hidden = head[1], pad = head[2], top_k = head[3];
    if (head[4] != kWorld) return 2;
    for (rank_tables& r : of)
        for (auto* one : {&r.plan, &r.push_plan, &r.tokens, &r.blocks, &r.expected, &r.gate_sources, &r.pull_indices,
                          &r.pull_tokens, &r.pull_slots, &r.slack})
            *one = lanes::table(file);
    std::fclose(file);
    const auto number = [&](int i) { return std::atoi(arguments[i]); };
    blocks = number(2), warps = number(3), pushing = number(9);

    for (int me = 0; me < kWorld; ++me) {
        rank_tables& r = of[me];
        globals& G = r.G;
        r.sections.resize(kWorld * section());
        r.gathered.resize(INDEXED ? 0 : r.pull_indices.size() / 2 * hidden);
        r.flags.assign(INDEXED ? r.gate_sources.size() * kWorld : static_cast<size_t>(kWorld) * tokens, 0);
        r.missing = r.expected;
        r.arrivals = r.slack;
        r.dispenser[1] = tkt::kNeverLast;
        G.gemm.reduction = hidden;
        G.gemm.pad = pad;
        G.gemm.guard.rank = me;
        G.gemm.dispenser = r.dispenser;
        G.plan = r.plan.data();
        G.gathered = reinterpret_cast<tkt::bf16*>(r.gathered.data());
        G.pull_tokens = reinterpret_cast<const int2*>(r.pull_tokens.data());
        G.pull_slots = r.pull_slots.data();
        G.num_push_blocks = pushing;
        G.pull_indices = reinterpret_cast<const int2*>(r.pull_indices.data());
        G.slack = r.slack.data();
        G.arrivals = r.arrivals.data();
        G.queue = r.queue;
        G.roles = TKT_COMMUNICATE | TKT_COMPUTE | TKT_GATED;
        G.top_k = top_k;
        G.unread = number(6);
        G.wave = number(7);
        G.warp_slots = number(4);
        G.comm_warps = warps;
        G.pending = number(5);
        G.push_plan = r.push_plan.data();
        G.push_tokens = r.tokens.data();
        G.push_blocks = r.blocks.data();
        G.push_expected = r.expected.data();
        G.missing = r.missing.data();
        G.gate_sources = r.gate_sources.data();
        G.sequence = &r.sequence;
        for (int s = 0; s < kWorld; ++s) {
            of[s].sections.resize(kWorld * section());
            auto* own = reinterpret_cast<tkt::bf16*>(of[s].sections.data());
            G.tokens.views[s] = {own + s * section(), tokens, hidden};
            G.sections.views[s] = {own, kWorld * tokens, hidden};
        }
    }
    for (int me = 0; me < kWorld; ++me)
        for (int s = 0; s < kWorld; ++s) of[me].G.flags[s] = of[s].flags.data();
    const size_t block_bytes = tkt::kSlotReserveBytes + static_cast<size_t>(warps) * number(4) * hidden * 2;
    for (int b = 0; b < kWorld * blocks; ++b) memory.emplace_back(block_bytes);

    lanes::perform = perform;
    tkt::on_announce = announced;
    tkt::on_arrival = arrived;
    for (launch = 0; launch < kLaunches; ++launch) {
        for (int me = 0; me < kWorld; ++me) {
            rank_tables& r = of[me];
            r.sequence += 2;  // other launches met meanwhile
            r.gates = 0;
            std::fill(r.sections.begin(), r.sections.end(), kNobody);
            std::fill(r.gathered.begin(), r.gathered.end(), kNobody);
            for (int t = 0; t < tokens; ++t)
                for (int c = 0; c < hidden; ++c)
                    r.sections[me * section() + static_cast<size_t>(t) * hidden + c] = value(me, t, c);
        }
        leaving = false;
        std::vector<lanes::warp> team;
        for (int b = 0; b < kWorld * blocks; ++b)
            for (int w = 0; w <= warps; ++w)
                if (w < warps || b % blocks == 0) team.push_back({w, b, 0, 0, {}});
        lanes::run(team, number(8) + launch);
        check_end();

        leaving = true;
        gridDim.x = blocks;
        std::vector<lanes::warp> last;
        for (int b = 0; b < kWorld * blocks; ++b) last.push_back({0, b, 0, 0, {}});
        lanes::run(last, number(8) + 100 + launch);
        for (const rank_tables& r : of)
            if (r.queue[0] || r.queue[1] || r.queue[2] || r.arrivals != r.slack)
                lanes::fail("the tail left the queue unready");
    }
    return 0;
}
