// The signals of csrc/comm/signals.cuh that the dispatch role uses, for lanes on the CPU.
#pragma once

#include "local_signals.cuh"

namespace tkt {

template <wait_role ROLE, wait_word WORD, int PAUSE, typename Ready, typename Seen>
bool spin_until(const spin_guard&, int, int64_t, Ready ready, Seen) {
    return ready();
}

}  // namespace tkt
