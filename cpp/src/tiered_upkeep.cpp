// What a TieredShard does when nobody waits: it makes room, writes rows for a checkpoint, and cleans the log. The order
// in which things become durable is that of the write lane, and each step below says what it relies on:
//   versions of a checkpoint -> sync -> its number -> versions go home -> sync -> the new tail -> segments are reused.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "regrow/tiered.hpp"

namespace regrow {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t evictions_per_call = 1024;
constexpr size_t epoch_rows_per_call = 512;
constexpr size_t epoch_rows_per_call_max = 1 << 14;
constexpr size_t frames_swept_per_call = 1 << 16;
constexpr size_t home_rows_per_step = 2048;  // nobody shall wait long for the loop
constexpr size_t home_rows_per_step_hurried = 1 << 16;
constexpr size_t lookups_at_a_time = 16;
constexpr size_t home_bytes_per_step = 6 << 20;  // of pages and neighbours in memory, or one page and its own
constexpr size_t reserve_share = 32;             // one in so many frames is kept free, for what comes next

// Pieces that follow each other in the file and in memory are one: the device and the kernel are asked once.
std::vector<Piece> join_pieces(const std::vector<Piece>& pieces) {
  std::vector<Piece> joined;
  for (const Piece& piece : pieces) {
    Piece* last = joined.empty() ? nullptr : &joined.back();
    if (last && last->file == piece.file && last->offset + last->bytes == piece.offset &&
        last->data + last->bytes == piece.data)
      last->bytes += piece.bytes;
    else
      joined.push_back(piece);
  }
  return joined;
}

}  // namespace

void check_order(bool fine, const char* text) {
  if (!fine) throw std::logic_error(std::string("the order of writes: ") + text);
}

// ---- promises

// Takes note of what the write lane has done.
void TieredShard::settle() {
  log_->settle();
  if (lanes_->failure(Lane::writes)) {
    full_text_ = lanes_->failure_text(Lane::writes);
    full_done_ = lanes_->done(Lane::writes);
  } else if (lanes_->done(Lane::writes) > full_done_) {
    full_text_.clear();
  }
  while (!promises_.empty() && lanes_->is_done(Lane::writes, promises_.front().job)) {
    complete_ = std::max(complete_, promises_.front().complete);
    if (promises_.front().committed > committed_) take_commit(promises_.front().committed);
    promises_.pop_front();
  }
  while (!state_memory_.empty() && lanes_->is_done(Lane::writes, state_memory_.front().first))
    state_memory_.pop_front();
}

// A checkpoint is durable as the one to go back to: most of what was noted before it is of no use any more.
void TieredShard::take_commit(uint64_t epoch) {
  committed_ = epoch;
  for (Table& table : tables_) table.places_before[1] = std::exchange(table.places_before[0], SlotMap());
}

// Writes the state as it is now, behind `before`, first one copy of it, then the other.
uint64_t TieredShard::submit_state(std::vector<IoStep> before) {
  const auto is_over = [&](const Incarnation& each) {
    return each.log_end.sequence < state_.tail && each.number != state_.incarnations.back().number;
  };
  std::erase_if(state_.incarnations, is_over);
  AlignedBytes bytes = encode_state(state_, ++state_version_);
  for (uint64_t copy = 0; copy < 2; ++copy) {
    before.push_back({IoStep::Kind::write, {{DiskFile::state, copy * state_copy_bytes, bytes.data(), bytes.size()}}});
    before.push_back({IoStep::Kind::sync, {}, DiskFile::state});
  }
  counters_.bytes_state += 2 * bytes.size();
  const uint64_t job = lanes_->submit(Lane::writes, std::move(before));
  state_memory_.emplace_back(job, std::move(bytes));
  promises_.push_back({job, state_.complete, state_.committed});
  return job;
}

// ---- epochs

uint64_t TieredShard::begin_epoch() {
  if (epoch_ + 1 >= UINT32_MAX) throw std::invalid_argument("there are no more numbers for checkpoints");
  for (Table& table : tables_) std::fill(table.fresh.begin(), table.fresh.end(), 0);
  deadline_.reset();
  const uint64_t begun = epoch_++;
  if (can_make()) {
    making_ = begun;
    dirty_old_ += std::exchange(dirty_now_, 0);
  } else {
    spoiled_ = begun;
  }
  return begun;
}

// Whether the log has room for all that is in memory only. An epoch that might not be completed is not begun to be
// written: the log would be full of what nobody can free. The one before goes on instead, which has its room.
bool TieredShard::can_make() const {
  const uint64_t needed = segments_for((dirty_old_ + dirty_now_) * entry_bytes_max_) + 1;
  return log_->segments_free() >= std::min(needed, reserve_segments_);
}

uint64_t TieredShard::poll_complete() {
  settle();
  return complete_;
}

void TieredShard::hasten(uint64_t epoch, double seconds_left) {
  if (!epoch || epoch >= epoch_) throw std::invalid_argument("epoch " + std::to_string(epoch) + " did not begin");
  const double seconds = std::clamp(seconds_left, 0.0, 1e9);
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  swept_at_ = Clock::now();
}

void TieredShard::commit_epoch(uint64_t epoch) {
  settle();
  if (!epoch || epoch > complete_)
    throw std::invalid_argument("epoch " + std::to_string(epoch) + " is not complete; " + std::to_string(complete_) +
                                " is");
  if (epoch < state_.committed)
    throw std::invalid_argument("epoch " + std::to_string(state_.committed) + " was committed, which is later than " +
                                std::to_string(epoch));
  if (epoch == state_.committed) return;
  state_.committed = epoch;
  submit_state({});
}

// How many rows of the checkpoint are to be written by this call.
size_t TieredShard::rows_due() {
  if (!deadline_) return epoch_rows_per_call;
  const Clock::time_point now = Clock::now();
  const double left = std::chrono::duration<double>(*deadline_ - now).count();
  const double past = std::chrono::duration<double>(now - swept_at_).count();
  swept_at_ = now;
  if (left <= past) return epoch_rows_per_call_max;
  const double due = static_cast<double>(dirty_old_) * past / left;
  return std::min(epoch_rows_per_call_max, static_cast<size_t>(due) + 16);
}

// Writes some rows that changed before the last instant. Pinned ones too: to be pinned is to be in memory, no more.
bool TieredShard::write_epoch() {
  size_t rows = dirty_old_ ? rows_due() : 0;
  size_t looks = frames_swept_per_call;
  for (; rows && dirty_old_ && looks; --looks) {
    if (sweep_next_ >= frames_[sweep_frames_]->count()) {
      sweep_next_ = 0;
      sweep_frames_ = (sweep_frames_ + 1) % frames_.size();
      continue;
    }
    Frames& frames = *frames_[sweep_frames_];
    const auto index = static_cast<uint32_t>(sweep_next_);
    Frame& frame = frames.at(index);
    if (frame.dirty_epoch && frame.dirty_epoch <= making_) {
      if (settings_.bug == TierBug::pinned_not_written && frame.pins) {
        --dirty_old_;
        ++dirty_now_;
        frame.dirty_epoch = static_cast<uint32_t>(epoch_);
      } else {
        if (!may_append()) return false;
        log_frame(frames, index);
        ++counters_.rows_flushed;
        --rows;
      }
    }
    ++sweep_next_;
  }
  try_complete();
  return dirty_old_ && !deadline_;  // with a deadline there is time until the next tick
}

// Once no row of the checkpoint is in memory only: the log is synced, and then the state says so. The home is synced
// too: before the first commit rows may have gone there without.
void TieredShard::try_complete() {
  if (dirty_old_ || making_ <= state_.complete) return;
  log_->flush();
  std::vector<IoStep> steps;
  if (settings_.bug != TierBug::no_sync) {
    steps.push_back({IoStep::Kind::sync, {}, DiskFile::log});
    steps.push_back({IoStep::Kind::sync, {}, DiskFile::home});
  }
  check_order(log_->bytes_unsent() == 0, "a checkpoint is complete before its versions were written");
  state_.complete = making_;
  state_.incarnations.back().log_end = log_->end();
  submit_state(std::move(steps));
}

// ---- the cleaner

// Versions up to it may go home: nobody goes back to before it.
uint64_t TieredShard::floor() const {
  if (settings_.bug == TierBug::freed_first) return epoch_;
  return std::max<uint64_t>(1, committed_);
}

bool TieredShard::wants_cleaning() const {
  const uint64_t used = log_->used() * settings_.segment_bytes;
  return static_cast<double>(used) > settings_.clean_from * static_cast<double>(log_bytes_target_) ||
         log_->segments_free() <= 3 * reserve_segments_ + 2;
}

// Takes the oldest segments that have nothing but what may go home.
bool TieredShard::begin_round() {
  const uint64_t most = std::max<uint64_t>(1, settings_.clean_bytes_max / settings_.segment_bytes);
  size_t segments = 0;
  if (cleaning_stopped_) return false;
  for (; segments < std::min<uint64_t>(most, log_->used()); ++segments) {
    const TierLog::Oldest oldest = log_->oldest(segments);
    if (!oldest.is_written || oldest.epoch_max > floor()) break;
  }
  if (!segments) return false;
  cleaning_.emplace();
  cleaning_->segments = segments;
  cleaning_->log = AlignedBytes(segments * settings_.segment_bytes);
  IoStep step{IoStep::Kind::read};
  for (size_t i = 0; i < segments; ++i) {
    const TierLog::Oldest oldest = log_->oldest(i);
    if (!oldest.bytes) continue;
    step.pieces.push_back({DiskFile::log, oldest.index * settings_.segment_bytes,
                           cleaning_->log.data() + i * settings_.segment_bytes, oldest.bytes});
    counters_.bytes_cleaned += oldest.bytes;
  }
  std::vector<IoStep> steps;
  steps.push_back(std::move(step));
  cleaning_->job = lanes_->submit(Lane::writes, std::move(steps));
  ++counters_.rounds;
  return true;
}

// One step of a round, if what it waits for is done. True: there is something to do at once.
bool TieredShard::clean() {
  if (!cleaning_) {
    if (wants_cleaning()) begin_round();
    return false;
  }
  using Step = Cleaning::Step;
  Cleaning& round = *cleaning_;
  if (round.step != Step::parses && !lanes_->is_done(Lane::writes, round.job)) return false;
  switch (round.step) {
    case Step::reads_log:
      round.step = Step::parses;
      return true;
    case Step::parses:
      parse_segment();
      if (!cleaning_) return false;
      if (round.parsed < round.segments) return true;
      read_pages();
      return false;
    case Step::reads_home:
      patch_pages();
      return false;
    case Step::writes_home:
      round.next = round.end;
      read_pages();
      return false;
    case Step::frees:
      end_round();
      return true;
  }
  return false;
}

// Whether a later version of a row than this one is in the log, which counts for every checkpoint we may go back to.
// Its own segment is cleaned later, or in the same round.
bool TieredShard::is_overtaken(const Table& table, uint32_t slot, uint32_t place, uint32_t newest) const {
  const auto order = [this](uint32_t each) { return std::pair{log_->sequence_of(each), each}; };
  const auto is_later = [&](uint32_t other) {
    const bool counts = log_->epoch_max_of(other) <= floor() || settings_.bug == TierBug::noted_too_new;
    return counts && order(place) < order(other);
  };
  return is_later(newest) || std::ranges::any_of(table.places_before, [&](const SlotMap& noted) {
           const uint32_t before = noted.find(slot);
           return before != SlotMap::none && is_later(before);
         });
}

// Whether a version that counts goes home: unless it is overtaken.
void TieredShard::choose_version(const LogEntry& entry) {
  Cleaning& round = *cleaning_;
  const RowRef row{entry.header.table, entry.header.slot};
  Table& table = tables_[row.table];
  const uint32_t newest = table.places.find(row.slot);
  for (SlotMap& noted : table.places_before)  // its place will be that of something else
    if (noted.find(row.slot) == entry.place) noted.erase(row.slot);
  if (newest == SlotMap::none) {  // it went home with a neighbour, or a later one did
    check_order(is_homed(row), "a version in the log is not known");
    return;
  }
  if (is_overtaken(table, row.slot, entry.place, newest)) return;
  if (newest == entry.place) round.newest.emplace_back(row, entry.place);
  check_order(entry.header.epoch <= floor(), "a version goes home before its checkpoint is committed");
  round.versions.push_back({row, entry.place, reinterpret_cast<const std::byte*>(entry.record)});
}

// Chooses the versions of a segment that go home; behind the last, puts all of them in order.
void TieredShard::parse_segment() {
  Cleaning& round = *cleaning_;
  const TierLog::Oldest oldest = log_->oldest(round.parsed);
  const std::vector<size_t> strides = this->strides();
  LogScan scan({round.log.data() + round.parsed * settings_.segment_bytes, oldest.bytes},
               oldest.index * settings_.segment_bytes, page_bytes_, strides);
  // Some at a time: where the newest version of each is comes from all over the memory, and is prefetched.
  std::vector<LogEntry> entries;
  for (bool more = true; more;) {
    const auto entry = scan.next();
    more = entry.has_value();
    if (more && counts_now(entry->header)) {
      tables_[entry->header.table].places.prefetch(entry->header.slot);
      entries.push_back(*entry);
    }
    if (more && entries.size() < lookups_at_a_time) continue;
    for (const LogEntry& each : entries) choose_version(each);
    entries.clear();
  }
  ++round.parsed;
  if (!scan.damaged().empty()) {  // the round is given up, for good: what cannot be read cannot go home
    for (const LogDamage& each : scan.damaged()) damaged_.push_back(describe(each));
    cleaning_.reset();
    cleaning_stopped_ = true;
    lanes_->ring();
    return;
  }
  if (round.parsed < round.segments) return;
  // Of each row the last; then in the order of the home.
  std::stable_sort(round.versions.begin(), round.versions.end(),
                   [](const Cleaning::Version& a, const Cleaning::Version& b) { return a.row < b.row; });
  const auto is_older = [](const Cleaning::Version& a, const Cleaning::Version& b) { return a.row == b.row; };
  std::reverse(round.versions.begin(), round.versions.end());
  round.versions.erase(std::unique(round.versions.begin(), round.versions.end(), is_older), round.versions.end());
  std::reverse(round.versions.begin(), round.versions.end());
}

// What an incarnation wrote counts up to the epoch at which it was left behind.
bool TieredShard::counts_now(const LogHeader& header) const {
  for (const Incarnation& each : state_.incarnations)
    if (each.number == header.incarnation) {
      const bool is_present = each.number == state_.incarnations.back().number;
      return is_present || header.epoch <= each.epoch_end || settings_.bug == TierBug::no_incarnation;
    }
  return false;
}

// Reads the pages that the next versions belong to; without any left, ends the round.
void TieredShard::read_pages() {
  Cleaning& round = *cleaning_;
  if (round.next == round.versions.size()) {
    // The home is synced before the state lets go of the log, and the state before segments are reused.
    state_.tail = round.segments < log_->used() ? log_->oldest(round.segments).sequence : log_->end().sequence + 1;
    Incarnation& present = state_.incarnations.back();
    present.log_end = std::max(present.log_end, LogPosition{state_.tail - 1, 0});
    std::vector<IoStep> steps;
    if (settings_.bug != TierBug::home_not_synced) steps.push_back({IoStep::Kind::sync, {}, DiskFile::home});
    round.job = submit_state(std::move(steps));
    round.step = Cleaning::Step::frees;
    return;
  }
  const auto group_at = [&](size_t i) {
    const RowRef row = round.versions[i].row;
    return std::pair{row.table, tables_[row.table].home.group_of(row.slot)};
  };
  round.pieces.clear();
  round.neighbours = {};
  const size_t rows_max = is_hurried_ ? home_rows_per_step_hurried : home_rows_per_step;
  std::vector<bool> is_read;  // as the pieces
  size_t bytes = 0, bytes_neighbours = 0;
  for (round.end = round.next; round.end < round.versions.size(); ++round.end) {
    const auto [table, group] = group_at(round.end);
    if (round.end > round.next && group_at(round.end - 1) == group_at(round.end)) continue;
    if (round.end - round.next >= rows_max || bytes + bytes_neighbours >= home_bytes_per_step) break;
    const HomeTable& home = tables_[table].home;
    round.pieces.push_back({DiskFile::home, home.group_begin(group), nullptr, home.group_bytes});
    bytes += home.group_bytes;
    bytes_neighbours += plan_neighbours(table, group);
    is_read.push_back(!is_page_whole(round.end));
  }
  round.pages = AlignedBytes(bytes);
  bytes = 0;
  std::vector<Piece> reads;
  for (size_t i = 0; i < round.pieces.size(); ++i) {
    Piece& piece = round.pieces[i];
    piece.data = round.pages.data() + bytes;
    bytes += piece.bytes;
    if (is_read[i]) {
      reads.push_back(piece);
      counters_.bytes_read_home += piece.bytes;
    } else {
      std::memset(piece.data, 0, piece.bytes);
    }
  }
  build_plan(round.neighbours, 0);
  IoStep step{IoStep::Kind::read, join_pieces(reads)};
  for (const Piece& piece : round.neighbours.pieces) {
    step.pieces.push_back(piece);
    counters_.bytes_cleaned += piece.bytes;
  }
  std::vector<IoStep> steps;
  steps.push_back(std::move(step));
  round.job = lanes_->submit(Lane::writes, std::move(steps));
  round.step = Cleaning::Step::reads_home;
}

// Whether all rows of a page are in the round, from this version on: there is nothing in it that would have to be kept.
// If it is torn, all of them are still in the log.
bool TieredShard::is_page_whole(size_t first) const {
  const RowRef row = cleaning_->versions[first].row;
  const Table& table = tables_[row.table];
  const uint64_t group = table.home.group_of(row.slot);
  const uint64_t begin = table.home.group_first(group);
  const uint64_t rows = std::min<uint64_t>(table.slots, begin + table.home.rows_per_page) - begin;
  if (cleaning_->versions.size() - first < rows) return false;
  const RowRef last = cleaning_->versions[first + rows - 1].row;  // they are in order, each row once
  return last.table == row.table && table.home.group_of(last.slot) == group;
}

// A page is written whole. So what the log has of its other rows goes home along, if it may, and has no page to be
// written for later. It costs a read. It stays in the log until the round that frees its segment. Returns the bytes
// that are read for it, at most.
size_t TieredShard::plan_neighbours(uint32_t index, uint64_t group) {
  Cleaning& round = *cleaning_;
  const Table& table = tables_[index];
  const uint64_t sequence_last = log_->oldest(round.segments - 1).sequence;
  const uint32_t first = table.home.group_first(group);
  const uint64_t end = std::min<uint64_t>(table.slots, first + table.home.rows_per_page);
  const size_t rows_before = round.neighbours.rows.size();
  for (uint32_t slot = first; slot < end; ++slot) {
    const uint32_t place = table.places.find(slot);
    if (place == SlotMap::none || log_->sequence_of(place) <= sequence_last || log_->in_memory(place)) continue;
    if (log_->epoch_max_of(place) > floor() && settings_.bug != TierBug::neighbour_too_new) continue;
    plan_row({index, slot}, static_cast<uint32_t>(round.pieces.size() - 1), round.neighbours);
  }
  return (round.neighbours.rows.size() - rows_before) * (table.record_bytes() + 2 * page_bytes_);
}

// Puts versions into their pages. Rows of a page that are not in the round keep their bytes, so a torn page spoils none
// of them; the others are still in the log.
void TieredShard::patch_pages() {
  Cleaning& round = *cleaning_;
  std::vector<RowRef> rows_new;
  const auto patch = [&](RowRef row, const void* record, std::byte* page) {
    patch_row(row, record, page);
    ++counters_.rows_homed;
    if (!is_homed(row)) rows_new.push_back(row);
  };
  size_t piece = 0;
  for (size_t i = round.next; i < round.end; ++i) {
    const Cleaning::Version& version = round.versions[i];
    const HomeTable& home = tables_[version.row.table].home;
    while (round.pieces[piece].offset != home.group_begin(home.group_of(version.row.slot))) ++piece;
    patch(version.row, version.record, round.pieces[piece].data);
  }
  for (const ReadPlan::Wanted& wanted : round.neighbours.rows) {  // behind versions: one of the same row is newer
    const float* record = checked(wanted);
    if (!record) continue;  // it is found when it is needed
    patch(wanted.row, record, round.pieces[wanted.number].data);
    round.newest.emplace_back(wanted.row, wanted.place);
  }
  std::sort(rows_new.begin(), rows_new.end());
  write_pages(rows_new);
}

void TieredShard::patch_row(RowRef row, const void* record, std::byte* page) {
  const Table& table = tables_[row.table];
  std::byte* target = page + table.home.within(row.slot);
  const HomeHeader header{home_checksum(row.table, row.slot, record, table.record_bytes())};
  std::memcpy(target, &header, sizeof header);
  std::memcpy(target + sizeof header, record, table.record_bytes());
}

// Hands the pages over, with the bits that say which rows are there; `rows_new` were not, in order.
void TieredShard::write_pages(const std::vector<RowRef>& rows_new) {
  Cleaning& round = *cleaning_;
  std::vector<std::pair<uint32_t, uint64_t>> blocks;  // of bits: table, offset
  for (const RowRef row : rows_new) {
    tables_[row.table].homed[row.slot / 64] |= uint64_t{1} << (row.slot % 64);
    const uint64_t block = row.slot / sector_bits * sector_bytes / page_bytes_ * page_bytes_;
    if (blocks.empty() || blocks.back() != std::pair{row.table, block}) blocks.emplace_back(row.table, block);
  }
  IoStep step{IoStep::Kind::write, join_pieces(round.pieces)};
  round.bits = AlignedBytes(blocks.size() * page_bytes_);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Table& table = tables_[blocks[i].first];
    std::byte* data = round.bits.data() + i * page_bytes_;
    for (uint64_t within = 0; within < page_bytes_; within += sector_bytes)
      write_bit_sector(data + within, table.homed, (blocks[i].second + within) / sector_bytes);
    step.pieces.push_back({DiskFile::home, table.home.bits_begin + blocks[i].second, data, page_bytes_});
  }
  for (const Piece& each : step.pieces) counters_.bytes_home += each.bytes;
  std::vector<IoStep> steps;
  steps.push_back(std::move(step));
  round.job = lanes_->submit(Lane::writes, std::move(steps));
  round.step = Cleaning::Step::writes_home;
}

void TieredShard::end_round() {
  check_order(lanes_->is_done(Lane::writes, cleaning_->job), "segments are reused before the state let go of them");
  for (const auto& [row, place] : cleaning_->newest) {
    SlotMap& places = tables_[row.table].places;
    if (places.find(row.slot) == place) places.erase(row.slot);
  }
  log_->free_oldest(cleaning_->segments);
  cleaning_.reset();
}

// ---- all of it

// Frees some frames ahead of those who will need them.
bool TieredShard::keep_reserve() {
  size_t left = evictions_per_call;
  for (const auto& frames : frames_) {
    uint64_t rows = 0;
    for (const Table& table : tables_)
      if (table.stride == frames->stride()) rows += table.slots;
    if (rows <= frames->count() && settings_.policy != TierPolicy::none) continue;  // everything fits
    const size_t reserve = settings_.policy == TierPolicy::none ? frames->count() : frames->count() / reserve_share;
    while (left && frames->free() < reserve) {
      if (!evict(*frames)) break;
      --left;
    }
  }
  return left == 0;
}

bool TieredShard::upkeep() {
  settle();
  if (lanes_->failure(Lane::writes)) lanes_->retry(Lane::writes);
  bool more = keep_reserve();
  more |= write_epoch();
  more |= clean();
  admit_waiting();
  const auto is_news = [this](const Ticket& each) { return each.id && !each.is_told && is_ready(each); };
  if (std::any_of(tickets_.begin(), tickets_.end(), is_news)) lanes_->ring();
  return more;
}

std::map<std::string, double> TieredShard::report() const {
  std::map<std::string, double> found;
  const auto put = [&](const char* key, uint64_t value) { found[key] = static_cast<double>(value); };
  const Counters& c = counters_;
  put("hits", c.hits);
  put("misses", c.misses);
  put("calls_hit", c.hit_calls);
  put("calls_missed", c.miss_calls);
  put("waits", c.waits);
  put("rows_initial", c.rows_initial);
  put("rows_from_memory", c.rows_from_memory);
  put("log_rows_read", c.rows_read_log);
  put("home_rows_read", c.rows_read_home);
  put("reads", c.reads);
  put("rows_evicted", c.rows_evicted);
  put("rows_evicted_dirty", c.rows_evicted_dirty);
  put("rows_evicted_young", c.rows_evicted_young);
  put("rows_copied", c.rows_copied);
  put("rows_flushed", c.rows_flushed);
  put("rows_around", c.rows_around);
  put("rows_to_flush", dirty_old_);
  put("log_bytes_written", log_->bytes_written());
  put("log_bytes_read", c.bytes_cleaned + c.bytes_read_log);
  put("home_rows_written", c.rows_homed);
  put("home_bytes_written", c.bytes_home);
  put("home_bytes_read", c.bytes_read_home);
  put("state_bytes_written", c.bytes_state);
  put("log_bytes_used", log_->used() * settings_.segment_bytes);
  put("log_bytes_max", settings_.log_bytes_max);
  put("file_bytes", disk_->file_bytes());
  put("clean_rounds", c.rounds);
  uint64_t frames = 0, free = 0, pinned = 0, places = 0;
  for (const auto& each : frames_) {
    frames += each->count();
    free += each->free();
  }
  for (const Ticket& ticket : tickets_) pinned += ticket.frames.size();
  for (const Table& table : tables_) places += table.places.size();
  put("frames", frames);
  put("frames_free", free);
  put("frames_pinned", pinned);
  put("rows_in_log", places);
  put("tickets", tickets_.size());
  put("epoch", epoch_);
  put("epoch_complete", complete_);
  put("epoch_committed", committed_);
  put("epoch_spoiled", spoiled_);
  put("full", !full_text_.empty() || (!may_leave() && lanes_->is_idle(Lane::writes) && !dirty_old_ && !cleaning_));
  return found;
}

}  // namespace regrow
