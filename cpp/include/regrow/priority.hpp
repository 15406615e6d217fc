// Which rows of a table a capture takes when it may not take all: the bookkeeping of one tenant about one table. How
// often each row was updated since it was last captured, in every kind; in `ssu` a list of rows seen in some of the
// pushes, in `scar` a copy of the weights as they were last captured. What a capture begins with is held until it ends:
// if it was not durable, counts are as if it had never been. Nothing here knows which rows are dirty but by argument.
// The slow twin is the one of captures, tests/unit/store/dict_store.py.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "regrow/arena.hpp"
#include "regrow/kernels.hpp"

namespace regrow {

enum class PriorityKind { none, mfu, ssu, scar };
PriorityKind priority_from_name(std::string_view name);  // std::invalid_argument

// Exact counts per row: a byte each, and a hash table of how often it was full. So the common path is one byte; a row
// comes to the hash table once in 256 updates.
class RowCounts {
 public:
  explicit RowCounts(uint32_t slots);

  // One more for each of these rows; several threads may call it for different rows. Then settle(), alone, with the
  // same rows and all threads' together: rows whose byte was full are written down.
  void add(const uint32_t* slots, size_t count);
  void settle(const uint32_t* slots, size_t count);
  bool is_settled() const { return !wraps_.load(std::memory_order_relaxed); }

  uint64_t at(uint32_t slot) const;
  // A bit for each row whose byte was full; empty if none was.
  std::vector<uint64_t> find_full() const;
  // Of bytes alone: how many rows have which, and which rows of a word of 64 are above one.
  std::array<size_t, 256> count_lows(const std::vector<uint64_t>& rows, const std::vector<uint64_t>& except) const;
  uint64_t find_above(size_t word, uint32_t least) const;
  size_t bytes() const;

  // Counts of rows on their way to somewhere else.
  struct Held {
    std::vector<uint8_t> low;  // by slot
    std::vector<std::pair<uint32_t, uint32_t>> full;
    uint64_t sum = 0;
  };
  Held make_held() const;                                    // with room for all
  void take(const std::vector<uint64_t>& rows, Held& held);  // those rows begin at zero again
  // What was taken of rows that were counted further meanwhile. The first only sees to it that there is room.
  void reserve_back(const std::vector<uint64_t>& rows, const Held& held);
  void give_back(const std::vector<uint64_t>& rows, const Held& held);

 private:
  struct Full {
    uint32_t slot_after = 0;  // slot + 1: 0 is a free place, and no slot has the largest number
    uint32_t times = 0;       // 2^40 updates of a row between two captures would be too many
  };
  Full* place_of(uint32_t slot);
  void reserve(size_t more);
  void add_full(uint32_t slot, uint32_t times);

  uint32_t slots_;
  Arena arena_;
  uint8_t* low_;
  std::vector<Full> full_;  // a power of two, at most half of it in use
  size_t full_used_ = 0;
  std::atomic<size_t> wraps_{0};  // rows whose byte was full, not written down yet
};

class RowPriority {
 public:
  using Bits = std::vector<uint64_t>;
  struct Settings {
    PriorityKind kind;
    uint32_t slots;
    size_t dim;
    size_t rows_max;  // that a capture may take
    uint64_t key;     // of chance
  };
  explicit RowPriority(const Settings& settings);

  RowCounts counts;
  size_t rows_max() const { return settings_.rows_max; }
  PriorityKind kind() const { return settings_.kind; }
  size_t bytes() const;

  void sample(const uint32_t* slots, size_t count);                            // ssu: rows of a push that counts
  float* copy(uint32_t slot) const { return copies_ + slot * settings_.dim; }  // scar: weights last captured

  // rows_max of the dirty rows, which are more. Changes nothing; `next` is where the turn is then.
  struct Choice {
    Bits rows;
    uint32_t next;
  };
  Choice choose(const Bits& dirty, const Records& records) const;

  struct Held {
    RowCounts::Held counts;
    std::vector<uint32_t> list;
  };
  Held make_held() const;
  // A capture of these rows begins; whether it was durable is told at its end, after reserve_end().
  uint64_t begin(const Bits& rows, std::optional<uint32_t> next, Held& held);  // returns the updates it has
  void reserve_end(const Bits& rows, const Held& held, bool durable);
  void end(const Bits& rows, const Held& held, bool durable);

 private:
  template <typename Rank, typename Bucket>
  Choice choose_by(const Bits& dirty, uint32_t bucket_exact_end, Rank&& rank, Bucket&& bucket) const;
  Choice choose_counted(const Bits& dirty) const;
  Choice take_turns(Bits&& above, const Bits& equal) const;
  void find_changes(const Bits& dirty, const Records& records, uint32_t* ranks) const;
  void insert(uint32_t slot);

  Settings settings_;
  uint32_t turn_ = 0;  // among equals, rows from here on are chosen first
  // ssu
  std::vector<uint32_t> list_;
  Bits listed_;
  uint64_t evicted_ = 0;
  // scar
  std::optional<Arena> copies_arena_;
  float* copies_ = nullptr;
  Bits stale_;  // captured, but not durably: what the copy has is nowhere, so they go first
};

}  // namespace regrow
