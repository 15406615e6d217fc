// Several lists of rows become one, with the newest of each row: what merging checkpoints does per row. In two steps,
// so that the caller knows how much memory the second one fills.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace regrow {

// Where a row is: the list in the upper half, its position there in the lower.
using RowAt = uint64_t;

// One place for each number in the lists, numbers rising; of equal ones the place in the last list, and in it the last.
std::vector<RowAt> newest_rows(std::span<const std::span<const uint32_t>> lists);

// The rows at these places, `width` words each, one after the other. std::out_of_range, before anything is written, if
// there is no such place.
void gather_rows(std::span<const std::span<const uint32_t>> lists, size_t width, std::span<const RowAt> places,
                 std::span<uint32_t> out);

}  // namespace regrow
