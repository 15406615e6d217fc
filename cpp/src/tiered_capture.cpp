// A TieredShard as the source of checkpoints: as src/capture.cpp does it, with rows that may be on disk.
#include <algorithm>
#include <bit>
#include <cstring>

#include "regrow/tiered.hpp"
#include "table_rules.hpp"

namespace regrow {
namespace {

bool bit_at(const std::vector<uint64_t>& words, uint32_t slot) { return words[slot / 64] >> (slot % 64) & 1; }

}  // namespace

void TieredShard::check_tenant(size_t tenant) const {
  if (tenant >= tenants_)
    throw std::out_of_range("there is no tenant " + std::to_string(tenant) + "; this store has " +
                            std::to_string(tenants_));
}

// After it, Tracking knows of every change, and Table::changed has no bit.
void TieredShard::settle_changes(Table& table) const {
  for (size_t word = 0; word < table.words(); ++word) {
    const uint64_t changed = table.changed[word];
    if (!changed) continue;
    for (size_t tenant = 0; tenant < tenants_; ++tenant) table.tracking->dirty[tenant][word] |= changed;
    table.tracking->settled[word] |= changed;
    table.changed[word] = 0;
  }
}

size_t TieredShard::add_tenant() {
  if (tenants_ == tenants_max)
    throw std::invalid_argument("a store has at most " + std::to_string(tenants_max) + " tenants");
  for (Table& table : tables_) {
    if (!table.tracking) {
      table.tracking = std::make_unique<Tracking>();
      for (Bits* bits : {&table.tracking->settled, &table.tracking->captured, &table.tracking->left})
        bits->assign(table.words(), 0);
    }
    settle_changes(table);
    table.tracking->dirty[tenants_] = table.tracking->settled;
  }
  return tenants_++;
}

size_t TieredShard::dirty_rows(size_t tenant) const {
  check_tenant(tenant);
  size_t rows = 0;
  for (const Table& table : tables_)
    for (size_t word = 0; word < table.words(); ++word)
      rows += static_cast<size_t>(std::popcount(table.tracking->dirty[tenant][word] | table.changed[word]));
  return rows;
}

void TieredShard::begin_capture(size_t tenant, bool full) {
  check_tenant(tenant);
  if (capturing_)
    throw std::invalid_argument("a capture of tenant " + std::to_string(*capturing_) +
                                " is under way; end it before the next");
  for (Table& table : tables_) {
    settle_changes(table);
    Tracking& tracking = *table.tracking;
    tracking.captured = full ? tracking.settled : tracking.dirty[tenant];
    tracking.left = tracking.captured;
    tracking.rows_left = tracking.word_next = 0;
    for (size_t word = 0; word < table.words(); ++word) {
      tracking.rows_left += static_cast<size_t>(std::popcount(tracking.captured[word]));
      tracking.dirty[tenant][word] &= ~tracking.captured[word];
    }
  }
  held_updates_[tenant] = uncaptured_[tenant];
  uncaptured_[tenant] = 0;
  capturing_ = tenant;
}

void TieredShard::keep_aside(Table& table, uint32_t slot, const float* record) {
  Tracking& tracking = *table.tracking;
  if (!bit_at(tracking.left, slot) || tracking.aside.find(slot) != SlotMap::none) return;
  Buffer<float> copy(table.stride);
  std::memcpy(copy.data(), record, table.record_bytes());
  tracking.aside.put(slot, static_cast<uint32_t>(tracking.records.size()));
  tracking.records.push_back(std::move(copy));
  ++tracking.aside_left;
}

size_t TieredShard::capture_left() const {
  size_t rows = 0;
  for (const Table& table : tables_) rows += table.tracking ? table.tracking->rows_left : 0;
  return rows;
}

size_t TieredShard::capture_side_bytes() const {
  size_t bytes = 0;
  for (const Table& table : tables_)
    if (table.tracking && table.tracking->aside_left) bytes += table.tracking->records.size() * table.record_bytes();
  return bytes;
}

// Up to so many rows of a table that were not taken yet, those kept aside only or all, in the order of slots.
std::vector<uint32_t> TieredShard::choose_left(const Table& table, size_t rows_max, bool aside_only) const {
  std::vector<uint32_t> slots;
  Tracking& tracking = *table.tracking;
  if (aside_only) {
    tracking.aside.for_each([&](uint32_t slot, uint32_t) {
      if (bit_at(tracking.left, slot)) slots.push_back(slot);
    });
    std::sort(slots.begin(), slots.end());
    slots.resize(std::min(slots.size(), rows_max));
    return slots;
  }
  while (tracking.word_next < table.words() && !tracking.left[tracking.word_next]) ++tracking.word_next;
  for (size_t word = tracking.word_next; word < table.words() && slots.size() < rows_max; ++word)
    for (uint64_t bits = tracking.left[word]; bits && slots.size() < rows_max; bits &= bits - 1)
      slots.push_back(static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits))));
  return slots;
}

// Records of rows as they were at the instant of the capture.
void TieredShard::read_captured(size_t index, std::span<const uint32_t> slots, float* out) {
  const Table& table = tables_[index];
  const Tracking& tracking = *table.tracking;
  std::vector<uint32_t> present;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (const uint32_t kept = tracking.aside.find(slots[i]); kept != SlotMap::none) {
      std::memcpy(out + i * table.stride, tracking.records[kept].data(), table.record_bytes());
    } else {
      present.push_back(slots[i]);
      numbers.push_back(i);
    }
  }
  Buffer<float> records(present.size() * table.stride);
  read_rows(index, present, records.data());
  for (size_t i = 0; i < present.size(); ++i)
    std::memcpy(out + numbers[i] * table.stride, records.data() + i * table.stride, table.record_bytes());
}

void TieredShard::forget_captured(Table& table, std::span<const uint32_t> slots) const {
  Tracking& tracking = *table.tracking;
  for (const uint32_t slot : slots) {
    tracking.left[slot / 64] &= ~(uint64_t{1} << (slot % 64));
    tracking.aside_left -= tracking.aside.find(slot) != SlotMap::none;
  }
  tracking.rows_left -= slots.size();
  if (tracking.aside_left) return;
  tracking.aside = SlotMap();
  tracking.records.clear();
}

CapturedChunk TieredShard::capture_chunk(int64_t bytes_max, bool aside_first) {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (bytes_max < 1) throw std::invalid_argument("bytes_max must be at least 1, not " + text(bytes_max));
  std::vector<std::vector<uint32_t>> chosen(tables_.size());
  size_t bytes_left = static_cast<size_t>(bytes_max), rows = 0, words = 0;
  const auto row_words = [](const Table& table) {
    const RecordPart last = record_parts(table.settings).back();
    return 1 + last.first + last.width;
  };
  // Two passes: those kept aside, then what is left. The first row is taken whatever it needs, and so that rows go in
  // order, none after one that had no room.
  bool is_full = false;
  for (const bool aside_only : {true, false}) {
    if (aside_only && !aside_first) continue;
    for (size_t t = 0; t < tables_.size() && !is_full; ++t) {
      const size_t row_bytes = row_words(tables_[t]) * sizeof(uint32_t);
      const size_t taken = chosen[t].size();
      const size_t fit = std::max<size_t>(bytes_left / row_bytes, rows == 0);
      std::vector<uint32_t> slots = choose_left(tables_[t], fit + 1 + taken, aside_only);
      if (taken) std::erase_if(slots, [&](uint32_t slot) { return std::ranges::binary_search(chosen[t], slot); });
      is_full = slots.size() > fit;
      slots.resize(std::min(slots.size(), fit));
      rows += slots.size();
      bytes_left -= std::min(bytes_left, slots.size() * row_bytes);
      words += slots.size() * row_words(tables_[t]);
      chosen[t].insert(chosen[t].end(), slots.begin(), slots.end());
      std::sort(chosen[t].begin(), chosen[t].end());
    }
  }
  CapturedChunk captured{std::vector<int32_t>(tables_.size()), Buffer<uint32_t>(words)};
  uint32_t* next = captured.words.data();
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (chosen[t].empty()) continue;
    const Table& table = tables_[t];
    const std::vector<uint32_t> taken = chosen[t];
    const size_t count = number_rows(table.layout, table.settings.rows, settings_.server, chosen[t], next);
    Buffer<float> records(taken.size() * table.stride);
    read_captured(t, taken, records.data());
    next += count;
    for (const RecordPart part : record_parts(table.settings))
      for (size_t i = 0; i < count; ++i, next += part.width) {
        const auto at = std::ranges::lower_bound(taken, chosen[t][i]) - taken.begin();
        std::memcpy(next, records.data() + static_cast<size_t>(at) * table.stride + part.first,
                    part.width * sizeof(float));
      }
    captured.counts[t] = static_cast<int32_t>(count);
  }
  for (size_t t = 0; t < tables_.size(); ++t)
    if (!chosen[t].empty()) forget_captured(tables_[t], chosen[t]);
  return captured;
}

void TieredShard::end_capture(bool durable) {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (const size_t left = capture_left(); durable && left)
    throw std::invalid_argument(std::to_string(left) +
                                " captured rows were not taken yet: the capture cannot be durable");
  for (Table& table : tables_) {
    Tracking& tracking = *table.tracking;
    tracking.rows_left = tracking.aside_left = 0;
    tracking.aside = SlotMap();
    tracking.records.clear();
    for (size_t word = 0; word < table.words() && !durable; ++word)
      tracking.dirty[*capturing_][word] |= tracking.captured[word];
    std::fill(tracking.left.begin(), tracking.left.end(), 0);
  }
  if (!durable) uncaptured_[*capturing_] += held_updates_[*capturing_];
  capturing_.reset();
}

void TieredShard::note_updates(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  check_counts(counts, slots);
  for (size_t tenant = 0; tenant < tenants_; ++tenant) uncaptured_[tenant] += slots.size();
  updates_noted_ += slots.size();
}

uint64_t TieredShard::updates_uncaptured(size_t tenant) const {
  check_tenant(tenant);
  return uncaptured_[tenant];
}

}  // namespace regrow
