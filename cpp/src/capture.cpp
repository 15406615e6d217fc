// The Shard as the source of checkpoints: which rows changed, and their values at one instant while training goes on.
// Rows are not copied at that instant: a captured row is read where it is, and copied aside only if it changes before
// it was taken. The rule to keep: whoever changes rows saves those of Table::aside first.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/shard.hpp"
#include "shard_runs.hpp"

namespace regrow {
namespace {

constexpr size_t words_per_task = size_t{1} << 13;
// Rows read into more than this are written past the caches, as in gather.
constexpr size_t cached_bytes_max = 8 << 20;

// Calls body(first, end) for pieces of a bitmap, on the threads of the pool.
template <typename Body>
void for_words(size_t words, Body&& body) {
  ThreadPool::shared().parallel_for((words + words_per_task - 1) / words_per_task, [&](size_t task, size_t) {
    body(task * words_per_task, std::min(words, (task + 1) * words_per_task));
  });
}

bool bit_at(const std::vector<uint64_t>& words, uint32_t slot) { return words[slot / 64] >> (slot % 64) & 1; }

}  // namespace

void Shard::check_tenant(size_t tenant) const {
  if (tenant >= tenants_)
    throw std::out_of_range("there is no tenant " + std::to_string(tenant) + "; this shard has " +
                            std::to_string(tenants_));
}

// Takes memory for the bits of the first `tenants` tenants.
void Shard::track(Table& table, size_t tenants) const {
  if (!table.tracking) {
    auto tracking = std::make_unique<Tracking>();
    for (auto* bits : {&tracking->settled, &tracking->captured, &tracking->left, &tracking->kept})
      bits->assign(table.words(), 0);
    table.tracking = std::move(tracking);
  }
  for (size_t tenant = 0; tenant < tenants; ++tenant) table.tracking->dirty[tenant].resize(table.words(), 0);
}

// After it, Tracking knows of every change, and Records::changed has no bit.
void Shard::settle(Table& table) const {
  Tracking& tracking = *table.tracking;
  for_words(table.words(), [&](size_t first, size_t end) {
    for (size_t word = first; word < end; ++word) {
      const uint64_t changed = table.records.changed[word];
      if (!changed) continue;
      for (size_t tenant = 0; tenant < tenants_; ++tenant) tracking.dirty[tenant][word] |= changed;
      // See touched_word(): in this order.
      __atomic_store_n(tracking.settled.data() + word, tracking.settled[word] | changed, __ATOMIC_RELAXED);
      __atomic_store_n(table.records.changed + word, 0, __ATOMIC_RELEASE);
    }
  });
}

size_t Shard::add_tenant() {
  if (tenants_ == tenants_max)
    throw std::invalid_argument("a shard has at most " + std::to_string(tenants_max) + " tenants");
  for (Table& table : tables_) track(table, tenants_ + 1);
  for (Table& table : tables_) {
    settle(table);
    Tracking& tracking = *table.tracking;
    for (size_t word = 0; word < table.words(); ++word) {
      const uint64_t present = table.recovery ? table.recovery->present[word] : ~uint64_t{0};
      tracking.dirty[tenants_][word] = tracking.settled[word] & present;
    }
  }
  return tenants_++;
}

size_t Shard::dirty_rows(size_t tenant) const {
  check_tenant(tenant);
  size_t rows = 0;
  for (const Table& table : tables_)
    for (size_t word = 0; word < table.words(); ++word)
      rows += static_cast<size_t>(std::popcount(table.tracking->dirty[tenant][word] | table.records.changed[word]));
  return rows;
}

void Shard::begin_capture(size_t tenant, bool full) {
  check_tenant(tenant);
  if (capturing_)
    throw std::invalid_argument("a capture of tenant " + std::to_string(*capturing_) +
                                " is under way; end it before the next");
  if (const size_t missing = missing_rows())
    throw std::invalid_argument(std::to_string(missing) +
                                " rows were not recovered yet; a capture has to wait until none is missing");
  std::vector<std::unique_ptr<PendingRows>> asides;
  for (const Table& table : tables_)
    asides.push_back(std::make_unique<PendingRows>(table.records, PendingRows::Ranges{table.slots},
                                                   table.tracking->kept.data()));
  for (size_t t = 0; t < tables_.size(); ++t) {
    Table& table = tables_[t];
    Tracking& tracking = *table.tracking;
    settle(table);
    std::atomic<size_t> rows{0};
    for_words(table.words(), [&](size_t first, size_t end) {
      size_t found = 0;
      for (size_t word = first; word < end; ++word) {
        const uint64_t set = full ? tracking.settled[word] : tracking.dirty[tenant][word];
        tracking.captured[word] = tracking.left[word] = set;
        tracking.kept[word] = ~set;
        tracking.dirty[tenant][word] = 0;
        found += static_cast<size_t>(std::popcount(set));
      }
      rows.fetch_add(found, std::memory_order_relaxed);
    });
    tracking.rows_left = rows.load(std::memory_order_relaxed);
    tracking.word_next = 0;
    tracking.taken = tracking.looked = {};
    if (tracking.rows_left) table.aside = std::move(asides[t]);
  }
  capturing_ = tenant;
}

size_t Shard::capture_left() const {
  size_t rows = 0;
  for (const Table& table : tables_) rows += table.tracking ? table.tracking->rows_left : 0;
  return rows;
}

size_t Shard::capture_side_bytes() const {
  size_t bytes = 0;
  for (const Table& table : tables_)
    for (uint32_t list = 0; table.aside && list < table.aside->lists(); ++list)
      bytes += table.aside->rows(list) * table.records.stride * sizeof(float);
  return bytes;
}

size_t Shard::aside_left(const Table& table) const {
  size_t rows = 0;
  for (uint32_t list = 0; table.aside && list < table.aside->lists(); ++list)
    rows += table.aside->rows(list) - table.tracking->taken[list];
  return rows;
}

CapturedRows Shard::capture_next(int64_t bytes_max, bool aside_first) {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (bytes_max < 1) throw std::invalid_argument("bytes_max must be at least 1, not " + std::to_string(bytes_max));
  // How many rows of each table: all that can fail comes before the first of them is taken.
  auto bytes = static_cast<size_t>(bytes_max);
  size_t rows = 0;
  size_t floats = 0;
  const auto afford = [&](const Table& table, size_t wanted) {
    const size_t row_bytes = table.records.stride * sizeof(float);
    size_t count = std::min({wanted, bytes / row_bytes, size_t{INT32_MAX} - rows});
    if (wanted && !rows && !count) count = 1;
    bytes = count < wanted ? 0 : bytes - std::min(bytes, count * row_bytes);  // nothing may overtake
    rows += count;
    floats += count * table.records.stride;
    return count;
  };
  std::vector<size_t> aside(tables_.size(), 0);
  std::vector<size_t> rest(tables_.size(), 0);
  for (size_t t = 0; aside_first && t < tables_.size(); ++t) aside[t] = afford(tables_[t], aside_left(tables_[t]));
  for (size_t t = 0; t < tables_.size(); ++t)
    if (tables_[t].aside) rest[t] = afford(tables_[t], tables_[t].tracking->rows_left - aside[t]);
  CapturedRows captured{std::vector<int32_t>(tables_.size()), Buffer<uint32_t>(rows), Buffer<float>(floats)};
  for (size_t t = 0; t < tables_.size(); ++t)
    for (uint32_t list = 0; aside[t] + rest[t] && list < tables_[t].aside->lists(); ++list)
      tables_[t].aside->index(list);

  uint32_t* slots = captured.slots.data();
  for (size_t t = 0; t < tables_.size(); slots += captured.counts[t++]) {
    captured.counts[t] = static_cast<int32_t>(aside[t] + rest[t]);
    if (captured.counts[t]) select(tables_[t], aside[t], rest[t], slots);
  }
  const bool past_caches = floats * sizeof(float) >= cached_bytes_max;
  for_runs(captured.counts, captured.slots.span(), Width::record, [&](const Run& run) {
    Records whole = run.table.records;
    whole.dim = whole.stride;
    float* out = captured.records.data() + run.float_begin;
    kernels().gather(whole, run.slots, run.count, out, past_caches);
    copy_aside(run, out);
  });
  const uint32_t* done = captured.slots.data();
  for (size_t t = 0; t < tables_.size(); done += captured.counts[t++])
    if (captured.counts[t]) forget(tables_[t], {done, static_cast<size_t>(captured.counts[t])});
  return captured;
}

// Takes rows out of `left`: so many of those kept aside, then so many of all that remain, in the order of slots.
void Shard::select(Table& table, size_t aside, size_t rest, uint32_t* slots) const {
  Tracking& tracking = *table.tracking;
  uint32_t* next = slots;
  for (uint32_t list = 0; list < table.aside->lists(); ++list) {
    size_t& row = tracking.looked[list];
    for (; next < slots + aside && row < table.aside->rows(list); ++row) {
      const uint32_t slot = table.aside->slot(list, row);
      if (!bit_at(tracking.left, slot)) continue;
      tracking.left[slot / 64] &= ~(uint64_t{1} << (slot % 64));
      *next++ = slot;
    }
  }
  for (size_t& word = tracking.word_next; next < slots + aside + rest;) {
    uint64_t& bits = tracking.left[word];
    if (!bits) {
      ++word;
      continue;
    }
    *next++ = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits)));
    bits &= bits - 1;
  }
  if (aside) std::sort(slots, next);
}

// Over what is in the row now: what was kept of it.
void Shard::copy_aside(const Run& run, float* out) const {
  const size_t stride = run.table.records.stride;
  for (size_t i = 0; i < run.count; ++i)
    if (run.table.aside->pending(run.slots[i]))
      std::memcpy(out + i * stride, run.table.aside->saved(run.slots[i]), stride * sizeof(float));
}

// Of rows that were taken nothing is kept, neither now nor when they change.
void Shard::forget(Table& table, std::span<const uint32_t> slots) const {
  Tracking& tracking = *table.tracking;
  for (const uint32_t slot : slots) {
    if (bit_at(tracking.kept, slot))
      ++tracking.taken[table.aside->list_of(slot)];
    else
      tracking.kept[slot / 64] |= uint64_t{1} << (slot % 64);
  }
  for (uint32_t list = 0; list < table.aside->lists(); ++list) {
    if (!tracking.taken[list] || tracking.taken[list] < table.aside->rows(list)) continue;
    table.aside->clear(list);
    tracking.taken[list] = tracking.looked[list] = 0;
  }
  tracking.rows_left -= slots.size();
  if (!tracking.rows_left) table.aside.reset();
}

void Shard::end_capture(bool durable) {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (const size_t left = capture_left(); durable && left)
    throw std::invalid_argument(std::to_string(left) +
                                " captured rows were not taken yet: the capture cannot be durable");
  for (Table& table : tables_) {
    Tracking& tracking = *table.tracking;
    table.aside.reset();
    tracking.rows_left = 0;
    if (durable) continue;
    for_words(table.words(), [&](size_t first, size_t end) {
      for (size_t word = first; word < end; ++word) tracking.dirty[*capturing_][word] |= tracking.captured[word];
    });
  }
  capturing_.reset();
}

}  // namespace regrow
