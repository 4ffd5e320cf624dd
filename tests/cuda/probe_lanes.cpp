// Runs the link probe's bulk copies (csrc/comm/probe_bulk.cuh) on CPU lanes with a copy engine that is always late, and
// checks every row that was written, and every one that was not.
//
//   probe_lanes ITEMS FAN STRIDE FROM_ROWS TO_ROWS ROW_BYTES BLOCKS WARPS SLOTS PENDING SEED
#include "comm/probe_bulk.cuh"

namespace {
tkt::probe_globals G;
std::vector<std::vector<char>> memory;
}  // namespace

namespace lanes {
void body() { tkt::probe_bulk(G, memory[now->of->block].data(), now->of->block); }
}  // namespace lanes

int main(int, char** arguments) {
    const auto number = [&](int i) { return std::strtoul(arguments[i], nullptr, 10); };
    const uint32_t from_rows = number(4), to_rows = number(5), row_bytes = number(6), words = row_bytes / 4;
    const int blocks = number(7);
    std::vector<uint32_t> from(from_rows * words), to(to_rows * words, 0xffffffff), wanted(to);
    for (uint32_t i = 0; i < from.size(); ++i) from[i] = i;
    G.from = reinterpret_cast<const char*>(from.data());
    G.to = reinterpret_cast<char*>(to.data());
    G.items = number(1), G.fan = number(2), G.stride = number(3);
    G.from_mask = from_rows - 1, G.to_mask = to_rows - 1, G.row_bytes = row_bytes;
    G.warps = number(8), G.warp_slots = number(9), G.pending = number(10);
    for (uint32_t item = 0; item < static_cast<uint32_t>(G.items); ++item)
        for (uint32_t x = 0; x < static_cast<uint32_t>(G.fan); ++x)
            for (uint32_t w = 0; w < words; ++w)
                wanted[((item * G.fan + x) * G.stride % to_rows) * words + w] = item % from_rows * words + w;

    gridDim.x = blocks;
    for (int b = 0; b < blocks; ++b)
        memory.emplace_back(tkt::kProbeReserveBytes + G.warps * G.warp_slots * row_bytes);
    std::vector<lanes::warp> team;
    for (int b = 0; b < blocks; ++b)
        for (int w = 0; w < G.warps; ++w) team.push_back({w, b, 0, 0, {}});
    lanes::run(team, number(11));
    if (to != wanted) lanes::fail("a row is wrong, or one was written that should not be");
    return 0;
}
