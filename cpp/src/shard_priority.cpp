// The Shard as one that may not save all rows that changed: who was updated how often, and whose turn it is. What is
// kept per row is in priority.hpp; here it is brought together with tables, tenants and captures.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "regrow/init.hpp"
#include "regrow/shard.hpp"
#include "shard_runs.hpp"

namespace regrow {
namespace {

// To see how far a row is from its copy takes as long as it takes to look at so many counts.
constexpr size_t scar_words = 8;

}  // namespace

// Slots without holes, which are in the last block.
uint64_t Shard::rows_here(const Table& table) const {
  uint64_t rows = table.slots;
  for (uint32_t slot = table.slots - table.k(); slot < table.slots; ++slot)
    rows -= table.layout.row_of(static_cast<uint32_t>(settings_.server), slot) >=
            static_cast<uint64_t>(table.settings.rows);
  return rows;
}

void Shard::set_priority(size_t tenant, PriorityKind kind, std::span<const int64_t> tables, double share, uint64_t seed,
                         int64_t period) {
  check_tenant(tenant);
  if (!(share > 0.0 && share <= 1.0))
    throw std::invalid_argument("share must be above 0 and at most 1, not " + std::to_string(share));
  if (period < 1) throw std::invalid_argument("period must be at least 1, not " + std::to_string(period));
  for (const int64_t table : tables) at(static_cast<size_t>(table));
  if (capturing_) throw std::invalid_argument("a capture is under way; end it before priorities change");
  if (const uint64_t updates = updates_uncaptured(tenant))
    throw std::invalid_argument(std::to_string(updates) + " updates are in no capture yet, and nobody knows of which " +
                                "rows: set priorities before they are noted");
  Priority made;
  made.kind = kind;
  made.period = static_cast<uint64_t>(period);
  made.rows.resize(tables_.size());
  for (const int64_t index : tables) {
    if (kind == PriorityKind::none) break;
    const Table& table = tables_[static_cast<size_t>(index)];
    const auto rows_max = static_cast<size_t>(share * static_cast<double>(rows_here(table)));
    auto rows = std::make_unique<RowPriority>(
        RowPriority::Settings{kind, table.slots, table.records.dim, std::max<size_t>(1, rows_max),
                              table_key(seed, static_cast<uint64_t>(table.settings.table))});
    if (kind == PriorityKind::scar)
      ThreadPool::shared().parallel_for((table.slots + rows_per_task - 1) / rows_per_task, [&](size_t task, size_t) {
        const size_t end = std::min<size_t>(table.slots, (task + 1) * rows_per_task);
        for (size_t slot = task * rows_per_task; slot < end; ++slot)
          write_initial(table, static_cast<uint32_t>(slot), rows->copy(static_cast<uint32_t>(slot)));
      });
    made.rows[static_cast<size_t>(index)] = std::move(rows);
  }
  priorities_[tenant] = std::move(made);
}

void Shard::note_updates(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  check_counts(counts, slots);
  check_ranges(counts, slots);
  for (size_t tenant = 0; tenant < tenants_; ++tenant)
    if (priorities_[tenant].uncaptured.size() < counts.size()) priorities_[tenant].uncaptured.resize(counts.size(), 0);
  for (size_t tenant = 0; tenant < tenants_; ++tenant) {
    Priority& priority = priorities_[tenant];
    if (priority.kind == PriorityKind::none) continue;
    if (choosing_ && tenant == *capturing_)
      choosing_->noted.push_back({{counts.begin(), counts.end()}, {slots.begin(), slots.end()}});
    else
      count_updates(priority, counts, slots);
  }
  for (size_t tenant = 0; tenant < tenants_; ++tenant)
    for (size_t t = 0; t < counts.size(); ++t) priorities_[tenant].uncaptured[t] += static_cast<uint64_t>(counts[t]);
  updates_noted_ += slots.size();
}

void Shard::count_updates(Priority& priority, std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  for_runs(counts, slots, Width::weights, [&](const Run& run) {
    RowPriority* rows = priority.of(static_cast<size_t>(&run.table - tables_.data()));
    if (rows) rows->counts.add(run.slots, run.count);
  });
  const bool samples = priority.kind == PriorityKind::ssu && ++priority.calls % priority.period == 0;
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); slot += counts[t], ++t) {
    RowPriority* rows = priority.of(t);
    if (!rows) continue;
    if (!rows->counts.is_settled()) rows->counts.settle(slot, static_cast<size_t>(counts[t]));
    if (samples) rows->sample(slot, static_cast<size_t>(counts[t]));
  }
}

uint64_t Shard::updates_uncaptured(size_t tenant) {
  check_tenant(tenant);
  finish_choosing();
  const std::vector<uint64_t>& updates = priorities_[tenant].uncaptured;
  return std::accumulate(updates.begin(), updates.end(), uint64_t{0});
}

size_t Shard::capture_skipped() {
  finish_choosing();
  return capture_skipped_;
}

uint64_t Shard::updates_skipped() {
  finish_choosing();
  return updates_skipped_;
}

size_t Shard::priority_bytes() const {
  size_t bytes = 0;
  for (const Priority& priority : priorities_)
    for (const auto& rows : priority.rows) bytes += rows ? sizeof(RowPriority) + rows->bytes() : 0;
  return bytes;
}

size_t Shard::count_bytes() const {
  size_t bytes = 0;
  for (const Priority& priority : priorities_)
    for (const auto& rows : priority.rows) bytes += rows ? rows->counts.bytes() : 0;
  return bytes;
}

// All dirty rows are captured. Of tables that are captured whole, so is what was counted; of the others it is found
// out.
void Shard::begin_priority(size_t tenant, bool full) {
  Priority& priority = priorities_[tenant];
  capture_skipped_ = 0;
  updates_skipped_ = 0;
  priority.held.resize(priority.kind == PriorityKind::none ? 0 : tables_.size());
  priority.held_updates.assign(priority.uncaptured.size(), 0);
  for (size_t t = 0; t < priority.uncaptured.size(); ++t) {
    if (priority.of(t))
      updates_skipped_ += priority.uncaptured[t];  // less what is chosen
    else
      std::swap(priority.held_updates[t], priority.uncaptured[t]);
  }
  if (priority.kind != PriorityKind::none) choosing_ = Choosing{.full = full, .rows = {}, .noted = {}};
}

bool Shard::choose_captured(int64_t rows) {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (rows < 1) throw std::invalid_argument("rows must be at least 1, not " + std::to_string(rows));
  if (!choosing_) return false;
  Priority& priority = priorities_[*capturing_];
  auto words = static_cast<size_t>(rows) / 64 + 1;
  if (priority.kind == PriorityKind::scar) words = words / scar_words + 1;
  for (; choosing_->table < tables_.size() && words; ++choosing_->table) {
    RowPriority* found = priority.of(choosing_->table);
    if (!found) continue;
    Table& table = tables_[choosing_->table];
    Tracking& tracking = *table.tracking;
    if (!choosing_->rows) choosing_->rows = found->begin(tracking.rows_left, choosing_->full);
    for (uint32_t list = 0; table.aside && list < table.aside->lists(); ++list) table.aside->index(list);
    for (bool more = true; more; words -= std::min(words, table.words())) {
      if (!words) return true;
      more = found->choose(*choosing_->rows, tracking.captured, table.records, table.aside.get(), words);
    }
    end_choice(choosing_->table, std::move(*choosing_->rows));
    choosing_->rows.reset();
  }
  if (choosing_->table < tables_.size()) return true;
  // All at once: in slices, pushes could come faster than they are counted.
  for (; choosing_->noted_next < choosing_->noted.size(); ++choosing_->noted_next) {
    const Noted& next = choosing_->noted[choosing_->noted_next];
    count_updates(priority, next.counts, next.slots);
  }
  choosing_.reset();
  return false;
}

void Shard::finish_choosing() {
  while (choosing_ && choose_captured(INT64_MAX)) continue;
}

// It is known which rows of a table the capture has, and how many updates of them.
void Shard::end_choice(size_t table, RowPriority::Choosing&& choosing) {
  Priority& priority = priorities_[*capturing_];
  Tracking& tracking = *tables_[table].tracking;
  capture_skipped_ += tracking.rows_left - choosing.count;
  if (!choosing.rows.empty()) leave_out(tables_[table], choosing.rows);
  const uint64_t updates = choosing.held.counts.sum;
  priority.held[table] = std::move(choosing.held);
  if (table >= priority.held_updates.size()) return;  // none was noted yet
  priority.held_updates[table] = updates;
  priority.uncaptured[table] -= updates;
  updates_skipped_ -= updates;
}

// Rows that were captured until it was known which are wanted: they are dirty as before, and nothing is kept of them.
void Shard::leave_out(Table& table, const Tracking::Bits& chosen) const {
  Tracking& tracking = *table.tracking;
  for (size_t word = 0; word < table.words(); ++word) {
    const uint64_t out = tracking.captured[word] & ~chosen[word];
    if (!out) continue;
    tracking.dirty[*capturing_][word] |= out;
    tracking.captured[word] &= ~out;
    tracking.left[word] &= ~out;
    tracking.rows_left -= static_cast<size_t>(std::popcount(out));
    for (uint64_t bits = out & tracking.kept[word]; bits; bits &= bits - 1)
      ++tracking.taken[table.aside->list_of(static_cast<uint32_t>(word * 64) +
                                            static_cast<uint32_t>(std::countr_zero(bits)))];
    tracking.kept[word] |= out;
  }
  free_lists(table);
}

void Shard::end_priority(size_t tenant, bool durable) {
  Priority& priority = priorities_[tenant];
  for (size_t t = 0; t < priority.held.size(); ++t)
    if (RowPriority* rows = priority.of(t)) rows->reserve_end(tables_[t].tracking->captured, priority.held[t], durable);
  for (size_t t = 0; t < priority.held.size(); ++t)
    if (RowPriority* rows = priority.of(t)) rows->end(tables_[t].tracking->captured, priority.held[t], durable);
  for (size_t t = 0; !durable && t < priority.held_updates.size(); ++t)
    priority.uncaptured[t] += priority.held_updates[t];
  priority.held.clear();
  priority.held_updates.clear();
}

// Of rows that are taken: the weights as they were when the capture began.
void Shard::keep_copies(size_t table, std::span<const uint32_t> slots) const {
  const RowPriority* rows = priorities_[*capturing_].of(table);
  if (!rows || rows->kind() != PriorityKind::scar) return;
  const Table& found = tables_[table];
  for (const uint32_t slot : slots) {
    const bool aside = found.aside->pending(slot);
    const float* record = aside ? found.aside->saved(slot) : found.records.base + slot * found.records.stride;
    std::memcpy(rows->copy(slot), record, found.records.dim * sizeof(float));
  }
}

}  // namespace regrow
