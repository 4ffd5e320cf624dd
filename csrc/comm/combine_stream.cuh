// Each warp runs one stream of sums through a ring of row pieces that the copy engine fills. While a piece is added, those of
// its own sum and of the next ones are on their way. Pushing and pulling wait for tiles only, which wait for nothing;
// reducing waits for the pushes of all ranks, and a warp that may wait for those has no push of its own left.
#pragma once

#include "combine_jobs.cuh"
#include "row_ring.cuh"

namespace tkt {

// A piece is a stretch of columns of one row. A job's sum is formed stretch by stretch: in each, the pieces of all its
// rows in their order. A piece in flight holds a slot from the issue of its load until it was added; a stretch that is
// pushed holds one of two others until its store has read it, and counts as there when that is performed, which is later.
// The first lane stores and waits for stores. A pull rounds the sum of each rank's rows as a push would, so that both forms
// give the same bits, and so has twice as many sums, of half as many columns.
template <typename Globals>
struct combine_stream {
    using config = typename Globals::config;
    using memory_of = combine_memory<config>;
    using kind = typename combine_jobs<Globals>::kind;
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr int kVectors = memory_of::kVectors, kPulled = kVectors / 2, kNone = -1;
    static constexpr int kLot = 8, kPending = 6;  // rows told of at once; stretches that may be under way for long
    enum outcome { nothing, loaded, blocked };

    // Words about a piece: the last of its stretch, and of the job; no row at all; of a push; of a pull, and the last of a
    // rank; then in bits from these on the run of columns, the rank that gets the sum and the first vector of the stretch.
    static constexpr int kCloses = 1, kEnds = 2, kEmpty = 4, kPushes = 8, kPulls = 16, kTurns = 32;
    static constexpr int kGroupAt = 6, kRankAt = 8, kFirstAt = 12;
    static_assert(kMostCombineGroups == 4 && TKT_MAX_WORLD == 8);

    const Globals& G;
    combine_jobs<Globals> jobs;
    const int width, vectors, stretch;  // columns of a run; 16-byte vectors of it, and of a piece
    const int piece_bytes;
    semaphore* const full;              // of this warp's slots
    char* const rows;
    char* const sums;

    // The job whose pieces are being asked for: its words, where each lane's row begins, which lanes hold one, whose piece
    // is not asked for yet, the first vector of the stretch and, of a pull, the rank whose rows are being asked for.
    int job_words = 0;
    uint64_t begin = 0;
    uint32_t mask = 0, left = 0;
    int base = 0, turn = 0;
    bool begun = false, chosen = false;

    // Lane n % 32: what piece n is, whose, its weight; of stretch n: the word that counts its row, where it ends one.
    int held_words = 0, held_token = 0, held = 0;
    float held_weight = 0.0f;

    slot_place loading, adding;
    int asked = 0, added = 0;     // pieces
    int stored = 0, retired = 0;  // stretches
    int untold = 0, there = 0;    // rows that are there and not counted yet; lane d · kMostCombineGroups + g: those for it

    float sum[kVectors][kVectorCols];

    TKT_DEVICE combine_stream(const Globals& G, char* memory, bool reduces, bool early)
        : G(G),
          jobs(G, reduces, early),
          width(G.gemm.cols / G.groups),
          vectors(width / kVectorCols),
          stretch(G.piece_vectors * kWarpThreads),
          piece_bytes(stretch * kVectorBytes),
          full(reinterpret_cast<semaphore*>(memory) + warp_id() * G.warp_slots),
          rows(memory + memory_of::kReserveBytes + warp_id() * (G.warp_slots + kCombineSums) * piece_bytes),
          sums(rows + G.warp_slots * piece_bytes) {}

    static TKT_DEVICE int group_of(int words) { return words >> kGroupAt & (kMostCombineGroups - 1); }
    static TKT_DEVICE int rank_of(int words) { return words >> kRankAt & (TKT_MAX_WORLD - 1); }
    static TKT_DEVICE int lane_of(int number) { return number & (kWarpThreads - 1); }
    TKT_DEVICE uint4* piece_in(char* slots, int slot) const {
        return reinterpret_cast<uint4*>(slots + slot * piece_bytes) + lane_id();
    }
    TKT_DEVICE int end_of(int first) const { return min(first + stretch, vectors); }
    TKT_DEVICE int64_t column(int group, int vector) const { return group * width + vector * kVectorCols; }

    // The next piece, asked for; `blocked` when it is not there and the warp may not wait for it.
    TKT_DEVICE outcome next(bool may_wait) {
        if (!begun) {
            if (jobs.stopped || (!chosen && !jobs.choose())) return nothing;
            chosen = true;
            if (!jobs.admitted(may_wait)) return jobs.stopped ? nothing : blocked;
            begin_job();
        }
        load();
        jobs.look_ahead();
        return loaded;
    }
    TKT_DEVICE void begin_job() {
        const auto& of = jobs.now;
        begun = true;
        chosen = false;
        base = 0;
        mask = left = __ballot_sync(kAll, jobs.row != kNone);
        job_words = (mask ? 0 : kEmpty) | (of.of == kind::push ? kPushes : of.of == kind::pull ? kPulls : 0) |
                    of.group << kGroupAt | of.token.x << kRankAt;
        const int holder = of.of == kind::pull && jobs.row != kNone ? jobs.owner : jobs.me;
        const bf16* const rows = of.of == kind::reduce ? G.staging[jobs.me].data : G.rows[holder].data;
        begin = reinterpret_cast<uint64_t>(rows + column(of.group, 0) + static_cast<int64_t>(jobs.row) * G.gemm.cols);
        turn = 0;
    }
    TKT_DEVICE void load() {
        uint32_t next = left;
        if (job_words & kPulls) {  // rank by rank
            for (; turn < Globals::world; ++turn)
                if ((next = left & __ballot_sync(kAll, jobs.owner == turn))) break;
            if (!next) next = left;
        }
        const int x = next ? __ffs(next) - 1 : 0, end = end_of(base);
        const uint64_t from = __shfl_sync(kAll, begin, x) + base * kVectorBytes;
        const float weight = __shfl_sync(kAll, jobs.weight, x);
        if (next) left ^= 1u << x;
        int words = job_words | base << kFirstAt | ((next & (next - 1)) == 0 ? kTurns : 0);
        if (left == 0) words |= end == vectors ? kCloses | kEnds : kCloses;
        if (lane_id() == lane_of(asked)) {
            held_words = words;
            held_token = jobs.now.token.y;
            held_weight = weight;
        }
        const uint32_t bytes = mask ? (end - base) * kVectorBytes : 0;
        if (elect_lane()) {
            fence_async_shared();  // all lanes have read what the load overwrites
            tma::expect_bytes(full[loading.index], bytes);
            if (bytes)
                tma::load_bytes(rows + loading.index * piece_bytes, reinterpret_cast<const void*>(from), bytes,
                                full[loading.index]);
        }
        __syncwarp();
        ++asked;
        loading.advance(G.warp_slots);
        if (left) return;
        left = mask;
        turn = 0;
        base = end;
        begun = base < vectors;
    }

    TKT_DEVICE void add() {
        const int words = __shfl_sync(kAll, held_words, lane_of(added));
        const int token = __shfl_sync(kAll, held_token, lane_of(added));
        const float weight = __shfl_sync(kAll, held_weight, lane_of(added));
        wait<wait_role::combine, wait_word::stage_full>(full[adding.index], adding.phase, G.gemm.guard);
        if (!(words & kEmpty)) {
            const uint4* const from = piece_in(rows, adding.index);
            uint4 got[kVectors];
#pragma unroll
            for (int v = 0; v < kVectors; ++v)  // behind a row's end stands what was there: nobody stores its sum
                if (v < G.piece_vectors) got[v] = from[v * kWarpThreads];
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                if (v < G.piece_vectors) add_weighted(sum[v], weight, got[v]);
        }
        __syncwarp();  // all lanes have read the slot: it may be loaded anew
        ++added;
        adding.advance(G.warp_slots);
        if ((words & kPulls) && (words & kTurns)) round_rank();
        if (!(words & kCloses)) return;
        const int first = words >> kFirstAt;
        if (words & kPushes)
            push(words, token, first);
        else if (words & kPulls)
            write<kPulled>(group_of(words), token, first);
        else
            write<0>(group_of(words), token, first);
        clear<kVectors>();
    }
    // The sums of a rank's rows become one addend of those of all ranks, which are the upper half.
    TKT_DEVICE void round_rank() {
#pragma unroll
        for (int v = 0; v < kPulled; ++v) add_weighted(sum[kPulled + v], 1.0f, rounded(sum[v]));
        clear<kPulled>();
    }
    template <int VECTORS>
    TKT_DEVICE void clear() {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < kVectorCols; ++i) sum[v][i] = 0.0f;
    }
    template <int FROM>
    TKT_DEVICE void write(int group, int token, int first) const {
        const int end = end_of(first);
        uint4* const to = reinterpret_cast<uint4*>(G.y + static_cast<int64_t>(token) * G.gemm.cols + column(group, 0));
#pragma unroll
        for (int v = FROM; v < kVectors; ++v) {
            const int at = first + (v - FROM) * kWarpThreads + lane_id();
            if (at < end) to[at] = rounded(sum[v]);
        }
    }

    // The copy engine reads what the lanes wrote.
    TKT_DEVICE void push(int words, int token, int first) {
        const int group = group_of(words), rank = rank_of(words), slot = stored % kCombineSums;
        wait_read(kCombineSums - 1);
        uint4* const to = piece_in(sums, slot);
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (v < G.piece_vectors) to[v * kWarpThreads] = rounded(sum[v]);
        if (lane_id() == lane_of(stored)) held = words & kEnds ? rank * kMostCombineGroups + group : kNone;
        fence_async_shared();
        __syncwarp();
        if (lane_id() == 0) {
            tma::store_bytes(G.staging[rank].at(jobs.me * G.tokens + token, column(group, first)), to,
                             (end_of(first) - first) * kVectorBytes);
            tma::commit();
        }
        ++stored;
        if (stored - retired > kPending) retire(kPending);
    }

    // The full wait, until at most `pending` stretches are still on their way: the others are there, and their rows are
    // told of in lots, since telling makes the warp wait.
    TKT_DEVICE void retire(int pending) {
        wait_performed(pending);
#pragma unroll 1
        for (; retired < stored - pending; ++retired) {
            const int was_for = __shfl_sync(kAll, held, lane_of(retired));
            there += lane_id() == was_for;
            untold += was_for != kNone;
        }
        if (untold >= kLot || pending == 0) tell();
    }
    // The last row that a rank is owed of a run of columns raises its watermark: one word, one writer.
    TKT_DEVICE void tell() {
        for (uint32_t lanes = __ballot_sync(kAll, there != 0); lanes; lanes &= lanes - 1) {
            const int was_for = __ffs(lanes) - 1, to = was_for / kMostCombineGroups;
            const int rows = __shfl_sync(kAll, there, was_for);
            if (lane_id() != 0) continue;
            const int before = add_acquire_release(G.queue + kPushed + was_for, rows);
            if (before + rows != __ldg(G.push_expected + to)) continue;
            fence_system();
            announce_fenced(G.watermarks[to] + jobs.me * kMostCombineGroups + was_for % kMostCombineGroups, jobs.epoch);
        }
        __syncwarp();
        there = untold = 0;
    }

    // Asks for pieces while slots are free, and adds the oldest. Before it waits for what others do, others get what it has.
    TKT_DEVICE void run() {
        open_slots(full, G.warp_slots);
        clear<kVectors>();
        bool dry = false, waits = false;
        for (;;) {
            if (!dry && asked - added < G.warp_slots) {
                const outcome found = next(waits);
                waits = false;
                if (found == loaded) continue;
                dry = found == nothing;
                if (found == blocked && asked == added) {
                    retire(0);
                    waits = true;
                    continue;
                }
            }
            if (asked == added) break;
            add();
        }
        retire(0);
    }
};

// Every warp that sums comes here, in blocks whose memory no GEMM uses any more.
template <typename Globals>
TKT_DEVICE void combine(const Globals& G) {
    extern __shared__ __align__(1024) char shared_memory[];
    // Made once: the address of shared memory depends on the block's place in a cluster.
    char* const memory = static_cast<char*>(__cvta_shared_to_generic(opaque(shared_address(shared_memory))));
    const int block = blockIdx.x;
    const bool reduces = block >= static_cast<int>(gridDim.x) - G.num_reduce_blocks;
    combine_stream<Globals>(G, memory, reduces, block >= G.num_comp_blocks).run();
}

}  // namespace tkt
