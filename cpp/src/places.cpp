#include "regrow/places.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace regrow {
namespace {

void check_first(std::span<const int64_t> first, size_t places) {
  if (first.empty() || first.front() != 0 || !std::is_sorted(first.begin(), first.end()) ||
      static_cast<uint64_t>(first.back()) != places)
    throw std::invalid_argument("first must rise from 0 to " + std::to_string(places));
}

}  // namespace

TakenPlaces take_places(std::span<uint8_t> todo, std::span<const int64_t> first, std::span<const int64_t> floats,
                        int64_t place, int64_t bytes_max) {
  check_first(first, todo.size());
  if (floats.size() + 1 != first.size()) throw std::invalid_argument("floats and first are of different tables");
  if (std::any_of(floats.begin(), floats.end(), [](int64_t n) { return n < 1 || n > int64_t{1} << 32; }))
    throw std::invalid_argument("a record has at least one float");
  if (place < 0 || place > first.back())
    throw std::out_of_range("there is no place " + std::to_string(place) + " of " + std::to_string(first.back()));
  if (bytes_max < 1) throw std::invalid_argument("bytes_max must be at least 1, not " + std::to_string(bytes_max));
  TakenPlaces taken;
  taken.counts.assign(floats.size(), 0);
  int64_t left = bytes_max;
  size_t t = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), place) - first.begin()) - 1;
  for (; t < floats.size() && left > 0; ++t) {
    const int64_t record_bytes = floats[t] * static_cast<int64_t>(sizeof(float));
    const auto rows_max = static_cast<size_t>((left + record_bytes - 1) / record_bytes);
    const size_t before = taken.blocks.size();
    const int64_t end = first[t + 1];
    while (place < end && taken.blocks.size() - before < rows_max) {
      const auto* from = todo.data() + place;
      const auto* found = static_cast<const uint8_t*>(std::memchr(from, 1, static_cast<size_t>(end - place)));
      if (!found) {
        place = end;
        break;
      }
      place += found - from;
      for (; place < end && todo[static_cast<size_t>(place)] && taken.blocks.size() - before < rows_max; ++place) {
        todo[static_cast<size_t>(place)] = 0;
        taken.blocks.push_back(static_cast<uint32_t>(place - first[t]));
      }
    }
    taken.counts[t] = static_cast<int32_t>(taken.blocks.size() - before);
    left -= static_cast<int64_t>(taken.blocks.size() - before) * record_bytes;
  }
  taken.next = place;
  return taken;
}

void mark_places(std::span<uint8_t> flags, std::span<const int64_t> first, std::span<const int32_t> counts,
                 std::span<const uint32_t> blocks) {
  check_first(first, flags.size());
  if (counts.size() + 1 != first.size()) throw std::invalid_argument("counts and first are of different tables");
  size_t named = 0;
  for (const int32_t count : counts) {
    if (count < 0) throw std::invalid_argument("counts must not be negative");
    named += static_cast<size_t>(count);
  }
  if (named != blocks.size()) throw std::invalid_argument("counts do not describe the blocks");
  const uint32_t* block = blocks.data();
  for (size_t t = 0; t < counts.size(); block += counts[t], ++t)
    for (int32_t i = 0; i < counts[t]; ++i)
      if (int64_t{block[i]} >= first[t + 1] - first[t])
        throw std::out_of_range("block " + std::to_string(block[i]) + " of table " + std::to_string(t) +
                                " is out of range");
  block = blocks.data();
  for (size_t t = 0; t < counts.size(); block += counts[t], ++t)
    for (int32_t i = 0; i < counts[t]; ++i) flags[static_cast<size_t>(first[t]) + block[i]] = 1;
}

bool has_any_bit(std::span<const uint64_t> words, std::span<const uint32_t> bits) {
  for (const uint32_t bit : bits) {
    if (bit / 64 >= words.size()) throw std::out_of_range("there is no bit " + std::to_string(bit));
    if (words[bit / 64] >> (bit % 64) & 1) return true;
  }
  return false;
}

std::vector<uint8_t> find_nonzero(std::span<const float> records, int64_t floats) {
  if (floats < 1 || records.size() % static_cast<uint64_t>(floats))
    throw std::invalid_argument("records must have " + std::to_string(floats) + " floats each");
  const auto stride = static_cast<size_t>(floats);
  std::vector<uint8_t> found(records.size() / stride);
  for (size_t row = 0; row < found.size(); ++row) {
    uint32_t sum = 0;
    for (size_t i = 0; i < stride; ++i) {
      uint32_t bits;
      std::memcpy(&bits, records.data() + row * stride + i, sizeof bits);
      sum |= bits;
    }
    found[row] = sum != 0;
  }
  return found;
}

}  // namespace regrow
