// Sums the pushes of several workers into one: rows with equal (table, slot) are added in the order of the
// list, and appear in the order of their first occurrence.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "regrow/buffer.hpp"

namespace regrow {

struct PushView {
  std::span<const int32_t> counts;
  std::span<const uint32_t> slots;
  std::span<const float> grads;
};

struct SummedPush {
  std::vector<int32_t> counts;
  Buffer<uint32_t> slots;
  Buffer<float> grads;
};

SummedPush sum_pushes(std::span<const int32_t> dims, std::span<const PushView> parts);

// Whether some slot is named twice within its table: updates of one row by two threads would damage it.
bool has_repeated_slots(std::span<const int32_t> counts, std::span<const uint32_t> slots);

}  // namespace regrow
