// Which rows are in memory: tickets, frames, and what leaves to make room. A ticket gets all its frames at once, in the
// order of tickets; until then it holds none. So of those that wait the first can always go on once others released
// what they have.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "regrow/tiered.hpp"

namespace regrow {
namespace {

constexpr size_t lookups_ahead = 12;
constexpr size_t records_ahead = 6;  // where they are was looked up by then
// Rows that left are remembered: of one in so many frames, and of as many before them. Too few: rows that come back are
// not known. Too many: nearly all are known, and none is on probation.
constexpr size_t gone_share = 3;
// Of a table, between two commits. Too few: rows go home that need not. Too many: they take memory.
constexpr size_t places_before_max = 1 << 17;
constexpr size_t rows_counted_max = 1 << 14;  // a call with more is looked at for rows named twice: pins have 16 bits

}  // namespace

std::vector<size_t> TieredShard::frames_needed(std::span<const RowRef> rows, bool missing_only) const {
  std::vector<size_t> needed(frames_.size());
  for (const RowRef row : rows) {
    const Table& table = tables_[row.table];
    const auto is_there = [&] {
      return table.frames.find(row.slot) != SlotMap::none || table.loading.find(row.slot) != SlotMap::none;
    };
    needed[table.frames_index] += !missing_only || !is_there();
  }
  return needed;
}

// The rows of a call that are not in memory; the others are used now. Leaves their frames in the memo, but for tables
// whose rows all have frames.
std::vector<TieredShard::Missed> TieredShard::find_missed(std::span<const int32_t> counts,
                                                          std::span<const uint32_t> slots) {
  std::vector<Missed> missed;
  memo_.is_valid = false;
  memo_.frames.resize(slots.size());
  size_t at = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    const Table& table = tables_[t];
    const size_t begin = at, end = at + static_cast<size_t>(counts[t]);
    const auto miss = [&](size_t i) { missed.push_back({{static_cast<uint32_t>(t), slots[i]}, i}); };
    if (table.frames.is_whole()) {
      for (; at < end; ++at)
        if (!table.frames.is_there(slots[at])) miss(at);
      continue;
    }
    for (size_t i = begin; i < std::min(end, begin + lookups_ahead); ++i) table.frames.prefetch(slots[i]);
    for (; at < end; ++at) {
      if (at + lookups_ahead < end) table.frames.prefetch(slots[at + lookups_ahead]);
      memo_.frames[at] = table.frames.find(slots[at]);
      if (memo_.frames[at] == FrameMap::none) miss(at);
    }
    use_frames(table, std::span(memo_.frames).subspan(begin, end - begin));
  }
  return missed;
}

void TieredShard::use_frames(const Table& table, std::span<const uint32_t> used) {
  Frames& frames = frames_of(table);
  for (size_t i = 0; i < used.size(); ++i) {
    if (i + lookups_ahead < used.size() && used[i + lookups_ahead] != FrameMap::none)
      frames.prefetch(used[i + lookups_ahead]);
    if (used[i] != FrameMap::none) frames.use(used[i], stamp_);
  }
}

uint64_t TieredShard::fetch(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  check_counts(counts, slots);
  settle();
  if (settings_.policy == TierPolicy::self) {
    while (upkeep()) {
    }
    log_->flush();
    if (!lanes_->is_idle(Lane::writes)) lanes_->wait(Lane::writes, lanes_->submit(Lane::writes, {}));
  }
  stamp_ = (stamp_ + 1) & Frames::stamp_mask;
  stamp_ += stamp_ == 0;
  const std::vector<Missed> missed = find_missed(counts, slots);
  counters_.misses += missed.size();
  counters_.hits += slots.size() - missed.size();
  ++(missed.empty() ? counters_.hit_calls : counters_.miss_calls);
  if (load_at_once(missed)) {
    memo_.counts.assign(counts.begin(), counts.end());
    memo_.slots.assign(slots.begin(), slots.end());
    memo_.is_valid = true;
    return 0;
  }
  Ticket ticket = make_ticket(counts, slots);
  check_fits(ticket);
  const bool is_first = tickets_.empty() || tickets_.back().admitted;
  if (!is_first) ticket.frames.clear();  // where rows are now says nothing about when its turn comes
  const bool admitted = is_first && admit(ticket);
  if (!admitted) check_full(ticket);
  if (admitted && !ticket.reading &&
      ticket.shared.empty()) {  // nothing was on disk: it was never changed, or just left
    unpin(ticket);
    return 0;
  }
  ++ticket_next_;
  tickets_.push_back(std::move(ticket));
  ++counters_.waits;
  return settings_.policy == TierPolicy::self ? read_here(tickets_.back()) : tickets_.back().id;
}

// A cache that keeps itself reads on the way of a pull, and nobody else is served meanwhile. 0: the rows are there.
uint64_t TieredShard::read_here(Ticket& ticket) {
  const uint64_t id = ticket.id;
  if (!ticket.reading) return id;
  lanes_->wait(Lane::reads, ticket.job);
  if (!lanes_->is_done(Lane::reads, ticket.job)) return id;  // it failed: told at the next poll
  take_reads(ticket, damaged_);
  if (!ticket.id || !is_ready(ticket)) return id;
  unpin(ticket);
  tickets_.pop_back();
  return 0;
}

// Of files that are mapped nothing has to be waited for: with enough free frames a row that missed is copied, and no
// ticket is made, nothing pinned and nobody woken. Not ahead of tickets that wait for frames. False: some are left.
bool TieredShard::load_at_once(std::span<const Missed> missed) {
  if (missed.empty()) return true;
  if (!disk_->is_mapped() || (!tickets_.empty() && !tickets_.back().admitted)) return false;
  std::vector<size_t> needed(frames_.size());
  for (const Missed& each : missed) ++needed[tables_[each.row.table].frames_index];
  for (size_t i = 0; i < needed.size(); ++i)
    if (frames_[i]->free() < needed[i]) return false;
  bool is_all = true;
  for (size_t i = 0; i < missed.size(); ++i) {
    if (i + lookups_ahead < missed.size()) {
      const RowRef later = missed[i + lookups_ahead].row;
      tables_[later.table].places.prefetch(later.slot);
    }
    if (i + records_ahead < missed.size()) prefetch_mapped(missed[i + records_ahead].row);
    const RowRef row = missed[i].row;
    const Table& table = tables_[row.table];
    uint32_t frame = table.frames.find(row.slot);  // it may have been named twice
    if (frame == SlotMap::none && table.loading.find(row.slot) == SlotMap::none) frame = load(row, nullptr);
    if (frame == SlotMap::none)
      is_all = false;
    else
      frames_of(table).use(frame, stamp_);
    memo_.frames[missed[i].at] = frame;
  }
  return is_all;
}

// A row that will be copied soon, from where it is and to where it comes.
void TieredShard::prefetch_mapped(RowRef row) {
  const Table& table = tables_[row.table];
  frames_of(table).prefetch_free(records_ahead);
  const uint32_t place = table.places.find(row.slot);
  if (place == SlotMap::none && !is_homed(row)) return;
  const ReadPlan::Wanted wanted = locate(row, 0, place);
  const std::byte* data = disk_->view(wanted.file, wanted.offset, wanted.bytes);
  if (data) __builtin_prefetch(data);
  if (data && wanted.bytes > 64) __builtin_prefetch(data + 64);
}

TieredShard::Ticket TieredShard::make_ticket(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  Ticket ticket{};
  ticket.id = ticket_next_;
  ticket.counts.assign(counts.begin(), counts.end());
  ticket.rows.reserve(slots.size());
  size_t at = 0;
  for (size_t t = 0; t < counts.size(); ++t)
    for (const size_t end = at + static_cast<size_t>(counts[t]); at < end; ++at) {
      ticket.rows.push_back({static_cast<uint32_t>(t), slots[at]});
      if (tables_[t].frames.is_whole()) memo_.frames[at] = tables_[t].frames.find(slots[at]);
    }
  ticket.frames = memo_.frames;
  return ticket;
}

// Rows cannot leave, and the ticket cannot get what it needs until they do.
void TieredShard::check_full(const Ticket& ticket) {
  const bool has_no_log = !may_leave() && lanes_->is_idle(Lane::writes) && !dirty_old_ && !cleaning_ && !begin_round();
  if (full_text_.empty() && !has_no_log) return;
  const std::vector<size_t> needed = frames_needed(ticket.rows, true);
  for (size_t i = 0; i < needed.size(); ++i) {
    size_t clean = frames_[i]->free();
    for (uint32_t frame = 0; frame < frames_[i]->count() && clean < needed[i]; ++frame) {
      const Frame& each = frames_[i]->at(frame);
      clean += each.stamp && !each.pins && !each.dirty_epoch;
    }
    if (clean >= needed[i]) continue;
    throw StoreFull(!full_text_.empty()
                        ? "rows that changed cannot leave the memory: " + full_text_
                        : "rows that changed cannot leave the memory: the log has all the " +
                              std::to_string(settings_.log_bytes_max) +
                              " bytes it may have, and no checkpoint was committed that would free some");
  }
}

// A row of a checkpoint may be written.
bool TieredShard::may_append() const {
  return log_->has_room(entry_bytes_max_) && log_->bytes_unwritten() < settings_.unwritten_bytes_max &&
         full_text_.empty();
}

// Segments that so many bytes of entries take at most.
uint64_t TieredShard::segments_for(uint64_t bytes) const {
  const uint64_t each = settings_.segment_bytes - page_bytes_ - entry_bytes_max_;
  return (bytes + each - 1) / each;
}

// A row may leave the memory, or be written around it. Room for two checkpoints stays: for what is still to be written
// of the one being made, and for all of the next. Or else the log could be full of what only a checkpoint can free,
// without room to make one.
bool TieredShard::may_leave() const {
  const uint64_t left = std::min(segments_for(dirty_old_ * entry_bytes_max_), reserve_segments_);
  return may_append() && log_->segments_free() > reserve_segments_ + left;
}

// Writes what a frame has to the log; it is then as it was written.
void TieredShard::log_frame(Frames& frames, uint32_t index) {
  Frame& frame = frames.at(index);
  Table& table = tables_[frame.table];
  const uint32_t place =
      log_->append(frame.table, frame.slot, frame.dirty_epoch, {frames.record(index), frames.stride()});
  put_place(table, frame.slot, place);
  --(frame.dirty_epoch > making_ ? dirty_now_ : dirty_old_);
  frame.dirty_epoch = 0;
  if (frames.is_whole()) table.fresh[frame.slot / 64] &= ~(uint64_t{1} << (frame.slot % 64));
}

// Where the newest version is from now on. What was the newest when the last checkpoint was committed is noted: once it
// counts for all that anybody may go back to, nothing older needs to go home.
void TieredShard::put_place(Table& table, uint32_t slot, uint32_t place) {
  SlotMap& noted = table.places_before[0];
  const uint32_t before = table.places.find(slot);
  const bool is_new = before != SlotMap::none && epoch_ > 1 && noted.size() < places_before_max;
  if (is_new && noted.find(slot) == SlotMap::none) noted.put(slot, before);
  table.places.put(slot, place);
}

// What it will take to let go of a row: its record, and where maps have it.
void TieredShard::prefetch_victim(Frames& frames, uint32_t index) {
  const Frame& frame = frames.at(index);
  const Table& table = tables_[frame.table];
  frames.prefetch_record(index);
  table.frames.prefetch(frame.slot);
  table.places.prefetch(frame.slot);
}

// Makes one frame free: of the rows that are not pinned, and can be written if they must be, the first to leave.
bool TieredShard::evict(Frames& frames) {
  for (const Frames::Queue queue : {Frames::Queue::aged, Frames::Queue::old, Frames::Queue::young})
    for (size_t tries = frames.notes(queue); tries; --tries) {
      const std::optional<uint32_t> index =
          frames.oldest(queue, stamp_, [&](uint32_t soon) { prefetch_victim(frames, soon); });
      if (!index) break;
      if (let_go(frames, *index)) return true;
      frames.stay(*index, stamp_);
    }
  return false;
}

bool TieredShard::let_go(Frames& frames, uint32_t index) {
  const Frame frame = frames.at(index);
  Table& table = tables_[frame.table];
  const bool is_pinned = frame.pins && settings_.bug != TierBug::pin_ignored;
  const bool is_loading = table.frames.find(frame.slot) != index;
  if (is_pinned || is_loading || (frame.dirty_epoch && !may_leave())) return false;
  counters_.rows_evicted_dirty += frame.dirty_epoch != 0;
  ++counters_.rows_evicted;
  if (frame.dirty_epoch) log_frame(frames, index);
  counters_.rows_evicted_young += frames.is_young(index);
  if (frames.is_young(index)) note_gone(frame);
  table.frames.erase(frame.slot);
  frames.give_back(index);
  memo_.is_valid = false;
  return true;
}

// A row that left young and is wanted again soon will not be on probation again. Of those that left, only about as many
// as a part of the cache are remembered: the others would come back to anybody.
void TieredShard::note_gone(const Frame& frame) {
  Table& table = tables_[frame.table];
  const uint64_t share = frames_of(table).count() / gone_share + 1;
  if (++gone_ > share) {
    gone_ = 0;
    for (Table& each : tables_) {
      each.gone_before.swap(each.gone);
      std::fill(each.gone.begin(), each.gone.end(), 0);
    }
  }
  if (!table.gone.empty()) table.gone[frame.slot / 64] |= uint64_t{1} << (frame.slot % 64);
}

bool TieredShard::is_gone_lately(RowRef row) const {
  const Table& table = tables_[row.table];
  if (table.gone.empty()) return false;
  return (table.gone[row.slot / 64] | table.gone_before[row.slot / 64]) >> (row.slot % 64) & 1;
}

bool TieredShard::find_room(std::span<const size_t> needed) {
  for (size_t i = 0; i < needed.size(); ++i)
    while (frames_[i]->free() < needed[i])
      if (!evict(*frames_[i])) return false;
  return true;
}

// Rows that could never be in memory together are refused. Only then does it matter who is named twice.
void TieredShard::check_fits(Ticket& ticket) const {
  const auto fits = [&](const std::vector<size_t>& needed) {
    for (size_t i = 0; i < needed.size(); ++i)
      if (needed[i] > frames_[i]->count()) return false;
    return true;
  };
  std::vector<size_t> needed(frames_.size());
  for (const RowRef row : ticket.rows) ++needed[tables_[row.table].frames_index];
  if (ticket.rows.size() <= rows_counted_max && fits(needed)) return;
  std::sort(ticket.rows.begin(), ticket.rows.end());
  ticket.rows.erase(std::unique(ticket.rows.begin(), ticket.rows.end()), ticket.rows.end());
  ticket.frames.clear();
  ticket.counts.clear();
  needed = frames_needed(ticket.rows, false);
  for (size_t i = 0; i < needed.size(); ++i)
    if (needed[i] > frames_[i]->count())
      throw std::invalid_argument(
          std::to_string(needed[i]) + " rows of " + std::to_string(frames_[i]->stride() * sizeof(float)) +
          " bytes do not fit the cache, which has " + std::to_string(frames_[i]->count()) + " frames for them");
}

// Gives a ticket all its frames, pinned, and begins to read; or gives it none. A row that is named twice is pinned
// twice.
bool TieredShard::admit(Ticket& ticket) {
  std::vector<RowRef> missing;
  const bool is_known = !ticket.frames.empty();  // by the call that asked, which was just now
  if (!is_known) ticket.frames.resize(ticket.rows.size(), SlotMap::none);
  for (size_t i = 0; i < ticket.rows.size(); ++i) {  // what is there must not leave for what is not
    const RowRef row = ticket.rows[i];
    const Table& table = tables_[row.table];
    uint32_t& frame = ticket.frames[i];
    if (!is_known) frame = table.frames.find(row.slot);
    if (frame == SlotMap::none && (frame = table.loading.find(row.slot)) != SlotMap::none) ticket.shared.push_back(row);
    if (frame != SlotMap::none)
      ++frames_of(table).at(frame).pins;
    else
      missing.push_back(row);
    if (frame == SlotMap::none) table.places.prefetch(row.slot);  // for load()
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  if (!find_room(frames_needed(missing, false))) {
    unpin(ticket);
    ticket.frames.clear();
    ticket.shared.clear();
    return false;
  }
  ticket.admitted = true;
  memo_.is_valid = false;
  for (const RowRef row : missing) load(row, &ticket);
  for (size_t i = 0; i < ticket.rows.size(); ++i) {
    const RowRef row = ticket.rows[i];
    const Table& table = tables_[row.table];
    uint32_t& frame = ticket.frames[i];
    if (frame == SlotMap::none) {
      frame = table.frames.find(row.slot);
      if (frame == SlotMap::none) frame = table.loading.find(row.slot);
      ++frames_of(table).at(frame).pins;
    }
    frames_of(table).use(frame, stamp_);
  }
  ticket.reading = !ticket.plan.rows.empty();
  if (ticket.reading) {
    build_plan(ticket.plan, 0);
    counters_.reads += ticket.plan.pieces.size();
    std::vector<IoStep> steps;
    steps.push_back({IoStep::Kind::read, ticket.plan.pieces});
    ticket.job = lanes_->submit(Lane::reads, std::move(steps));
  }
  return true;
}

// A frame for a row that is not there: filled, if it need not be read, or else to be read for the ticket. Without a
// ticket none is taken for what has to be read.
uint32_t TieredShard::load(RowRef row, Ticket* ticket) {
  Table& table = tables_[row.table];
  Frames& frames = frames_of(table);
  const auto index = static_cast<uint16_t>(row.table);
  const uint32_t frame = frames.is_whole() ? table.frames.base() + row.slot : frames.take(index, row.slot);
  if (frames.is_whole()) frames.take_own(frame, index, row.slot);
  frames.enter(frame, stamp_, frames.is_patient() && is_gone_lately(row));
  if (find_in_memory(row, frames.record(frame))) {
    table.frames.put(row.slot, frame);
    return frame;
  }
  if (!ticket) {
    frames.give_back(frame);
    return SlotMap::none;
  }
  table.loading.put(row.slot, frame);
  plan_row(row, frame, ticket->plan);
  if (const uint32_t place = ticket->plan.rows.back().place; place != SlotMap::none) log_->add_reader(place);
  return frame;
}

void TieredShard::admit_waiting() {
  for (Ticket& ticket : tickets_)
    if (!ticket.admitted && !admit(ticket)) return;
}

// Puts what was read into the frames.
void TieredShard::take_reads(Ticket& ticket, std::vector<std::string>& damaged) {
  ticket.reading = false;
  std::vector<RowRef> lost;
  for (const ReadPlan::Wanted& wanted : ticket.plan.rows) {
    Table& table = tables_[wanted.row.table];
    const bool from_log = wanted.place != SlotMap::none;
    if (from_log) log_->drop_reader(wanted.place);
    ++(from_log ? counters_.rows_read_log : counters_.rows_read_home);
    const float* record = ticket.job ? checked(wanted) : nullptr;
    if (!record) {
      damaged.push_back(name(wanted.row) + " in the " + disk_file_names[static_cast<size_t>(wanted.file)]);
      lost.push_back(wanted.row);
      continue;
    }
    std::memcpy(frames_of(table).record(wanted.number), record, table.record_bytes());
    table.loading.erase(wanted.row.slot);
    table.frames.put(wanted.row.slot, wanted.number);
  }
  memo_.is_valid = false;
  ticket.plan = {};
  if (!lost.empty()) drop_rows(lost);
}

// Rows that could not be read: whoever waits for one of them is given up, and the rest of its rows is let go of once
// nothing is being read for it.
void TieredShard::drop_rows(const std::vector<RowRef>& rows) {
  for (Ticket& ticket : tickets_) {
    if (!ticket.admitted) continue;
    size_t kept = 0;
    for (size_t i = 0; i < ticket.rows.size(); ++i) {
      const bool is_lost = std::find(rows.begin(), rows.end(), ticket.rows[i]) != rows.end();
      if (is_lost) ticket.id = 0;
      if (is_lost) continue;
      ticket.rows[kept] = ticket.rows[i];
      ticket.frames[kept++] = ticket.frames[i];
    }
    ticket.rows.resize(kept);
    ticket.frames.resize(kept);
  }
  for (const RowRef row : rows) {
    Table& table = tables_[row.table];
    frames_of(table).give_back(table.loading.find(row.slot));
    table.loading.erase(row.slot);
  }
}

void TieredShard::forget_given_up() {
  for (Ticket& ticket : tickets_)
    if (!ticket.id && !ticket.reading) unpin(ticket);
  std::erase_if(tickets_, [](const Ticket& ticket) { return !ticket.id && !ticket.reading; });
}

bool TieredShard::is_ready(const Ticket& ticket) const {
  if (!ticket.admitted || ticket.reading) return false;
  return std::all_of(ticket.shared.begin(), ticket.shared.end(),
                     [&](RowRef row) { return tables_[row.table].loading.find(row.slot) == SlotMap::none; });
}

// Who is told of a ticket asks for its rows next: they need not be looked up again.
void TieredShard::remember(const Ticket& ticket) {
  if (ticket.counts.empty()) return;
  memo_.counts = ticket.counts;
  memo_.frames = ticket.frames;
  memo_.slots.resize(ticket.rows.size());
  std::ranges::transform(ticket.rows, memo_.slots.begin(), &RowRef::slot);
  memo_.is_valid = true;
}

std::vector<uint64_t> TieredShard::poll_fetched() {
  lanes_->clear_fd();
  settle();
  std::vector<std::string> damaged = std::exchange(damaged_, {});
  if (lanes_->failure(Lane::reads)) {  // its rows cannot be read at all
    for (Ticket& ticket : tickets_)
      if (ticket.reading && !lanes_->is_done(Lane::reads, ticket.job)) {
        damaged.push_back(lanes_->failure_text(Lane::reads));
        ticket.job = 0;
        take_reads(ticket, damaged);
        break;
      }
    lanes_->skip(Lane::reads);
  }
  for (Ticket& ticket : tickets_)
    if (ticket.reading && lanes_->is_done(Lane::reads, ticket.job)) take_reads(ticket, damaged);
  forget_given_up();
  if (!damaged.empty()) {
    lanes_->ring();  // for those that are done all the same
    std::string all;
    for (const std::string& each : damaged) all += (all.empty() ? "" : ", ") + each;
    throw StoreDamaged("not what was written: " + all);
  }
  admit_waiting();
  std::vector<uint64_t> ready;
  for (Ticket& ticket : tickets_)
    if (ticket.id && !ticket.is_told && is_ready(ticket)) {
      ticket.is_told = true;
      ready.push_back(ticket.id);
      if (ready.size() == 1) remember(ticket);
    }
  for (const Ticket& ticket : tickets_)
    if (!ticket.admitted) {
      if (ready.empty()) check_full(ticket);
      break;
    }
  return ready;
}

void TieredShard::unpin(Ticket& ticket) {
  for (size_t i = 0; i < ticket.frames.size(); ++i) {
    if (ticket.frames[i] == SlotMap::none) continue;
    Frame& frame = frames_of(tables_[ticket.rows[i].table]).at(ticket.frames[i]);
    if (frame.pins) --frame.pins;  // none only where a test ignores pins
  }
}

void TieredShard::release(uint64_t id) {
  const auto found = std::find_if(tickets_.begin(), tickets_.end(), [=](const Ticket& each) { return each.id == id; });
  if (!id || found == tickets_.end()) throw std::invalid_argument("there is no ticket " + std::to_string(id));
  found->id = 0;  // if it reads, its frames wait for that: others may have asked for the same rows meanwhile
  forget_given_up();
  admit_waiting();
  if (std::any_of(tickets_.begin(), tickets_.end(), [this](const Ticket& each) { return each.id && is_ready(each); }))
    lanes_->ring();
}

}  // namespace regrow
