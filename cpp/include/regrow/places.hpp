// What is to be decoded, as a byte per place. A place is the number of a block counted through all tables: blocks of
// table t have the places first[t] .. first[t + 1]. No Python object per row on the way of a sweep.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace regrow {

struct TakenPlaces {
  std::vector<int32_t> counts;  // by table
  std::vector<uint32_t> blocks;
  int64_t next;  // nothing is to be done before it
};

// Takes the next places that are to be done, from `place` on, until their records are `bytes_max` or more; they are not
// to be done any more. `floats` are those of a record, by table.
TakenPlaces take_places(std::span<uint8_t> todo, std::span<const int64_t> first, std::span<const int64_t> floats,
                        int64_t place, int64_t bytes_max);

// Sets the bytes of these blocks.
void mark_places(std::span<uint8_t> flags, std::span<const int64_t> first, std::span<const int32_t> counts,
                 std::span<const uint32_t> blocks);

// Whether any of these bits is set.
bool has_any_bit(std::span<const uint64_t> words, std::span<const uint32_t> bits);

// For each record of `floats`: 1 if any of its bits is set.
std::vector<uint8_t> find_nonzero(std::span<const float> records, int64_t floats);

}  // namespace regrow
