// Runs the combine roles of csrc/comm/combine*.cuh on all ranks at once, over tables from a file: compute blocks land
// tiles in a random order and call the epilogue, then join; the result and the staging rows are written out.
//
//   main TABLES OUT FORM GROUPS COMP_BLOCKS COMM_BLOCKS REDUCERS WARPS SLOTS VECTORS ROUNDS SEED WALK
#include "comm/combine_stream.cuh"

namespace tkt {
char shared_memory[1];
}

namespace {

struct config {
    static constexpr int ROW_BLOCK = 24, PIECE_ROWS = 8, COL_BLOCK = 16, CONSUMER_WARPS = 4;
};
constexpr int WORLD = RANKS;
using globals = tkt::combine_globals<config, WORLD>;
using memory_of = tkt::combine_memory<config>;

// Arrays of one rank, in the order of the file.
enum table {
    HEAD, BLOCK_EXPERT, EXPERTS, JOBS, PULL_TOKENS, SLOTS, OWNERS, PUSH_EXPECTED, RECV_FROM, CONTRIB, WEIGHTS, VALUES, TABLES
};
struct tile {
    int row, rows, col;
};
struct rank_memory {
    std::vector<int32_t> in[TABLES];
    std::vector<uint16_t> rows, staging, y;
    std::vector<int32_t> finished;
    std::vector<uint64_t> landed;
    std::vector<std::vector<uint4>> shared;  // of each block
    std::vector<tile> tiles;
    std::vector<int> busy, left;  // of each block: whether its GEMM still runs, warps that have left
    int32_t queue[tkt::kCombineQueueWords] = {}, plan[2];
    uint64_t watermarks[WORLD * tkt::kMostCombineGroups] = {}, sequence = 0;
    globals G{};
};
rank_memory ranks[WORLD];

int pad, cols, capacity, warps_of_a_block;

// What the GEMM's walk makes of each expert's rows.
std::vector<tile> tiles_of(const std::vector<int32_t>& experts, int groups, bool walks_columns) {
    std::vector<tile> made;
    for (size_t e = 0; e < experts.size(); e += 2) {
        const int pieces = (experts[e + 1] + config::PIECE_ROWS - 1) / config::PIECE_ROWS;
        const tkt::task_order<config>::tiling t(pieces);
        for (int i = 0, piece = 0; i < t.tall + t.low; ++i) {
            const int here = t.low_pieces + (i < t.tall);
            for (int col = 0; col < cols; col += config::COL_BLOCK)
                made.push_back({experts[e] + piece * config::PIECE_ROWS, here * config::PIECE_ROWS, col});
            piece += here;
        }
    }
    std::shuffle(made.begin(), made.end(), lanes::chance);
    if (walks_columns)  // the tiles of later runs of columns come first, since they are taken from the end
        std::stable_sort(made.begin(), made.end(), [&](const tile& a, const tile& b) {
            return a.col * groups / cols > b.col * groups / cols;
        });
    return made;
}

void land(rank_memory& mine, const tile& t) {
    for (int r = t.row; r < t.row + t.rows && r < capacity; ++r) {
        for (int c = t.col; c < t.col + config::COL_BLOCK; ++c)
            mine.rows[r * cols + c] = static_cast<uint16_t>(mine.in[VALUES][r * cols + c]);
        lanes::wrote(&mine.rows[r * cols + t.col], 2 * config::COL_BLOCK);
    }
    const tkt::combine_epilogue<globals> epilogue{mine.G};
    for (int block = t.row / pad; block * pad < t.row + t.rows; ++block) epilogue(block, t.col / config::COL_BLOCK);
}

void prepare(rank_memory& mine, int rank, const std::vector<int>& words, int round) {
    const int groups = words[1];
    globals& G = mine.G;
    G.gemm.guard.rank = rank, G.gemm.cols = cols, G.gemm.pad = pad;
    mine.plan[tkt::kCombinePlanBlocks] = static_cast<int>(mine.in[BLOCK_EXPERT].size());
    mine.plan[tkt::kCombinePlanJobs] = static_cast<int>(mine.in[JOBS].size());
    mine.rows.assign(static_cast<size_t>(capacity) * cols, 0xffff);
    mine.y.assign(static_cast<size_t>(G.tokens) * cols, 0xffff);
    if (round == 0) {
        mine.staging.assign(static_cast<size_t>(WORLD) * G.tokens * cols, 0xffff);
        mine.finished.assign((mine.in[BLOCK_EXPERT].size() + 1) * groups, 0);
        mine.landed.assign(static_cast<size_t>(WORLD) * G.landed_stride, 0);
    }
    mine.sequence = 5 + round;
    mine.tiles = tiles_of(mine.in[EXPERTS], groups, words[10]);
    mine.busy.assign(words[2], 1);
    mine.left.assign(words[2] + words[3], 0);
    const int pieces = words[5] * (words[6] + tkt::kCombineSums), bytes = memory_of::kReserveBytes + pieces * words[7] * 512;
    mine.shared.assign(words[2] + words[3], std::vector<uint4>(bytes / 16, {0x77777777, 0x77777777, 0x77777777, 0x77777777}));
    G.plan = mine.plan, G.block_expert = mine.in[BLOCK_EXPERT].data();
    G.experts = reinterpret_cast<int2*>(mine.in[EXPERTS].data()), G.jobs = mine.in[JOBS].data();
    G.pull_tokens = reinterpret_cast<int2*>(mine.in[PULL_TOKENS].data()), G.slots = mine.in[SLOTS].data();
    G.owners = mine.in[OWNERS].data(), G.topk_weights = reinterpret_cast<float*>(mine.in[WEIGHTS].data());
    G.push_expected = mine.in[PUSH_EXPECTED].data(), G.recv_from = mine.in[RECV_FROM].data();
    G.final_contrib = mine.in[CONTRIB].data();
    G.y = reinterpret_cast<tkt::bf16*>(mine.y.data()), G.finished = mine.finished.data(), G.queue = mine.queue;
    G.sequence = &mine.sequence, G.roles = TKT_COMMUNICATE | TKT_COMPUTE | TKT_GATED;
    G.num_comp_blocks = words[2], G.num_reduce_blocks = words[4], G.form = words[0], G.groups = groups;
    G.warp_slots = words[6], G.piece_vectors = words[7];
    warps_of_a_block = words[5];
}

void connect() {
    for (rank_memory& mine : ranks)
        for (int r = 0; r < WORLD; ++r) {
            mine.G.rows.views[r] = {reinterpret_cast<tkt::bf16*>(ranks[r].rows.data()), capacity, cols};
            mine.G.staging.views[r] = {reinterpret_cast<tkt::bf16*>(ranks[r].staging.data()), WORLD * mine.G.tokens, cols};
            mine.G.watermarks[r] = ranks[r].watermarks, mine.G.landed[r] = ranks[r].landed.data();
        }
}

void sum(rank_memory& mine, int block) {
    const globals& G = mine.G;
    while (block < G.num_comp_blocks && mine.busy[block]) lanes::yield();
    const bool reduces = block >= static_cast<int>(lanes::grid) - G.num_reduce_blocks;
    tkt::combine_stream<globals>(G, reinterpret_cast<char*>(mine.shared[block].data()), reduces, block >= G.num_comp_blocks)
        .run();
    int before = 0;
    if (tkt::lane_id() == 0) before = mine.left[block]++;
    if (__shfl_sync(0xffffffffu, before, 0) == warps_of_a_block - 1) tkt::leave_combine(G);  // the block's last warp
}

void check_words(const rank_memory& mine) {
    for (int word : mine.queue)
        if (word) lanes::fail("the tail left a word of the queue");
    for (int word : mine.finished)
        if (word) lanes::fail("the tail left a count");
    for (int r = 0; r < WORLD && mine.G.form != TKT_FORM_PULL; ++r) {
        const bool owed = ranks[r].in[PUSH_EXPECTED][mine.G.gemm.guard.rank] > 0;
        for (int group = 0; group < mine.G.groups; ++group)
            if ((mine.watermarks[r * tkt::kMostCombineGroups + group] == mine.sequence) != owed)
                lanes::fail("a watermark stands where nothing is owed, or not");
    }
}

}  // namespace

int main(int argc, char** argv) {
    std::FILE* file = std::fopen(argv[1], "rb");
    for (rank_memory& mine : ranks)
        for (auto& array : mine.in) {
            int32_t count;
            if (std::fread(&count, 4, 1, file) != 1) lanes::fail("no table");
            array.resize(count);
            if (count && std::fread(array.data(), 4, count, file) != static_cast<size_t>(count)) lanes::fail("a short table");
        }
    std::fclose(file);
    std::vector<int> words;  // form, groups, compute blocks, communication blocks, reducers, warps, slots, vectors, rounds, seed, walk
    for (int i = 3; i < argc; ++i) words.push_back(std::atoi(argv[i]));
    for (rank_memory& mine : ranks) {
        pad = mine.in[HEAD][0], cols = mine.in[HEAD][1], capacity = mine.in[HEAD][2];
        mine.G.tokens = mine.in[HEAD][3], mine.G.top_k = mine.in[HEAD][4], mine.G.landed_stride = mine.in[HEAD][5];
    }
    lanes::grid = words[2] + words[3];
    for (int round = 0; round < words[8]; ++round) {
        std::deque<lanes::warp> warps;
        for (int r = 0; r < WORLD; ++r) {
            rank_memory& mine = ranks[r];
            prepare(mine, r, words, round);
            for (int block = 0; block < static_cast<int>(lanes::grid); ++block) {
                for (int w = 0; w < words[5]; ++w)
                    warps.push_back({w, block, 32, 0, 0, [&mine, block] { sum(mine, block); }, {}});
                if (block >= words[2]) continue;
                warps.push_back({0, block, 1, 0, 0, [&mine, block] {
                                     while (!mine.tiles.empty()) {
                                         const tile mine_now = mine.tiles.back();
                                         mine.tiles.pop_back();
                                         for (int wait = lanes::chance() % 64; wait >= 0; --wait) lanes::yield();
                                         land(mine, mine_now);
                                     }
                                     mine.busy[block] = 0;
                                 }, {}});
            }
        }
        connect();
        lanes::memories.clear();
        for (const rank_memory& mine : ranks)
            for (const auto* array : {&mine.rows, &mine.staging})
                lanes::memories.push_back({reinterpret_cast<const char*>(array->data()), std::vector<long>(array->size() / 8 + 1)});
        lanes::land_one = tkt::land_one;
        lanes::run(warps, words[9] + round);
        if (!tkt::loads.empty()) lanes::fail("a warp left with loads under way");
        for (const rank_memory& mine : ranks) check_words(mine);
    }
    file = std::fopen(argv[2], "wb");
    for (const rank_memory& mine : ranks)
        for (const auto* array : {&mine.y, &mine.staging}) std::fwrite(array->data(), 2, array->size(), file);
    std::fclose(file);
    return 0;
}
