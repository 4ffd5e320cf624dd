// The roles of gemm_combine on the CPU backend: the epilogue that announces landed rows, the job loop that forms and
// pushes weighted sums, the final reduce, and the pull form. The GEMM itself is not here.
#pragma once

#include "gemm.hpp"

namespace tkt {

using combination = tkt_combine;

// Words of combination.counters; hot ones are on lines of their own.
constexpr int NEXT_JOB = 0, NEXT_TOKEN = 16, PUSHED = 32, FINISHED = 48;
constexpr int MOST_ROWS_IN_FLIGHT = 8;
static_assert(PUSHED + TKT_MAX_WORLD <= FINISHED);

// The GEMM's memory; once the whole block has left the GEMM its rings hold row slots.
template <typename Config>
struct combine_shared : gemm_shared<Config> {
    semaphore left;  // threads of the block that have left the GEMM

    void prepare() {
        gemm_shared<Config>::prepare();
        init_semaphore(left, Config::NUM_THREADS);
    }

    // `width`: columns of a row slot. Slots of one thread are neighbours.
    bf16* slot(int thread, int rows_in_flight, int index, int width) {
        using rings = gemm_shared<Config>;
        static_assert(__builtin_offsetof(rings, acc) + sizeof(rings::acc) ==
                      __builtin_offsetof(rings, a) + Config::SMEM_BYTES);
        return reinterpret_cast<bf16*>(this->a) + (int64_t(thread) * rows_in_flight + index) * width;
    }

    static bool fits(const globals& G) {
        const combination* C = G.combine;
        if (!C || C->bytes != int32_t(sizeof *C) || C->signal_groups < 1 || C->rows_in_flight < 1 ||
            C->rows_in_flight > MOST_ROWS_IN_FLIGHT || C->num_reduce_blocks < 1 || C->num_jobs < 0)
            return false;
        const int64_t slots = int64_t(Config::NUM_THREADS) * C->rows_in_flight;
        const bool narrow = C->form == TKT_FORM_PULL ||
                            slots * (G.cols / C->signal_groups) * 2 <= Config::SMEM_BYTES;
        return narrow && G.cols / Config::COL_BLOCK % C->signal_groups == 0 &&
               int64_t(G.num_pad_blocks) * C->signal_groups <= C->landed_stride &&
               C->num_counters >= FINISHED + G.num_pad_blocks * C->signal_groups;
    }
};

#ifdef TKT_DELAYS
// For tests: now and then a thread is late, differently on each rank, in each launch and in each place.
inline void delay(const globals& G, int place) {
    thread_local uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t(gettid()) + 1);
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const uint64_t dice = (state ^ G.combine->epoch) >> 20;
    if (dice % 16 == 0) sleep_ns(int64_t(1 + dice / 16 % 64) * 2000 * (1 + (G.rank + place) % 3));
}
#else
inline void delay(const globals&, int) {}
#endif

// The word that tells, on this rank, whether a run of columns of a pad block of rank `owner` has landed.
inline uint64_t* landed_word(const globals& G, int on, int owner, int pad_block, int group) {
    const combination& C = *G.combine;
    return C.landed[on] + int64_t(owner) * C.landed_stride + pad_block * C.signal_groups + group;
}

// Hook 2. Whoever completes the last tile of a run of columns is elected to announce it: here for the job loop, on all
// ranks for the pull form. Every tile's stores happen before its count, and all counts before the announcement.
template <typename Config>
struct combine_epilogue {
    const globals& G;

    void operator()(int pad_block, int col) const {
        const combination& C = *G.combine;
        const int tiles = G.cols / Config::COL_BLOCK / C.signal_groups, group = col / tiles;
        int32_t* word = C.counters + FINISHED + pad_block * C.signal_groups + group;
        delay(G, 0);
        if (__atomic_add_fetch(word, 1, __ATOMIC_ACQ_REL) != tiles * (G.pad / Config::ROW_BLOCK)) return;
        delay(G, 1);
        const bool everywhere = C.form == TKT_FORM_PULL;
        for (int r = everywhere ? 0 : G.rank; r < (everywhere ? G.world : G.rank + 1); ++r)
            __atomic_store_n(landed_word(G, r, G.rank, pad_block, group), C.epoch, __ATOMIC_RELEASE);
    }
};

// A run of columns of one item's weighted sum, and the slots that go into it.
struct combine_job {
    int item, group;
    const int32_t* slots;   // (top_k)
    const int32_t* owners;  // (top_k), or null: this rank, where a slot is not negative
    const float* weights;   // (top_k)

    int owner(const globals& G, int x) const { return owners ? owners[x] : slots[x] < 0 ? -1 : G.rank; }
};

inline combine_job job_at(const globals& G, int place) {
    const combination& C = *G.combine;
    const int item = C.jobs[place] / C.signal_groups, group = C.jobs[place] % C.signal_groups;
    const int64_t at = int64_t(item) * G.top_k;
    if (C.form == TKT_FORM_PULL)
        return {item, group, C.owner_slots + at, C.owners + at,
                C.topk_weights + (int64_t(G.rank) * G.tokens + item) * G.top_k};
    const int32_t* token = G.pull_tokens + int64_t(item) * 2;
    return {item, group, G.pull_slots + at, nullptr,
            C.topk_weights + (int64_t(token[0]) * G.tokens + token[1]) * G.top_k};
}

inline bool has_landed(const globals& G, const combine_job& job) {
    for (int x = 0; x < G.top_k; ++x) {
        const int owner = job.owner(G, x);
        if (owner >= 0 && __atomic_load_n(landed_word(G, G.rank, owner, job.slots[x] / G.pad, job.group),
                                          __ATOMIC_ACQUIRE) < G.combine->epoch)
            return false;
    }
    return true;
}

inline bool wait_landed(const globals& G, const Warp& warp, const combine_job& job) {
    const combination& C = *G.combine;
    for (int x = 0; x < G.top_k; ++x) {
        const int owner = job.owner(G, x);
        if (owner < 0) continue;
        const uint64_t* word = landed_word(G, G.rank, owner, job.slots[x] / G.pad, job.group);
        if (!wait_word(warp, "landed", int(word - C.landed[G.rank]), word, int64_t(C.epoch))) return false;
    }
    return true;
}

// Σ over the rows that `owner` holds, in the order of the token's experts, NR columns from `col`; fp32.
inline void weighted_sum(const globals& G, const combine_job& job, int owner, int col, fvec (&sum)[NV]) {
    for (int v = 0; v < NV; ++v) sum[v] = fvec{};
    for (int x = 0; x < G.top_k; ++x) {
        if (job.owner(G, x) != owner) continue;
        const bf16* row = G.combine->rows[owner] + int64_t(job.slots[x]) * G.cols + col;
        const fvec weight = job.weights[x] - fvec{};
        for (int v = 0; v < NV; ++v) sum[v] += weight * to_float(load_half(row + v * LANES));
    }
}

inline void store_halves(bf16* to, const fvec (&sum)[NV]) {
    for (int v = 0; v < NV; ++v) {
        const hvec value = to_half(sum[v]);
        memcpy(to + v * LANES, &value, sizeof value);
    }
}

// Rows of one batch are pushed: the last push that a rank is owed raises its watermark. One word, one writer.
inline void retire(const globals& G, int destination, int rows) {
    const combination& C = *G.combine;
    const int owed = C.push_expected[destination] * C.signal_groups;
    delay(G, 2);
    if (__atomic_add_fetch(&C.counters[PUSHED + destination], rows, __ATOMIC_ACQ_REL) != owed) return;
    delay(G, 3);
    __atomic_store_n(&C.watermarks[destination][G.rank], C.epoch, __ATOMIC_RELEASE);
}

// Pre-reduce: forms each job's sum in a row slot and pushes it to the token's source rank.
template <typename Config>
struct push_form {
    const globals& G;
    const Warp& warp;
    combine_shared<Config>& smem;

    int width() const { return G.cols / G.combine->signal_groups; }
    bf16* slot(int index) const { return smem.slot(warp.index, G.combine->rows_in_flight, index, width()); }

    void form(const combine_job& job, int index) const {
        bf16* to = slot(index);
        fvec sum[NV];
        for (int col = 0; col < width(); col += NR) {
            weighted_sum(G, job, G.rank, job.group * width() + col, sum);
            store_halves(to + col, sum);
        }
    }

    // `done`: the formed ones among `jobs`, a bit each.
    void push(const combine_job* jobs, uint32_t done) const {
        int rows[TKT_MAX_WORLD] = {};
        for (; done; done &= done - 1) {
            const int i = __builtin_ctz(done);
            const int32_t* token = G.pull_tokens + int64_t(jobs[i].item) * 2;
            const int64_t row = int64_t(G.rank) * G.tokens + token[1];
            delay(G, 4);
            memcpy(G.combine->staging[token[0]] + row * G.cols + jobs[i].group * width(), slot(i), width() * 2);
            ++rows[token[0]];
        }
        for (int r = 0; r < G.world; ++r)
            if (rows[r]) retire(G, r, rows[r]);
    }
};

// Pull: an own token's whole result, from the rows of every rank that holds one. Partial sums are rounded rank by rank
// as a push would round them, so that both forms give the same bits.
template <typename Config>
struct pull_form {
    const globals& G;

    void form(const combine_job& job, int) const {
        const int width = G.cols / G.combine->signal_groups;
        uint32_t holders = 0;
        for (int x = 0; x < G.top_k; ++x) holders |= 1u << job.owners[x];
        for (int col = job.group * width; col < (job.group + 1) * width; col += NR) {
            fvec total[NV] = {}, sum[NV];
            for (uint32_t left = holders; left; left &= left - 1) {
                weighted_sum(G, job, __builtin_ctz(left), col, sum);
                for (int v = 0; v < NV; ++v) total[v] += to_float(to_half(sum[v]));
            }
            store_halves(G.combine->y + int64_t(job.item) * G.cols + col, total);
        }
    }
    void push(const combine_job*, uint32_t) const {}
};

// Every thread draws jobs until none is left. Of those it holds, whichever has landed goes first.
template <typename Form>
bool combine_jobs(const globals& G, const Warp& warp, const Form& form) {
    const combination& C = *G.combine;
    combine_job jobs[MOST_ROWS_IN_FLIGHT];
    for (;;) {
        const int first = __atomic_fetch_add(&C.counters[NEXT_JOB], C.rows_in_flight, __ATOMIC_RELAXED);
        if (first >= C.num_jobs) return true;
        const int held = C.num_jobs - first < C.rows_in_flight ? C.num_jobs - first : C.rows_in_flight;
        for (int i = 0; i < held; ++i) jobs[i] = job_at(G, first + i);
        for (uint32_t waiting = (1u << held) - 1; waiting;) {
            if (warp.launch.stopped()) return false;
            uint32_t formed = 0;
            for (uint32_t left = waiting; left; left &= left - 1) {
                const int i = __builtin_ctz(left);
                if ((G.roles & TKT_GATED) && !has_landed(G, jobs[i])) continue;
                delay(G, 5);
                form.form(jobs[i], i);
                formed |= 1u << i;
            }
            if (formed)
                form.push(jobs, formed);
            else if (!wait_landed(G, warp, jobs[__builtin_ctz(waiting)]))
                return false;
            waiting &= ~formed;
        }
    }
}

// Sums the partial rows of own tokens in rank order, once the ranks that owe them have said that they are there.
inline void reduce(const globals& G, const Warp& warp) {
    const combination& C = *G.combine;
    uint32_t whole = 0;  // ranks whose watermark was seen
    for (int token; (token = __atomic_fetch_add(&C.counters[NEXT_TOKEN], 1, __ATOMIC_RELAXED)) < G.tokens;) {
        if (warp.launch.stopped()) return;
        const int32_t* contributes = C.final_contrib + int64_t(token) * G.world;
        for (int r = 0; r < G.world; ++r) {
            if (!contributes[r] || (whole >> r & 1)) continue;
            if (!wait_word(warp, "watermark", r, &C.watermarks[G.rank][r], int64_t(C.epoch))) return;
            whole |= 1u << r;
        }
        delay(G, 6);
        for (int col = 0; col < G.cols; col += NR) {
            fvec total[NV] = {};
            for (int r = 0; r < G.world; ++r) {
                if (!contributes[r]) continue;
                const bf16* row = C.staging[G.rank] + (int64_t(r) * G.tokens + token) * G.cols + col;
                for (int v = 0; v < NV; ++v) total[v] += to_float(load_half(row + v * LANES));
            }
            store_halves(C.y + int64_t(token) * G.cols + col, total);
        }
    }
}

}  // namespace tkt
