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

size_t count_bits(const std::vector<uint64_t>& words) {
  return std::accumulate(words.begin(), words.end(), size_t{0},
                         [](size_t sum, uint64_t word) { return sum + static_cast<size_t>(std::popcount(word)); });
}

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
  for (size_t tenant = 0; tenant < tenants_; ++tenant)
    for (size_t t = 0; t < counts.size(); ++t) priorities_[tenant].uncaptured[t] += static_cast<uint64_t>(counts[t]);
  updates_noted_ += slots.size();
}

uint64_t Shard::updates_uncaptured(size_t tenant) const {
  check_tenant(tenant);
  const std::vector<uint64_t>& updates = priorities_[tenant].uncaptured;
  return std::accumulate(updates.begin(), updates.end(), uint64_t{0});
}

size_t Shard::priority_bytes() const {
  size_t bytes = 0;
  for (const Priority& priority : priorities_)
    for (const auto& rows : priority.rows) bytes += rows ? sizeof(RowPriority) + rows->bytes() : 0;
  return bytes;
}

// All that may fail of a capture's beginning: nothing has changed yet.
Shard::Choices Shard::choose(size_t tenant, bool full) const {
  const Priority& priority = priorities_[tenant];
  Choices choices{std::vector<RowPriority::Choice>(tables_.size()), std::vector<RowPriority::Held>(tables_.size()), 0};
  for (size_t t = 0; t < tables_.size(); ++t) {
    const RowPriority* rows = priority.of(t);
    if (!rows) continue;
    choices.held[t] = rows->make_held();
    const Tracking::Bits& dirty = tables_[t].tracking->dirty[tenant];
    const size_t count = full ? 0 : count_bits(dirty);
    if (count <= rows->rows_max()) continue;
    choices.tables[t] = rows->choose(dirty, tables_[t].records);
    choices.skipped += count - rows->rows_max();
  }
  return choices;
}

// The rows are captured: what was counted of them is the capture's.
void Shard::begin_priority(size_t tenant, Choices&& choices) {
  Priority& priority = priorities_[tenant];
  capture_skipped_ = choices.skipped;
  priority.held = std::move(choices.held);
  priority.held_updates.swap(priority.uncaptured);  // and then those that stay come back
  priority.uncaptured.assign(priority.held_updates.size(), 0);
  for (size_t t = 0; t < tables_.size(); ++t) {
    RowPriority* rows = priority.of(t);
    if (!rows) continue;
    const RowPriority::Choice& choice = choices.tables[t];
    const std::optional<uint32_t> next = choice.rows.empty() ? std::nullopt : std::optional(choice.next);
    const uint64_t updates = rows->begin(tables_[t].tracking->captured, next, priority.held[t]);
    if (t >= priority.uncaptured.size()) continue;  // none was noted yet
    priority.uncaptured[t] = std::exchange(priority.held_updates[t], updates) - updates;
  }
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
