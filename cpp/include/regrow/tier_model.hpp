// A tiered store against a dictionary per checkpoint, on a disk that loses what was not synced: random rows, random
// upkeep, a crash at any write, and again. Everything follows from the seed.
#pragma once

#include <cstdint>
#include <string>

#include "regrow/tiered.hpp"

namespace regrow {

struct ModelRun {
  uint64_t crashes = 0, crashes_opening = 0, lives = 0, went_back = 0, calls = 0, checkpoints = 0, commits = 0;
  uint64_t rows_compared = 0, evictions = 0, evictions_young = 0, rounds = 0, damages = 0, damages_found = 0, full = 0;
  std::string failure;  // empty: none
};

ModelRun run_tier_model(uint64_t seed, uint64_t crashes, TierBug bug);

}  // namespace regrow
