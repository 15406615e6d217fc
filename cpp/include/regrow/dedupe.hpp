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
  // Starts a list of at most `keys` keys. Keys below the table's capacity are then their own hash, which
  // `direct` promises for all of them.
  void begin(size_t keys, uint64_t key_end) {
    size_t capacity = std::bit_ceil(keys * 2 < 64 ? size_t{64} : keys * 2);
    if (capacity > capacity_) {
      entries_ = std::make_unique<uint32_t[]>(capacity);
      capacity_ = capacity;
      base_ = 1;
    } else if (keys > UINT32_MAX - base_ - found_) {
      std::memset(entries_.get(), 0, capacity_ * sizeof(uint32_t));
      base_ = 1;
    } else {
      base_ += found_;
    }
    found_ = 0;
    // Small lists use a small part of a table grown by a large one: less cache. Any part will do, because
    // entries written by earlier lists never count.
    bits_ = std::countr_zero(capacity);
    direct_ = key_end <= capacity;
  }

  bool direct() const { return direct_; }
  uint32_t found() const { return found_; }

  // The number of `key`, with lookup_first set when it is new. distinct[n] holds key n; new keys are appended.
  uint32_t number(uint32_t key, uint32_t* distinct) {
    if (direct_) {
      uint32_t& entry = entries_[key];
      if (entry >= base_) return entry - base_;
      return add(entry, key, distinct);
    }
    const uint32_t mask = (uint32_t{1} << bits_) - 1;
    for (uint32_t at = hashed(key);; at = (at + 1) & mask) {
      uint32_t& entry = entries_[at];
      if (entry < base_) return add(entry, key, distinct);
      if (distinct[entry - base_] == key) return entry - base_;
    }
  }

 private:
  uint32_t hashed(uint32_t key) const { return (key * 0x9e3779b1u) >> (32 - bits_); }

  uint32_t add(uint32_t& entry, uint32_t key, uint32_t* distinct) {
    entry = base_ + found_;
    distinct[found_] = key;
    return found_++ | lookup_first;
  }

  std::unique_ptr<uint32_t[]> entries_;
  size_t capacity_ = 0;
  int bits_ = 6;
  bool direct_ = false;
  uint32_t base_ = 1;
  uint32_t found_ = 0;
};

}  // namespace regrow
