// The rows of one server: for every table an arena of records [weights | optimizer state] and a bit per row
// that says whether it was ever changed; and the parities it holds of other servers' rows. Every method checks
// all it was given before it changes anything.
// A method may be called while another reads; calls that change rows are the caller's to keep apart.
//
// Slot b * k + j holds member j of block b. Its parities are at distance d = k - j and the r - 1 servers behind
// that one in the ring: (d, r) is its coding group. Parities are relative: parity q of a block is the sum over its
// members of coefficient * (value ^ initial value), so it starts as zero, and rows never touched add nothing.
// A value is published when parities stand for it: the record as it was at the last flush of its group.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "regrow/arena.hpp"
#include "regrow/buffer.hpp"
#include "regrow/layout.hpp"
#include "regrow/optimizers.hpp"
#include "regrow/pending.hpp"
#include "regrow/priority.hpp"

namespace regrow {

struct TableSettings {
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t k = 1;
  int64_t r = 0;
  Optimizer optimizer = Optimizer::sgd;
  OptimizerSettings numbers;
  uint64_t seed = 0;
  double init_bound = 0.0;
  int64_t table = 0;  // its number in the job: part of its placement and of its initial values
};

// Rows whose parities are at the same servers, seen from their own: at distance, ..., distance + r - 1.
struct CodingGroup {
  int64_t distance = 1;
  int64_t r = 1;
};

struct ShardSettings {
  int64_t servers = 1;
  int64_t server = 0;
  int64_t rings = 1;                // independent rings
  std::vector<CodingGroup> coding;  // none: no table has parities, whatever its r
  bool recovering = false;          // no row is there until it was filled in, put or loaded
};

// Rows of several tables, in the order of the tables.
struct RowNames {
  std::vector<int32_t> counts;
  std::vector<uint32_t> slots;
};

struct Flush {
  std::vector<int32_t> counts;
  Buffer<uint32_t> slots;
  Buffer<float> deltas;  // whole records: published value ^ present value
};

// Checkpoints to different places, each with its own idea of which rows are new to it. Too small: a caller is refused;
// too large: only the time a settle() takes, which visits the bits of each.
inline constexpr size_t tenants_max = 4;

// Rows as a chunk of a checkpoint has them. Per table: numbers of rows, rising, then [rows][dim] weights, then each
// part of the optimizer's state. What is behind the last row means nothing.
struct CapturedChunk {
  std::vector<int32_t> counts;
  Buffer<uint32_t> words;  // numbers, and the bits of floats
};

// What one table takes on one server, in bytes, parities included; the same on every server.
size_t shard_bytes(int64_t rows, int64_t dim, int64_t k, int64_t r, int64_t rings, int64_t servers,
                   Optimizer optimizer);

struct RecordPart;  // of a record: floats that follow each other

class Shard {
 public:
  explicit Shard(const ShardSettings& settings);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  size_t add_table(const TableSettings& settings);

  size_t table_count() const { return tables_.size(); }
  size_t memory_bytes() const;
  size_t redundancy_bytes() const;  // the part of it that parities and their bits take
  uint32_t slots(size_t table) const { return at(table).slots; }
  uint32_t blocks(size_t table) const { return at(table).blocks; }
  size_t record_floats(size_t table) const { return at(table).records.stride; }
  int64_t servers() const { return settings_.servers; }
  int64_t server() const { return settings_.server; }

  // `counts` says how many of `slots` belong to table 0, table 1, ...; floats are the rows in the same order.
  void gather(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out) const;
  // `rates`: the learning rate of each table for this call; none: those of its settings.
  void update(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> grads,
              int64_t step, std::span<const double> rates = {});
  void assign_untouched(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                        std::span<const float> weights);

  void read_records(size_t table, int64_t first_slot, int64_t count, std::span<float> out) const;
  void write_records(size_t table, int64_t first_slot, int64_t count, std::span<const float> source);
  std::vector<uint64_t> touched(size_t table) const;

  // ---- as the source of rows that others hold parities of (src/flush.cpp)

  size_t pending_rows(size_t group) const;
  size_t pending_bytes() const;
  // In no particular order. With `keep` it is only looked at: nothing becomes published.
  Flush take_flush(size_t group, bool keep = false);
  // Published value ^ initial value, whole records.
  void published(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out) const;
  // Touched rows of a group from a block on, and the block to go on from: blocks(table) at the end.
  std::pair<std::vector<uint32_t>, uint32_t> next_touched(size_t table, size_t group, int64_t block_first,
                                                          int64_t rows_max) const;

  // ---- as a holder of parities (src/parity.cpp)

  void parity_apply(int64_t source, std::span<const int32_t> counts, std::span<const uint32_t> slots,
                    std::span<const float> deltas);
  // records ^= parities: what is left when the other members' parts are in `records`.
  void parity_add(int64_t q, std::span<const int32_t> counts, std::span<const uint32_t> blocks,
                  std::span<float> records) const;
  void parity_read(int64_t q, std::span<const int32_t> counts, std::span<const uint32_t> blocks,
                   std::span<float> out) const;
  // One bit per block: whether data member `member` of the block, whose parity q is here, was ever touched.
  std::span<const uint64_t> parity_members(size_t table, int64_t q, int64_t member) const;
  std::span<const uint64_t> parity_touched(int64_t source, size_t group, size_t table) const;
  // Parities q of a table are zeros again, and none of their members was touched.
  void parity_void(size_t table, int64_t q);

  // ---- as the source of checkpoints (src/capture.cpp). All of these are calls that change rows: the caller keeps
  // them apart from update and its like, and from each other.

  // From now on it is known which rows changed since the tenant's last capture; all touched rows are dirty to it.
  size_t add_tenant();
  size_t dirty_rows(size_t tenant);
  // At one instant: the tenant's dirty rows (all touched ones if `full`) are captured and no longer dirty to it. Of a
  // table with a priority, unless `full`, only as many as it allows: the others stay dirty. Which those are is found
  // in slices, by choose_captured(), as of that instant; whoever asks before has to wait for all of it.
  void begin_capture(size_t tenant, bool full);
  // Goes on choosing, for about so many rows. False: it is known.
  bool choose_captured(int64_t rows);
  // Captured rows not taken yet, as they were at begin_capture: a chunk of up to bytes_max bytes, at least one row,
  // none at the end. By table and slot; with `aside_first`, those that are kept aside come in an earlier call. Slots
  // that no row of the table has are taken and left out.
  CapturedChunk capture_chunk(int64_t bytes_max, bool aside_first = false);
  // Begins the next chunk, or goes on with it, for about slice_bytes; which rows it has is decided when it is begun.
  // False: it is ready, and capture_chunk() has only to give it.
  bool prepare_chunk(int64_t bytes_max, bool aside_first, int64_t slice_bytes);
  size_t capture_left();
  size_t capture_side_bytes() const;  // of records kept aside, because they changed before they were taken
  // Not durable: what was captured is dirty again. Durable: only when all rows were taken.
  void end_capture(bool durable);

  // ---- which rows go first (src/shard_priority.cpp), also calls that change rows

  // From now on; before any update was noted, or when the last capture had them all. Tables not named are always
  // captured whole.
  void set_priority(size_t tenant, PriorityKind kind, std::span<const int64_t> tables, double share, uint64_t seed,
                    int64_t period);
  // One worker's push updates these rows, each at most once.
  void note_updates(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  uint64_t updates_noted() const { return updates_noted_; }
  void set_updates_noted(uint64_t total) { updates_noted_ = total; }
  uint64_t updates_uncaptured(size_t tenant);
  size_t capture_skipped();    // rows that the last capture left out
  uint64_t updates_skipped();  // and updates of them, up to its instant
  size_t priority_bytes() const;
  size_t count_bytes() const;  // of it, for exact counts

  // The way back. Of these rows of a table, given by their numbers, each at most once, and parts as above, those that
  // live here get these values; returns how many. Not into a table that comes back from parities. Into one without,
  // once know_touched() said that rows are to come: only those that are missing, and they are not dirty to `clean_to`.
  size_t load_rows(size_t table, std::span<const uint32_t> ids, const std::vector<std::span<const float>>& values,
                   std::optional<size_t> clean_to = {});

  // The slots of those of these rows of a table that live here, a bit each.
  std::vector<uint64_t> find_slots(size_t table, std::span<const uint32_t> ids) const;

  // ---- as the replacement of a server that died (src/recovery.cpp)

  // Of rows that are not there yet: which were touched (missing, until put or loaded) and which were not (blank). The
  // group behind the last is that of all tables without parities.
  void know_touched(size_t group, size_t table, std::span<const uint64_t> words);
  RowNames prepare(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  size_t put(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> relatives);
  size_t fill(int64_t rows_max);
  size_t missing_rows(std::optional<size_t> group = {}) const;  // those of which nothing is known included
  size_t blank_rows() const;

 private:
  struct Parity {
    Arena arena;
    float* base;        // [block][q], as long as the table's records
    uint64_t* members;  // [q][member]: a bitmap over blocks
    size_t words;       // in each of them
  };
  // Rows of a table that was not filled in: absent until their bit is set.
  struct Recovery {
    Arena arena;
    uint64_t* present;
    uint64_t* known;              // whether it was touched, in Records::touched
    std::vector<size_t> missing;  // per member; without parities, all are of one group and counted as of one member
    size_t blank;
    uint32_t fill_next;  // no slot before it is blank
    size_t unknown;      // absent rows of which know_touched() said nothing
    size_t absent_rows() const { return std::accumulate(missing.begin(), missing.end(), blank); }
    bool absent(uint32_t slot) const { return !(present[slot / 64] >> (slot % 64) & 1); }
  };
  // Which rows changed, for captures. Every change sets one bit, in Records::changed; settle() moves what is set
  // there to all that want to know. So a change costs the same for any number of tenants, and without any.
  struct Tracking {
    using Bits = std::vector<uint64_t>;
    Bits settled;  // touched rows; those changed since the last settle() may be missing
    std::array<Bits, tenants_max> dirty;
    // Of the capture under way: the rows it is of, those not taken yet, and those it waits for no longer (taken, kept
    // aside, or never captured).
    Bits captured, left, kept;
    size_t rows_left = 0;
    size_t word_next = 0;  // no word of `left` before it has a bit
    // Per list of rows kept aside: those taken, and the first that aside_first has not looked at yet.
    std::array<size_t, PendingRows::ranges_max> taken{}, looked{};
  };
  struct Table {
    TableSettings settings;
    Layout layout;
    Divider per_k;
    uint32_t slots;
    uint32_t blocks;
    uint64_t initial_key;
    Arena arena;
    Records records;
    std::optional<Parity> parity;          // if r > 0 and the shard codes
    std::unique_ptr<PendingRows> pending;  // likewise
    std::optional<Recovery> recovery;      // while rows are absent
    bool returning = false;                // rows were said to come: for good, load_rows() changes no row that is here
    std::unique_ptr<Tracking> tracking;    // once there are tenants
    std::unique_ptr<PendingRows> aside;    // while a capture has rows to take
    uint32_t k() const { return per_k.divisor(); }
    uint32_t r() const { return static_cast<uint32_t>(settings.r); }
    // Members that are counted apart, and which of them a slot is.
    uint32_t members() const { return parity ? k() : 1; }
    uint32_t member_of(uint32_t slot) const { return parity ? slot - per_k.quotient(slot) * k() : 0; }
    size_t words() const { return (size_t{slots} + 63) / 64; }
    uint64_t touched_word(size_t word) const {
      // In this order: a bit that settle() moves meanwhile is seen in one of both places.
      const uint64_t changed = __atomic_load_n(records.changed + word, __ATOMIC_ACQUIRE);
      return tracking ? changed | __atomic_load_n(tracking->settled.data() + word, __ATOMIC_RELAXED) : changed;
    }
    bool touched(uint32_t slot) const { return touched_word(slot / 64) >> (slot % 64) & 1; }
  };
  // What a tenant knows of updates. Per table: those that are in no capture, and in which order rows are captured.
  struct Priority {
    PriorityKind kind = PriorityKind::none;
    uint64_t period = 1;
    uint64_t calls = 0;
    std::vector<std::unique_ptr<RowPriority>> rows;  // null where all rows are captured
    std::vector<uint64_t> uncaptured;
    // Of the capture under way: what it has, which comes back if it is not durable.
    std::vector<RowPriority::Held> held;
    std::vector<uint64_t> held_updates;
    RowPriority* of(size_t table) const { return table < rows.size() ? rows[table].get() : nullptr; }
  };
  // A capture whose rows are not all known yet. Pushes meanwhile are counted when they are: until then, counts are
  // those of the instant.
  struct Noted {
    std::vector<int32_t> counts;
    std::vector<uint32_t> slots;
  };
  struct Choosing {
    bool full;
    size_t table = 0;
    std::optional<RowPriority::Choosing> rows;  // of that table
    std::vector<Noted> noted;
    size_t noted_next = 0;
  };
  struct Share {  // what a call takes of each table: rows kept aside, and others
    std::vector<size_t> aside, rest;
    size_t rows;
    size_t count(size_t table) const { return aside[table] + rest[table]; }
  };
  struct Started {  // a chunk of which some rows are copied
    CapturedChunk captured;
    Buffer<uint32_t> slots;
    Share share;
    size_t table = 0;
    bool selected = false;  // of that table: which rows
    size_t rows = 0;        // of that table, and how many of them are copied
    size_t rows_copied = 0;
    size_t slots_copied = 0;         // of all tables, with holes
    uint32_t* slots_next = nullptr;  // of that table
    uint32_t* words_next = nullptr;
  };
  void reserve_room(std::span<const int32_t> counts);  // for what is saved of rows before they change
  struct Run;                                          // a piece of a call that lies within one table
  enum class Width { weights, record };                // how much of a row the floats of a call are

  const Table& at(size_t table) const;
  int64_t ring() const { return settings_.servers / settings_.rings; }
  std::optional<uint32_t> member_in(const Table& table, size_t group) const;
  uint32_t checked_member(size_t table, size_t group) const;
  bool is_bare(size_t group) const;
  void check_group(size_t group) const;
  void check_call(std::span<const int32_t> counts, std::span<const uint32_t> slots, size_t floats,
                  Width width = Width::weights) const;
  void check_counts(std::span<const int32_t> counts, std::span<const uint32_t> slots) const;
  void check_ranges(std::span<const int32_t> counts, std::span<const uint32_t> slots) const;
  void check_range(size_t table, int64_t first_slot, int64_t count, size_t floats) const;
  void check_present(std::span<const int32_t> counts, std::span<const uint32_t> slots) const;
  void check_known(std::span<const int32_t> counts, std::span<const uint32_t> slots) const;
  void check_slots(size_t table, std::span<const uint32_t> slots, uint32_t end, const char* name) const;
  template <typename Body>
  void for_runs(std::span<const int32_t> counts, std::span<const uint32_t> slots, Width width, Body&& body) const;
  Arena::Pages pages() const { return recovering_ ? Arena::Pages::small : Arena::Pages::huge; }
  void protect(Table& table) const;
  void fill_initial(const Table& table) const;
  void write_initial(const Table& table, uint32_t slot, float* weights) const;
  // out = record ^ initial record: from a value to a relative one, and back.
  void write_relative(const Table& table, uint32_t slot, const float* record, float* out) const;
  void check_source(int64_t source) const;
  std::vector<int32_t> parities_of(int64_t source, const Table& table) const;
  void check_parities(int64_t q, std::span<const int32_t> counts, std::span<const uint32_t> blocks,
                      size_t floats_given) const;
  void check_held(int64_t source, size_t table, std::span<const int32_t> parities,
                  std::span<const uint32_t> slots) const;
  void apply_part(const Table& table, std::span<const int32_t> parities, std::span<const uint32_t> slots,
                  const float* deltas, size_t part, size_t parts) const;
  void end_recovery();
  void check_tenant(size_t tenant) const;
  void track(Table& table, size_t tenants) const;
  void settle(Table& table) const;
  size_t aside_left(const Table& table) const;
  void select(Table& table, size_t aside, size_t rest, uint32_t* slots) const;
  Share share(int64_t bytes_max, bool aside_first, const std::vector<size_t>& row_bytes) const;
  void copy_rows(const Table& table, std::span<const uint32_t> slots, RecordPart part, float* out,
                 bool past_caches) const;
  void copy_part(const Run& run, RecordPart part, float* out, bool past_caches) const;
  void forget(Table& table, std::span<const uint32_t> slots) const;
  void free_lists(Table& table) const;
  void begin_chunk(int64_t bytes_max, bool aside_first);
  size_t copy_some(size_t rows_max);
  void begin_priority(size_t tenant, bool full);
  void finish_choosing();
  void end_choice(size_t table, RowPriority::Choosing&& choosing);
  void leave_out(Table& table, const Tracking::Bits& chosen) const;
  void count_updates(Priority& priority, std::span<const int32_t> counts, std::span<const uint32_t> slots);
  void end_priority(size_t tenant, bool durable);
  void keep_copies(size_t table, std::span<const uint32_t> slots) const;
  uint64_t rows_here(const Table& table) const;
  size_t take_missing(const Table& table, uint32_t* rows, uint32_t* slots, size_t count) const;
  void mark_loaded(size_t table, std::span<const uint32_t> slots, std::optional<size_t> clean_to) const;

  ShardSettings settings_;
  std::vector<Table> tables_;
  bool recovering_ = false;  // some table has rows that are absent
  size_t tenants_ = 0;
  std::array<Priority, tenants_max> priorities_;
  uint64_t updates_noted_ = 0;
  size_t capture_skipped_ = 0;       // of the last capture that began
  uint64_t updates_skipped_ = 0;     // likewise
  std::optional<size_t> capturing_;  // the tenant of the capture under way
  std::optional<Choosing> choosing_;
  std::optional<Started> started_;
  mutable std::mutex index_mutex_;  // published() brings the index of pending rows up to date
};

}  // namespace regrow
