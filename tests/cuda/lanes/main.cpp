// Runs the dispatch role of csrc/comm/dispatch.cuh over tables from a file, all blocks and warps at once, and checks
// every pad block at the moment its last row is counted, the whole buffer at the end, and what the tail leaves behind.
// INDEXED: rows go to their places among all ranks' tokens, each other rank's once and this rank's own never.
//
//   main TABLES HEAD BLOCKS WARPS SLOTS PENDING UNREAD PIECES WAVE OPENERS OPENING UNTIL SEED
#include "comm/dispatch.cuh"

namespace {

struct config {
    static constexpr auto ACTIVATIONS = static_cast<tkt::activation_rows>(INDEXED);
};
using globals = tkt::dispatch_globals<config, 8>;

globals G;
std::vector<int32_t> head, pull_indices, pull_tokens, pull_slots, slack, arrivals;
std::vector<uint16_t> x, gathered;
std::vector<std::vector<char>> memory;
int32_t queue[3], dispenser[2];
int blocks, warps, openers, until;
bool leaving;

int rows() { return head[0]; }
int hidden() { return head[4]; }
int world() { return head[6]; }
int tokens() { return head[7]; }
int rank() { return head[8]; }

uint16_t value(int source, int token, int col) {
    return static_cast<uint16_t>(source * 7919 + token * 31 + col * 3 + 1);
}

void check_row(int slot, const char* what) {
    const int source = pull_indices[2 * slot], token = pull_indices[2 * slot + 1];
    if (INDEXED && source < 0) return;  // nobody reads it
    const size_t row = INDEXED ? source * tokens() + token : slot;
    for (int c = 0; c < hidden(); ++c) {
        const uint16_t wanted = source < 0 ? 0xffff : value(source, token, c);
        if (gathered[row * hidden() + c] != wanted) lanes::fail(what);
    }
}

// No piece of a token is fetched twice.
void check_fetched_once() {
    int fetched = 0;
    for (int item = 0; item < head[2]; ++item) fetched += pull_tokens[2 * item] != rank();
    if (tkt::loads_issued != fetched * G.pieces) lanes::fail("a row was fetched twice, or one that is here");
}

// Rows that nobody here wants stay as they were.
void check_unwanted() {
    std::vector<bool> wanted(static_cast<size_t>(world()) * tokens());
    for (int item = 0; item < head[2]; ++item)
        wanted[pull_tokens[2 * item] * tokens() + pull_tokens[2 * item + 1]] = true;
    for (int s = 0; s < world(); ++s)
        for (int t = 0; t < tokens(); ++t)
            for (int c = 0; c < hidden(); ++c) {
                const size_t row = static_cast<size_t>(s) * tokens() + t;
                if (wanted[row]) continue;
                const uint16_t before = s == rank() ? value(s, t, c) : 0xffff;
                if (gathered[row * hidden() + c] != before) lanes::fail("a row was written that is not wanted");
            }
}

void arrival(int32_t* word) {
    const int block = static_cast<int>(word - arrivals.data()), pad = G.gemm.pad;
    if (*word > pad) lanes::fail("a pad block counts more rows than it has");
    if (*word == pad)
        for (int slot = block * pad; slot < (block + 1) * pad; ++slot) check_row(slot, "a block is complete without its rows");
}

// UNTIL: that many pad blocks are what an opening block waits for, the next ones each.
tkt::pad_blocks blocks_of(int block) {
    if (block >= openers || !until) return {0, 0};
    const int first = block * until;
    return {first, std::max(0, std::min(until, head[1] - first))};
}
bool all_there(tkt::pad_blocks wanted) {
    for (int block = wanted.first; block < wanted.first + wanted.count; ++block)
        if (arrivals[block] < G.gemm.pad) return false;
    return true;
}
int items() {
    const int first = INDEXED ? 0 : std::min(G.head, rows());
    return first < rows() ? first + head[2] : first;
}

tkt::row_team team_of(int block) {
    char* const start = memory[block].data();
    return {start, start + tkt::kSlotReserveBytes, G.warp_slots, G.pieces, G.unread, G.pending};
}

}  // namespace

namespace lanes {
void body() {
    if (leaving) {
        tkt::leave(G);
        return;
    }
    const int block = now->of->block;
    const int draws = block < openers ? G.opening : 0x7fffffff;
    if (now->of->index < G.comm_warps && draws)
        tkt::dispatch_warp<globals>(G, team_of(block), now->of->index, draws, blocks_of(block)).run();
    if (!all_there(blocks_of(block)) && queue[0] * G.wave < items())
        fail("an opening block left before its rows were there");
}
}  // namespace lanes

int main(int, char** arguments) {
    FILE* file = std::fopen(arguments[1], "rb");
    if (!file) return 2;
    head = lanes::table(file);  // rows, blocks, tokens wanted, top_k, hidden, pad, world, tokens a rank, this rank
    pull_indices = lanes::table(file), pull_tokens = lanes::table(file), pull_slots = lanes::table(file), slack = lanes::table(file);
    std::fclose(file);
    const auto number = [&](int i) { return std::atoi(arguments[i]); };
    blocks = number(3), warps = number(4), openers = number(10);

    const size_t section = static_cast<size_t>(tokens()) * hidden();
    x.resize(world() * section);
    for (int s = 0; s < world(); ++s)
        for (int t = 0; t < tokens(); ++t)
            for (int c = 0; c < hidden(); ++c) x[s * section + static_cast<size_t>(t) * hidden() + c] = value(s, t, c);
    gathered.assign(INDEXED ? x.size() : static_cast<size_t>(rows()) * hidden(), 0xffff);
    if (INDEXED) std::copy_n(x.begin() + rank() * section, section, gathered.begin() + rank() * section);
    arrivals = slack;
    G.gemm.reduction = hidden();
    G.gemm.pad = head[5];
    G.gemm.guard.rank = rank();
    G.gemm.dispenser = dispenser;
    G.gathered = reinterpret_cast<tkt::bf16*>(gathered.data());
    G.plan = head.data();
    G.pull_indices = reinterpret_cast<const int2*>(pull_indices.data());
    G.pull_tokens = reinterpret_cast<const int2*>(pull_tokens.data());
    G.pull_slots = pull_slots.data();
    G.slack = slack.data();
    G.arrivals = arrivals.data();
    G.queue = queue;
    G.head = number(2);
    G.top_k = head[3];
    G.wave = number(9);
    G.opening = number(11);
    G.warp_slots = number(5);
    G.comm_warps = warps;
    G.pending = number(6);
    G.unread = number(7);
    G.pieces = number(8);
    until = number(12);
    for (int s = 0; s < world(); ++s)
        G.tokens.views[s] = {reinterpret_cast<tkt::bf16*>(x.data()) + s * section, tokens(), hidden()};
    const size_t block_bytes = tkt::kSlotReserveBytes + static_cast<size_t>(warps) * G.warp_slots * hidden() * 2 / G.pieces;
    for (int b = 0; b < blocks; ++b) memory.emplace_back(block_bytes);

    tkt::on_arrival = arrival;
    std::vector<lanes::warp> team;
    for (int b = 0; b < blocks; ++b)
        for (int w = 0; w < warps; ++w) team.push_back({w, b, 0, 0, {}});
    lanes::run(team, number(13));
    for (int slot = 0; slot < rows(); ++slot) check_row(slot, "a row is wrong at the end, or padding was written");
    if (INDEXED) check_unwanted(), check_fetched_once();
    for (int count : arrivals)
        if (count != G.gemm.pad) lanes::fail("a pad block is not complete");

    leaving = true;
    gridDim.x = blocks;
    dispenser[0] = 77;
    std::vector<lanes::warp> last;
    for (int b = 0; b < blocks; ++b) last.push_back({0, b, 0, 0, {}});
    lanes::run(last, number(13) + 1);
    if (arrivals != slack || queue[0] || queue[1] || queue[2] || dispenser[0] || dispenser[1] != tkt::kNeverLast)
        lanes::fail("the tail left the counters unready");
    return 0;
}
