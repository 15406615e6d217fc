// The rows of one server, more of them than fit its memory: a cache of frames over a home and a log on disk, and
// checkpoints made of what is written anyway. docs/tiered.md has the layout, the order of writes, and why.
//
// A row is in a frame, or else its newest version is in the log (`places` says where), or else at home (`homed`), or
// else it was never changed and has its initial value. Its epoch is the number of the first checkpoint that has it.
// All methods are called by one thread; only IoLanes has others, and they move bytes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "regrow/frame_map.hpp"
#include "regrow/frames.hpp"
#include "regrow/io_lanes.hpp"
#include "regrow/shard.hpp"
#include "regrow/slot_map.hpp"
#include "regrow/tier_home.hpp"
#include "regrow/tier_log.hpp"
#include "regrow/tier_state.hpp"

namespace regrow {

enum class TierPolicy { lru, none, self };

// Mistakes that a test plants to see that they are found.
enum class TierBug {
  none,
  no_incarnation,      // versions of a life that was left behind count for later checkpoints
  freed_first,         // versions go home before the checkpoint they belong to is committed
  no_sync,             // a checkpoint is called complete before it was synced
  pin_ignored,         // rows leave while somebody has them pinned
  pinned_not_written,  // a checkpoint is called complete without the rows that are pinned
  home_not_synced,     // segments are let go of before what was in them is durable at home
  neighbour_too_new,   // versions go home with their neighbours before their checkpoint is committed
  noted_too_new,       // a version that is not committed keeps one that counts from going home
};

// What docs/tiered.md says of the order of writes: raises if something is not so.
void check_order(bool fine, const char* text);

struct TierSettings {
  int64_t servers = 1;
  int64_t server = 0;
  int64_t rings = 1;
  uint64_t fingerprint = 0;
  size_t cache_bytes = 0;
  // Of all files; 0: what the rows need, and for the log as much again or what the cache asks for, whichever is more.
  // Too small: rows go home more often, or it is refused; too large: disk, memory for the places of rows in the log,
  // and going back reads more.
  uint64_t bytes_max = 0;
  uint64_t log_bytes_max = 0;               // 0: what follows from bytes_max
  uint64_t segment_bytes = 0;               // 0: what fits the records
  uint64_t unwritten_bytes_max = 16 << 20;  // of the log in memory: rows wait to leave beyond it
  uint64_t clean_bytes_max = 4 << 20;       // of the log that a round of the cleaner takes
  // The cleaner begins when so much of what the log may have is used. Too small: rows go home more often, and fewer of
  // a page together. Too large: it is late, and rows wait to leave; going back reads more.
  double clean_from = 0.875;
  TierPolicy policy = TierPolicy::lru;
  // Calls of fetch within which those who a row came for have pulled and pushed it. Too few: they keep it for
  // themselves. Too many: what nobody else wants stays for long. 0: all rows leave in the order of their last use.
  uint32_t patience = 0;
  std::optional<uint64_t> at_epoch;  // go back to it; else all is new
  bool threads = true;
  TierBug bug = TierBug::none;
};

class TieredShard {
 public:
  TieredShard(const TierSettings& settings, const std::vector<TableSettings>& tables, std::unique_ptr<Disk> disk);
  TieredShard(const TieredShard&) = delete;
  TieredShard& operator=(const TieredShard&) = delete;
  ~TieredShard();

  size_t table_count() const { return tables_.size(); }
  size_t memory_bytes() const;
  uint32_t slots(size_t table) const { return at(table).slots; }
  uint32_t blocks(size_t table) const { return at(table).slots / static_cast<uint32_t>(at(table).settings.k); }
  size_t record_floats(size_t table) const { return at(table).stride; }
  int64_t servers() const { return settings_.servers; }
  int64_t server() const { return settings_.server; }

  // ---- rows, as those of Shard (src/tiered.cpp)
  void gather(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out);
  void update(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> grads,
              int64_t step, std::span<const double> rates = {});
  std::vector<uint64_t> touched(size_t table) const;

  // ---- any rows, around the cache (src/tiered_around.cpp)
  void assign_untouched(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                        std::span<const float> weights);
  void read_records(size_t table, int64_t first_slot, int64_t count, std::span<float> out);
  void write_records(size_t table, int64_t first_slot, int64_t count, std::span<const float> source);
  size_t load_rows(size_t table, std::span<const uint32_t> ids, const std::vector<std::span<const float>>& values,
                   std::optional<size_t> clean_to = {});

  // ---- captures, as those of Shard (src/tiered_capture.cpp)
  size_t add_tenant();
  size_t dirty_rows(size_t tenant) const;
  void begin_capture(size_t tenant, bool full);
  CapturedChunk capture_chunk(int64_t bytes_max, bool aside_first = false);
  size_t capture_left() const;
  size_t capture_side_bytes() const;
  void end_capture(bool durable);
  void note_updates(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  uint64_t updates_noted() const { return updates_noted_; }
  void set_updates_noted(uint64_t total) { updates_noted_ = total; }
  uint64_t updates_uncaptured(size_t tenant) const;
  void check_tenant(size_t tenant) const;

  // ---- what is in memory (src/tiered_fetch.cpp)
  uint64_t fetch(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  std::vector<uint64_t> poll_fetched();
  void release(uint64_t ticket);
  int fetch_fd() const { return lanes_->fd(); }

  // ---- what is on disk (src/tiered_upkeep.cpp)
  bool upkeep();
  uint64_t begin_epoch();
  uint64_t poll_complete();
  void hasten(uint64_t epoch, double seconds_left);
  void commit_epoch(uint64_t epoch);
  uint64_t committed() const { return committed_; }
  std::map<std::string, double> report() const;
  std::string io_description() const { return disk_->description(); }
  bool is_mapped() const { return disk_->is_mapped(); }

  IoLanes& lanes() { return *lanes_; }  // for tests, which decide when a job is done

 private:
  using Bits = std::vector<uint64_t>;
  struct Tracking {  // as Shard's
    Bits settled, captured, left;
    std::array<Bits, tenants_max> dirty;
    size_t rows_left = 0;
    size_t word_next = 0;
    SlotMap aside;  // slot -> number of the record
    std::deque<Buffer<float>> records;
    size_t aside_left = 0;
  };
  struct Table {
    TableSettings settings;
    Layout layout;
    uint32_t slots;
    size_t stride;
    size_t dim;
    uint64_t initial_key;
    size_t frames_index;  // which Frames its rows are in
    HomeTable home;
    FrameMap frames;  // of rows in memory
    SlotMap loading;  // of rows that are being read
    SlotMap places;   // of rows whose newest version is in the log
    // Of rows that were written since the last commit: the version before that. And the same of the time before it.
    std::array<SlotMap, 2> places_before;
    Bits changed;  // as Records::changed of a Shard
    Bits homed;
    Bits gone, gone_before;  // rows that left the memory lately, never wanted again; none if all its rows have frames
    Bits fresh;              // if all its rows have frames: those that changed in this epoch, some perhaps left out
    std::unique_ptr<Tracking> tracking;
    size_t record_bytes() const { return stride * sizeof(float); }
    size_t words() const { return changed.size(); }
    uint64_t touched_word(size_t word) const { return changed[word] | (tracking ? tracking->settled[word] : 0); }
    bool touched(uint32_t slot) const { return touched_word(slot / 64) >> (slot % 64) & 1; }
  };
  struct RowRef {
    uint32_t table;
    uint32_t slot;
    auto operator<=>(const RowRef&) const = default;
  };
  // Bytes to be read for rows, put together to as few pieces as they allow.
  struct ReadPlan {
    struct Wanted {
      DiskFile file;
      uint64_t offset;
      size_t bytes;
      RowRef row;
      uint32_t number;  // of the row to its caller
      uint32_t place;   // in the log, or none
      const std::byte* found = nullptr;
    };
    std::vector<Wanted> rows;
    std::vector<Piece> pieces;
    AlignedBytes memory;
  };
  struct Ticket {
    uint64_t id;                  // 0: given up
    std::vector<int32_t> counts;  // as they were asked for; none if rows are not in that order
    std::vector<RowRef> rows;
    bool admitted = false;
    bool reading = false;
    bool is_told = false;
    std::vector<uint32_t> frames;  // as the rows
    std::vector<RowRef> shared;    // rows that an earlier ticket reads
    ReadPlan plan;
    uint64_t job = 0;
  };
  // A round of the cleaner: the oldest segments are read, their versions that count go home, then they are free.
  struct Cleaning {
    enum class Step { reads_log, parses, reads_home, writes_home, frees } step = Step::reads_log;
    size_t segments = 0;
    size_t parsed = 0;
    uint64_t job = 0;
    AlignedBytes log;
    struct Version {
      RowRef row;
      uint32_t place;
      const std::byte* record;
    };
    std::vector<Version> versions;  // to go home; in the order of the home once all are there
    size_t next = 0;                // the first that is not written
    size_t end = 0;                 // behind those whose pages are in memory
    AlignedBytes pages;
    std::vector<Piece> pieces;
    ReadPlan
        neighbours;  // other rows of these pages whose newest version is elsewhere in the log; numbers are of pieces
    AlignedBytes bits;
    std::vector<std::pair<RowRef, uint32_t>> newest;  // rows that will be at home only, and their places
  };
  struct Counters {
    uint64_t hits = 0, misses = 0, hit_calls = 0, miss_calls = 0;
    uint64_t rows_initial = 0, rows_from_memory = 0, rows_read_log = 0, rows_read_home = 0;
    uint64_t bytes_read_log = 0, bytes_read_home = 0, reads = 0;
    uint64_t rows_evicted = 0, rows_evicted_dirty = 0, rows_evicted_young = 0, rows_copied = 0, rows_flushed = 0,
             rows_around = 0;
    uint64_t rows_homed = 0, bytes_home = 0, bytes_cleaned = 0, bytes_state = 0, rounds = 0, waits = 0;
  };

  const Table& at(size_t table) const;
  Table& at(size_t table) { return const_cast<Table&>(std::as_const(*this).at(table)); }
  Frames& frames_of(const Table& table) { return *frames_[table.frames_index]; }
  std::string name(RowRef row) const;
  std::string describe(const LogDamage& damage) const;
  void check_call(std::span<const int32_t> counts, std::span<const uint32_t> slots, size_t floats) const;
  void check_counts(std::span<const int32_t> counts, std::span<const uint32_t> slots) const;
  void check_range(size_t table, int64_t first_slot, int64_t count, size_t floats) const;
  void write_initial(const Table& table, uint32_t slot, float* record) const;

  // opening (src/tiered_open.cpp)
  void add_table(const TableSettings& settings, uint64_t home_begin);
  void share_cache();
  void begin_new();
  void go_back(uint64_t epoch);
  void read_homed();
  void scan_log(const TierState& found, uint64_t epoch);
  struct LogFound {
    std::vector<std::vector<std::pair<uint32_t, uint32_t>>> versions;  // by table: slot and place, in order
    std::vector<std::string> damaged;
  };
  void adopt_segment(const Piece& piece, const Incarnation& life, uint64_t sequence, uint64_t epoch,
                     LogFound& log_found);
  std::vector<size_t> strides() const;

  // rows in memory
  std::span<const uint32_t> translate(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  void translate_table(size_t table, size_t begin, std::span<const uint32_t> slots);
  void change_table(size_t table, size_t begin, std::span<const uint32_t> slots, std::span<const uint32_t> frames);
  void before_change(Table& table, uint32_t slot, uint32_t frame);
  void spoil_epoch();
  void keep_aside(Table& table, uint32_t slot, const float* record);

  // around the cache
  ReadPlan::Wanted locate(RowRef row, uint32_t number, uint32_t place) const;
  void plan_row(RowRef row, uint32_t number, ReadPlan& plan) const;
  void build_plan(ReadPlan& plan, uint64_t gap_max) const;
  const float* checked(const ReadPlan::Wanted& wanted) const;  // null: it is not what was written
  bool find_in_memory(RowRef row, float* record);              // anywhere but where it has to be read
  bool copy_mapped(const ReadPlan::Wanted& wanted, float* record);
  void read_rows(size_t table, std::span<const uint32_t> slots, float* out);
  void write_row(Table& table, uint32_t slot, const float* record);
  void clean_excess();
  void make_room();
  void finish_reads();
  void keep_aside_all(size_t table, std::span<const uint32_t> slots);
  bool is_homed(RowRef row) const { return tables_[row.table].homed[row.slot / 64] >> (row.slot % 64) & 1; }
  void mark_changed(Table& table, uint32_t slot) { table.changed[slot / 64] |= uint64_t{1} << (slot % 64); }

  // captures
  void settle_changes(Table& table) const;
  std::vector<uint32_t> choose_left(const Table& table, size_t rows_max, bool aside_only) const;
  void read_captured(size_t table, std::span<const uint32_t> slots, float* out);
  void forget_captured(Table& table, std::span<const uint32_t> slots) const;

  // frames
  struct Missed {
    RowRef row;
    size_t at;  // in the call
  };
  std::vector<Missed> find_missed(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  bool load_at_once(std::span<const Missed> missed);
  uint64_t read_here(Ticket& ticket);
  Ticket make_ticket(std::span<const int32_t> counts, std::span<const uint32_t> slots);
  void use_frames(const Table& table, std::span<const uint32_t> frames);
  void check_fits(Ticket& ticket) const;
  bool admit(Ticket& ticket);
  uint32_t load(RowRef row, Ticket* ticket);
  void prefetch_mapped(RowRef row);
  void prefetch_victim(Frames& frames, uint32_t index);
  bool find_room(std::span<const size_t> needed);
  bool evict(Frames& frames);
  bool let_go(Frames& frames, uint32_t index);
  void note_gone(const Frame& frame);
  bool is_gone_lately(RowRef row) const;
  bool may_append() const;
  bool may_leave() const;
  uint64_t segments_for(uint64_t bytes) const;
  void log_frame(Frames& frames, uint32_t frame);
  void put_place(Table& table, uint32_t slot, uint32_t place);
  void admit_waiting();
  void take_reads(Ticket& ticket, std::vector<std::string>& damaged);
  void remember(const Ticket& ticket);
  bool is_ready(const Ticket& ticket) const;
  void unpin(Ticket& ticket);
  void drop_rows(const std::vector<RowRef>& rows);
  void forget_given_up();
  std::vector<size_t> frames_needed(std::span<const RowRef> rows, bool missing_only) const;
  void check_full(const Ticket& ticket);

  // upkeep
  void settle();
  void take_commit(uint64_t epoch);
  bool keep_reserve();
  bool write_epoch();
  size_t rows_due();
  bool can_make() const;
  void try_complete();
  bool clean();
  bool begin_round();
  bool is_overtaken(const Table& table, uint32_t slot, uint32_t place, uint32_t newest) const;
  void choose_version(const LogEntry& entry);
  void parse_segment();
  void read_pages();
  bool is_page_whole(size_t first) const;
  size_t plan_neighbours(uint32_t table, uint64_t group);
  void patch_pages();
  void patch_row(RowRef row, const void* record, std::byte* page);
  void write_pages(const std::vector<RowRef>& rows_new);
  void end_round();
  uint64_t floor() const;
  bool counts_now(const LogHeader& header) const;
  uint64_t submit_state(std::vector<IoStep> before);
  bool wants_cleaning() const;

  TierSettings settings_;
  std::unique_ptr<Disk> disk_;
  std::vector<Table> tables_;
  std::vector<std::unique_ptr<Frames>> frames_;
  uint64_t home_end_ = 0;
  uint64_t log_bytes_target_ = 0;
  uint64_t entry_bytes_max_ = 0;
  uint64_t reserve_segments_ = 0;  // of the log, for all rows in memory: so that a checkpoint can always be completed
  uint64_t page_bytes_ = 0;

  TierState state_;  // as the last job of the write lane that was submitted leaves it
  uint64_t state_version_ = 0;
  uint64_t epoch_ = 1;                     // of changes made now
  uint64_t complete_ = 0, committed_ = 0;  // durable
  uint64_t making_ = 0;   // the epoch that is being completed, or was the last: not one that came when the log was full
  uint64_t spoiled_ = 0;  // an epoch of which a row could not be kept: it is never complete
  size_t dirty_now_ = 0, dirty_old_ = 0;  // frames that changed since `making_` began, and before
  struct Promise {
    uint64_t job, complete, committed;
  };
  std::deque<Promise> promises_;  // what is durable once a job is done
  std::deque<std::pair<uint64_t, AlignedBytes>> state_memory_;
  size_t sweep_frames_ = 0, sweep_next_ = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  std::chrono::steady_clock::time_point swept_at_{};
  std::optional<Cleaning> cleaning_;
  bool cleaning_stopped_ = false;  // it met damage
  bool is_hurried_ = false;        // somebody waits for the cleaner: it takes more at a time

  std::string full_text_;   // why nothing can be written; empty: it can
  uint64_t full_done_ = 0;  // jobs of the write lane that were done when it began

  uint64_t ticket_next_ = 1;
  std::deque<Ticket> tickets_;
  uint32_t stamp_ = 0;  // of calls of fetch
  uint64_t gone_ = 0;   // rows that were noted to have gone, since all were forgotten
  struct Memo {         // the last translation, as long as no row came or went
    bool is_valid = false;
    std::vector<int32_t> counts;
    std::vector<uint32_t> slots, frames;
  } memo_;

  size_t tenants_ = 0;
  std::optional<size_t> capturing_;
  uint64_t updates_noted_ = 0;
  std::array<uint64_t, tenants_max> uncaptured_{}, held_updates_{};

  Counters counters_;
  std::vector<std::string> damaged_;  // found by the cleaner; told at the next poll
  std::unique_ptr<IoLanes> lanes_;
  std::unique_ptr<TierLog> log_;
};

}  // namespace regrow
