// The signals of csrc/comm/signals.cuh that the push role and its gate use, for lanes on the CPU. What stores wrote is
// seen by other ranks only behind a system fence: of a lane of their warp, or of one that has counted in a word after
// their warp did.
#pragma once

#include <map>

#include "local_signals.cuh"

namespace lanes {

struct performed {
    const warp* by;
    char* to;
    std::vector<char> bytes;
    std::vector<const int32_t*> released;  // words in which its warp has counted since
};
inline std::vector<performed> unseen;

inline void keep(const copy& one) { unseen.push_back({now->of, one.to, {one.from, one.from + one.bytes}, {}}); }

inline std::map<const lane*, std::vector<const int32_t*>> counted;  // words in which a lane has counted, not fenced yet

}  // namespace lanes

namespace tkt {

inline void (*on_announce)(uint64_t* word, uint64_t sequence) = nullptr;

inline uint64_t look_at_peers(const uint64_t* word) {
    lanes::yield();
    return *word;
}
inline void fence_system() {
    std::vector<lanes::performed> left;
    std::vector<const int32_t*>& words = lanes::counted[lanes::now];
    const auto acquired = [&](const lanes::performed& one) {
        return std::any_of(words.begin(), words.end(), [&](const int32_t* word) {
            return std::find(one.released.begin(), one.released.end(), word) != one.released.end();
        });
    };
    for (lanes::performed& one : lanes::unseen) {
        if (one.by == lanes::now->of || acquired(one))
            std::memcpy(one.to, one.bytes.data(), one.bytes.size());
        else
            left.push_back(std::move(one));
    }
    lanes::unseen = std::move(left);
    words.clear();
}
inline int32_t fetch_add_release(int32_t* word, int32_t value) {
    lanes::yield();
    for (lanes::performed& one : lanes::unseen)
        if (one.by == lanes::now->of) one.released.push_back(word);
    lanes::counted[lanes::now].push_back(word);
    const int32_t before = *word;
    *word += value;
    return before;
}
inline void announce_fenced(uint64_t* word, uint64_t sequence) {
    lanes::yield();
    on_announce(word, sequence);
    *word = sequence;
}

template <wait_role ROLE, wait_word WORD, int PAUSE, typename Ready, typename Seen>
bool spin_until(const spin_guard&, int, int64_t, Ready ready, Seen) {
    while (!ready()) lanes::yield();
    return true;
}

}  // namespace tkt
