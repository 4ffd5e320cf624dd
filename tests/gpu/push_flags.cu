// Whether a flag is ever ahead of what it announces: warps of many blocks push rows to the peer with bulk stores, count
// them here, and whoever counts the last tells the peer; its warps look at the flag, read every row, and give them back.
//   STORER_FENCE: 1: each storing lane orders its store for other GPUs before it counts; 0: only the announcing lane does.
#include "comm/signals.cuh"

#ifndef STORER_FENCE
#define STORER_FENCE 1
#endif

namespace {

constexpr int kBlocks = 12, kWarps = 4, kRowBytes = 4096, kRows = kBlocks * kWarps;

struct globals {
    char* inbox_here;  // (kRows, kRowBytes), written by the peer
    char* inbox_there;
    uint64_t* flag_here;  // written by the peer
    uint64_t* flag_there;
    uint64_t* taken_here;  // written by the peer
    uint64_t* taken_there;
    int32_t* counters;  // rows pushed, warps that have read; zero between launches
    int32_t* errors;    // words that were wrong behind a flag
    tkt::spin_guard guard;
    int32_t rounds;
};

TKT_DEVICE uint32_t pattern(int rank, int round, int row, int word) {
    return (word * 2654435761u) ^ (round * 40503u) ^ (row << 20) ^ (rank << 30);
}

TKT_DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

TKT_DEVICE void push(const globals& G, uint32_t* row, int number) {
    using namespace tkt;
    for (int round = 1; round <= G.rounds; ++round) {
        for (int word = lane_id(); word < kRowBytes / 4; word += 32)
            row[word] = pattern(G.guard.rank, round, number, word);
        fence_async_shared();
        __syncwarp();
        if (lane_id() == 0) {
            await(G.guard, round, G.taken_here, round - 1);
            tma::store_bytes(G.inbox_there + number * kRowBytes, row, kRowBytes);
            tma::commit();
            tma::store_async_wait<0>();
            if (STORER_FENCE) fence();
        }
        __syncwarp();
        if (lane_id() == 1 && add_acquire_release(G.counters, 1) == kRows - 1) {
            G.counters[0] = 0;
            fence();
            announce(G.flag_there, round);
        }
        __syncwarp();
    }
}

TKT_DEVICE void read(const globals& G, int number) {
    using namespace tkt;
    const int peer = G.guard.rank ^ 1;
    int wrong = 0;
    for (int round = 1; round <= G.rounds; ++round) {
        await(G.guard, round, G.flag_here, round);
        __syncwarp();
        const int row = (number * 5 + round) % kRows;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(G.inbox_here + row * kRowBytes);
        for (int word = lane_id(); word < kRowBytes / 4; word += 32)
            wrong += __ldcg(from + word) != pattern(peer, round, row, word);
        __syncwarp();
        if (lane_id() == 0 && add_acquire_release(G.counters + 1, 1) == kRows - 1) {
            G.counters[1] = 0;
            announce(G.taken_there, round);
        }
    }
    if (wrong) atomicAdd(G.errors, wrong);
}

}  // namespace

extern "C" __device__ int32_t tktune_push_flags_facts[4] = {kWarps * kRowBytes, 32 * kWarps, sizeof(globals), 1};

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1) tktune_push_flags(const __grid_constant__ globals G) {
    extern __shared__ __align__(1024) char shared_memory[];
    const int warp = tkt::warp_id();
    if (blockIdx.x < kBlocks)
        push(G, reinterpret_cast<uint32_t*>(shared_memory + warp * kRowBytes), blockIdx.x * kWarps + warp);
    else
        read(G, (blockIdx.x - kBlocks) * kWarps + warp);
}
