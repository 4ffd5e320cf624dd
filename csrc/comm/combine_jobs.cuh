// What a warp sums next: pushes, of landed rows into partial rows, and reduces, of partial rows into results; or pulls, of
// landed rows of all ranks into results. One of each kind is drawn and looked up ahead, and nothing is summed before all
// that it adds is there.
#pragma once

#include "combine.cuh"

namespace tkt {

template <typename Globals>
struct combine_jobs {
    static constexpr uint32_t kAll = 0xffffffffu;
    static constexpr int kNone = -1, kPolls = 8;  // jobs between two looks at watermarks
    // How far a job is looked up: what one stage asks for, the next one reads. Behind `ready` there is none left.
    enum stage { undrawn, drawn, listed, known, ready, dry };

    enum class kind { none, push, reduce, pull };

    // `group`: its run of columns. A push goes to rank `token.x`; the others are of own token `token.y`.
    struct job {
        int2 token;
        int group;
        kind of;
    };

    const Globals& G;
    const uint64_t epoch;
    const int me;
    const bool pulls, reduces, early;

    // The chosen job: lane x holds a row, its weight and, of a pull, whose it is.
    job now{};
    int row = 0, owner = 0;
    float weight = 0.0f;
    bool stopped = false;  // the launch was told to abort

    // The next job of the list: its place there (first lane), its entry, what it is; lane x as above.
    stage listed_job = undrawn;
    int place = 0, entry = 0, slot = kNone, slot_owner = 0;
    int2 token{};
    float factor = 0.0f;

    // The next reduce: its number (first lane, then all), and which ranks owe (lanes).
    stage reduce = undrawn;
    int number = 0, turn = 0;
    bool owes = false;

    uint32_t landed_groups = 0, whole_groups = 0;  // known: all tiles have landed; all partial rows are here
    int jobs = 0;                                  // chosen so far

    TKT_DEVICE combine_jobs(const Globals& G, bool reduces, bool early)
        : G(G),
          epoch(*G.sequence),
          me(G.gemm.guard.rank),
          pulls(G.form == TKT_FORM_PULL),
          reduces(reduces && !pulls),
          early(this->reduces && early) {}

    TKT_DEVICE void look_up_listed() {
        switch (listed_job) {
            case undrawn:
                if (lane_id() == 0) place = draw(G.queue + kNextJob);
                break;
            case drawn: {
                const int at = __shfl_sync(kAll, place, 0);
                entry = at < __ldg(G.plan + kCombinePlanJobs) ? __ldg(G.jobs + at) : kNone;
                break;
            }
            case listed: {
                if (entry == kNone) {
                    listed_job = dry;
                    return;
                }
                const int item = entry / G.groups;
                const int64_t at = static_cast<int64_t>(item) * G.top_k + lane_id();
                token = pulls ? make_int2(me, item) : __ldg(G.pull_tokens + item);
                slot = lane_id() < G.top_k ? __ldg(G.slots + at) : kNone;
                if (pulls) slot_owner = lane_id() < G.top_k ? __ldg(G.owners + at) : kNone;
                break;
            }
            default: {
                const int64_t at = static_cast<int64_t>(token.x) * G.tokens + token.y;
                factor = lane_id() < G.top_k ? __ldg(G.topk_weights + at * G.top_k + lane_id()) : 0.0f;
            }
        }
        listed_job = static_cast<stage>(listed_job + 1);
    }
    TKT_DEVICE void take_listed() {
        now = {token, entry % G.groups, pulls ? kind::pull : kind::push};
        row = slot;
        owner = slot_owner;
        weight = factor;
        listed_job = undrawn;
        look_up_listed();
    }

    TKT_DEVICE void look_up_reduce() {
        if (reduce == undrawn) {
            if (lane_id() == 0) number = draw(G.queue + kNextToken);
            reduce = drawn;
            return;
        }
        turn = __shfl_sync(kAll, number, 0);
        reduce = turn < G.tokens * G.groups ? ready : dry;
        const int64_t at = static_cast<int64_t>(turn % G.tokens) * Globals::world + lane_id();
        owes = reduce == ready && lane_id() < Globals::world && __ldg(G.final_contrib + at);
    }
    TKT_DEVICE void take_reduce() {
        now = {make_int2(me, turn % G.tokens), turn / G.tokens, kind::reduce};
        row = owes ? lane_id() * G.tokens + now.token.y : kNone;
        weight = 1.0f;
        reduce = undrawn;
        look_up_reduce();
    }

    // A stage further with what comes next, while the rows of the chosen job are on their way.
    TKT_DEVICE void look_ahead() {
        if (listed_job < ready) {
            look_up_listed();
        } else if (reduces && (early || listed_job == dry) && reduce < ready) {
            look_up_reduce();
        }
    }

    // The next job: a reduce between two pushes where nothing would wait for it, else one of the list, at last what is left.
    TKT_DEVICE bool choose() {
        ++jobs;
        while (listed_job < ready) look_up_listed();
        if (listed_job == ready && !(early && now.of == kind::push && reduce_is_open())) {
            take_listed();
            return true;
        }
        if (!reduces) return false;
        while (reduce < ready) look_up_reduce();
        if (reduce == dry) return false;
        take_reduce();
        return true;
    }
    TKT_DEVICE bool reduce_is_open() {
        while (reduce < ready) look_up_reduce();
        if (reduce == dry) return false;
        const int group = turn / G.tokens;
        if (!(whole_groups >> group & 1) && jobs % kPolls == 0) look_whole(group, false);
        return whole_groups >> group & 1;
    }

    // Whether all that the chosen job adds is there; the copy engine may then read all of it for any lane.
    TKT_DEVICE bool admitted(bool may_wait) {
        if (now.of == kind::reduce) return whole_groups >> now.group & 1 || look_whole(now.group, may_wait);
        return !(G.roles & TKT_GATED) || landed_groups >> now.group & 1 || look_landed(may_wait);
    }
    // Rows and partial rows were written by the async proxy, whose writer waited until that was performed and then
    // released: the copy engine needs a fence after the acquire.
    TKT_DEVICE void admit() const {
        __syncwarp();
        fence_async();
    }
    TKT_DEVICE bool look_landed(bool may_wait) {
        const bool mine = row != kNone, asks = mine || (!pulls && lane_id() == kWarpThreads - 1);
        const uint64_t* const word = mine ? G.landed_word(me, pulls ? owner : me, row / G.gemm.pad, now.group)
                                          : G.whole_word(me, me, now.group);
        const auto seen = [&] { return pulls ? look_at_peers(word) : look(word); };
        bool there = asks && seen() >= epoch;
        const bool whole = __ballot_sync(kAll, there && !mine);
        if (whole) landed_groups |= 1u << now.group;
        bool all = whole || __all_sync(kAll, there || !mine);
        if (!all && may_wait) {
            if (mine && !there)
                there = spin_until<wait_role::combine, wait_word::landed, 64>(
                    G.gemm.guard, static_cast<int>(word - G.landed[me]), static_cast<int64_t>(epoch),
                    [&] { return seen() >= epoch; }, [&] { return static_cast<int64_t>(seen()); });
            all = __all_sync(kAll, there || !mine);
            stopped = !all;
        }
        if (all) admit();
        return all;
    }
    // Whether every rank that owes partial rows has pushed this run of columns.
    TKT_DEVICE bool look_whole(int group, bool may_wait) {
        bool there = true;
        if (lane_id() < Globals::world && __ldg(G.recv_from + lane_id())) {
            const int index = lane_id() * kMostCombineGroups + group;
            const uint64_t* const word = G.watermarks[me] + index;
            there = look_at_peers(word) >= epoch;
            if (!there && may_wait)
                there = spin_until<wait_role::reduce, wait_word::watermark, 64>(
                    G.gemm.guard, index, static_cast<int64_t>(epoch), [&] { return look_at_peers(word) >= epoch; },
                    [&] { return static_cast<int64_t>(look_at_peers(word)); });
        }
        const bool all = __all_sync(kAll, there);
        stopped = stopped || (may_wait && !all);
        if (!all) return false;
        whole_groups |= 1u << group;
        admit();
        return true;
    }
};

}  // namespace tkt
