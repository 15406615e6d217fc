// Numbers the distinct keys of a list in order of first occurrence. An open-addressing table that is never
// cleared between lists: an entry counts only if it was written since the list began, and numbers only grow.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "regrow/kernels.hpp"

namespace regrow {

class Dedupe {
 public:
  static constexpr size_t keys_max = size_t{1} << 28;
  static constexpr size_t entries_per_key = 4;  // fewer: more collisions; more: more cache

  Dedupe() = default;
  explicit Dedupe(uint32_t base) : base_(base) {}  // as if it had numbered so many keys before: for tests

  // Starts a list of at most `keys` keys (up to keys_max), all below key_end (up to 2^32).
  void begin(size_t keys, uint64_t key_end) {
    const size_t capacity = std::bit_ceil(keys < 16 ? 16 * entries_per_key : keys * entries_per_key);
    const bool numbers_end = keys > UINT32_MAX - base_ - found_;
    base_ = numbers_end ? 1 : base_ + found_;
    if (capacity > capacity_) {
      entries_ = std::make_unique<uint32_t[]>(capacity);
      capacity_ = capacity;
    } else if (numbers_end) {
      std::memset(entries_.get(), 0, capacity_ * sizeof(uint32_t));
    }
    found_ = 0;
    // Small lists use a small part of a table grown by a large one: less cache. Any part will do, because
    // entries written by earlier lists never count.
    bits_ = std::countr_zero(capacity);
    key_end_ = key_end;
    direct_ = key_end <= capacity;  // then a key is its own hash, and no two keys collide
  }

  uint32_t found() const { return found_; }

  // Writes the number of each key to numbers[i], with lookup_first set when the key is new. distinct[n] holds
  // key n; new keys are appended.
  // Returns how many keys were taken: all, or as many as come before the first one not below key_end.
  template <typename Key>
  size_t number(std::span<const Key> keys, uint32_t* numbers, uint32_t* distinct) {
    return direct_ ? number_as<true>(keys, numbers, distinct) : number_as<false>(keys, numbers, distinct);
  }

 private:
  // Whether a key is new is a coin toss that no branch predictor wins, so there is no branch for it: the key
  // is written where it would go if it were new, and an empty entry is read as if it pointed there.
  template <bool Direct, typename Key>
  size_t number_as(std::span<const Key> keys, uint32_t* numbers, uint32_t* distinct) {
    uint32_t* entries = entries_.get();
    const uint32_t base = base_;
    const uint32_t mask = (uint32_t{1} << bits_) - 1;
    const int shift = 32 - bits_;
    uint32_t found = found_;
    size_t i = 0;
    for (; i < keys.size(); ++i) {
      if (static_cast<uint64_t>(keys[i]) >= key_end_) break;
      const auto key = static_cast<uint32_t>(keys[i]);
      distinct[found] = key;
      for (uint32_t at = Direct ? key : (key * 0x9e3779b1u) >> shift;; at = (at + 1) & mask) {
        const uint32_t entry = entries[at];
        const uint32_t empty = 0u - static_cast<uint32_t>(entry < base);  // all ones, or none
        const uint32_t number = (found & empty) | ((entry - base) & ~empty);
        if (!Direct && distinct[number] != key) continue;
        const bool is_new = number == found;
        entries[at] = base + number;
        numbers[i] = number | (is_new ? lookup_first : 0);
        found += is_new;
        break;
      }
    }
    found_ = found;
    return i;
  }

  std::unique_ptr<uint32_t[]> entries_;
  size_t capacity_ = 0;
  int bits_ = 6;
  bool direct_ = false;
  uint64_t key_end_ = 0;
  uint32_t base_ = 1;
  uint32_t found_ = 0;
};

}  // namespace regrow
