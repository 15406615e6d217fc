// Which rows of a table a capture takes when it may not take all: the bookkeeping of one tenant about one table. How
// often each row was updated since it was last captured, in every kind; in `ssu` a list of rows seen in some of the
// pushes, in `scar` a copy of the weights as they were last captured. What a capture begins with is held until it ends:
// if it was not durable, counts are as if it had never been. Nothing here knows which rows are dirty but by argument.
// Rows are chosen in slices, so that nobody waits for a look at all of them; meanwhile nothing is counted.
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
#include "regrow/buffer.hpp"
#include "regrow/kernels.hpp"
#include "regrow/pending.hpp"

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
  // Of bytes alone, in some words of a bitmap: how many rows have which, in the first half of what is added to; and
  // which rows of a word of 64 are above one.
  using Lows = std::array<uint32_t, 512>;
  void count_lows(const std::vector<uint64_t>& rows, const std::vector<uint64_t>& except, size_t first, size_t end,
                  std::array<Lows, 4>& lows) const;
  uint64_t find_above(size_t word, uint32_t least) const;
  size_t bytes() const;

  // Counts of rows on their way to somewhere else.
  struct Held {
    std::vector<uint8_t> low;  // of one row after the other
    std::vector<std::pair<uint32_t, uint32_t>> full;
    uint64_t sum = 0;
  };
  Held make_held(size_t rows) const;  // with room for so many
  // Rows begin at zero again: first their bytes, from word to word, and then, alone and for all of them, the rest.
  void take(const std::vector<uint64_t>& rows, size_t first, size_t end, Held& held);
  void take_full(const std::vector<uint64_t>& rows, Held& held);
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

  struct Held {
    RowCounts::Held counts;
    std::vector<uint32_t> list;
  };
  // A capture of some rows begins: of all of them, or of rows_max if they are more. Which ones, and what was counted of
  // them, is found in slices of so many words of the bitmap; until the last of them nothing may be counted or sampled.
  struct Choosing {
    enum class Phase { ranks, exact, marks, turns, counts, done };
    Phase phase = Phase::done;
    size_t word = 0;                                   // the next of the phase
    Bits rows;                                         // that are chosen, in the end; empty: all
    Bits equal;                                        // those of the last rank, for some of which there is room
    std::vector<std::array<RowCounts::Lows, 4>> lows;  // mfu, per thread
    std::vector<std::vector<uint32_t>> buckets;        // scar, per thread
    Buffer<uint32_t> ranks;                            // scar, by slot
    uint32_t last = 0;                                 // the rank, or its bucket, up to which all are chosen
    size_t left = 0;                                   // how many of the last bucket are
    std::vector<uint32_t> exact;                       // ranks in the last bucket
    size_t count = 0;                                  // of rows that the capture has
    Held held;
  };
  Choosing begin(size_t dirty_rows, bool all) const;
  // True: there is more to do. `aside` has the weights that changed since, and is up to date.
  bool choose(Choosing& choosing, const Bits& dirty, const Records& records, const PendingRows* aside, size_t words);

  // Whether the capture was durable is told at its end, after reserve_end().
  void reserve_end(const Bits& rows, const Held& held, bool durable);
  void end(const Bits& rows, const Held& held, bool durable);

 private:
  void find_ranks(Choosing& choosing, const Bits& dirty, const Records& records, const PendingRows* aside, size_t end);
  void find_last(Choosing& choosing);
  void find_last_full(Choosing& choosing);
  void find_exact(Choosing& choosing, const Bits& dirty, size_t end) const;
  void mark(Choosing& choosing, const Bits& dirty, size_t end) const;
  void take_turns(Choosing& choosing, const Bits& dirty);
  void take_counts(Choosing& choosing, const Bits& dirty, size_t end);
  uint32_t find_change(uint32_t slot, const Records& records, const PendingRows* aside) const;
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
