// The signals of csrc/comm/signals.cuh, as those of the combine roles, for lanes on the CPU.
#pragma once

#include "combine_signals.cuh"
