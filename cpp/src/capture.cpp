// The Shard as the source of checkpoints: which rows changed, and their values at one instant while training goes on.
// Rows are not copied at that instant: a captured row is read where it is, and copied aside only if it changes before
// it was taken. The rule to keep: whoever changes rows saves those of Table::aside first. And the way back: which rows
// of a checkpoint are this server's.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "regrow/dispatch.hpp"
#include "regrow/shard.hpp"
#include "shard_runs.hpp"
#include "table_rules.hpp"

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

// Some rows of a part, to where their records have it. Of a few widths that are usual, the copy needs no call.
void put_part(const float* source, std::span<const uint32_t> rows, const uint32_t* slots, size_t width, float* base,
              size_t stride) {
  const auto put = [=](auto copy) {
    for (size_t i = 0; i < rows.size(); ++i) copy(base + slots[i] * stride, source + rows[i] * width);
  };
  const auto fixed = [](auto floats) {
    return [](float* to, const float* from) { std::memcpy(to, from, decltype(floats)::value * sizeof(float)); };
  };
  switch (width) {
    case 1:
      return put(fixed(std::integral_constant<size_t, 1>()));
    case 16:
      return put(fixed(std::integral_constant<size_t, 16>()));
    case 32:
      return put(fixed(std::integral_constant<size_t, 32>()));
    default:
      return put([=](float* to, const float* from) { std::memcpy(to, from, width * sizeof(float)); });
  }
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

size_t Shard::dirty_rows(size_t tenant) {
  check_tenant(tenant);
  finish_choosing();
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
    asides.push_back(
        std::make_unique<PendingRows>(table.records, PendingRows::Ranges{table.slots}, table.tracking->kept.data()));
  for (Table& table : tables_) settle(table);
  for (size_t t = 0; t < tables_.size(); ++t) {
    Table& table = tables_[t];
    Tracking& tracking = *table.tracking;
    std::atomic<size_t> rows{0};
    for_words(table.words(), [&](size_t first, size_t end) {
      size_t found = 0;
      for (size_t word = first; word < end; ++word) {
        const uint64_t dirty = tracking.dirty[tenant][word];
        const uint64_t set = full ? tracking.settled[word] : dirty;
        tracking.captured[word] = tracking.left[word] = set;
        tracking.kept[word] = ~set;
        tracking.dirty[tenant][word] = dirty & ~set;
        found += static_cast<size_t>(std::popcount(set));
      }
      rows.fetch_add(found, std::memory_order_relaxed);
    });
    tracking.rows_left = rows.load(std::memory_order_relaxed);
    tracking.word_next = 0;
    tracking.taken = tracking.looked = {};
    if (tracking.rows_left) table.aside = std::move(asides[t]);
  }
  begin_priority(tenant, full);
  capturing_ = tenant;
}

size_t Shard::capture_left() {
  finish_choosing();
  size_t rows = started_ ? started_->slots_copied : 0;
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

// How many rows of each table a call takes. With all of it known, memory can be asked for before the first is taken.
Shard::Share Shard::share(int64_t bytes_max, bool aside_first, const std::vector<size_t>& row_bytes) const {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (bytes_max < 1) throw std::invalid_argument("bytes_max must be at least 1, not " + std::to_string(bytes_max));
  auto bytes = static_cast<size_t>(bytes_max);
  Share share{std::vector<size_t>(tables_.size(), 0), std::vector<size_t>(tables_.size(), 0), 0};
  const auto afford = [&](size_t t, size_t wanted) {
    size_t count = std::min({wanted, bytes / row_bytes[t], size_t{INT32_MAX} - share.rows});
    if (wanted && !share.rows && !count) count = 1;
    bytes = count < wanted ? 0 : bytes - std::min(bytes, count * row_bytes[t]);  // nothing may overtake
    share.rows += count;
    return count;
  };
  for (size_t t = 0; aside_first && t < tables_.size(); ++t) share.aside[t] = afford(t, aside_left(tables_[t]));
  for (size_t t = 0; t < tables_.size(); ++t)
    if (tables_[t].aside) share.rest[t] = afford(t, tables_[t].tracking->rows_left - share.aside[t]);
  for (size_t t = 0; t < tables_.size(); ++t)
    for (uint32_t list = 0; share.count(t) && list < tables_[t].aside->lists(); ++list) tables_[t].aside->index(list);
  return share;
}

// Nothing has changed before all memory for it is there.
void Shard::begin_chunk(int64_t bytes_max, bool aside_first) {
  finish_choosing();
  std::vector<size_t> row_bytes;
  for (const Table& table : tables_) {
    size_t words = 1;  // its number
    for (const RecordPart part : record_parts(table.settings)) words += part.width;
    row_bytes.push_back(words * sizeof(uint32_t));
  }
  Started made;
  made.share = share(bytes_max, aside_first, row_bytes);
  size_t bytes = 0;
  for (size_t t = 0; t < tables_.size(); ++t) bytes += made.share.count(t) * row_bytes[t];
  made.captured = {std::vector<int32_t>(tables_.size()), Buffer<uint32_t>(bytes / sizeof(uint32_t))};
  made.slots = Buffer<uint32_t>(made.share.rows);
  made.slots_next = made.slots.data();
  made.words_next = made.captured.words.data();
  started_ = std::move(made);
}

// Copies up to so many rows of one table; returns how many there were, none at the end. Rows that changed since the
// chunk was begun are aside by now.
size_t Shard::copy_some(size_t rows_max) {
  Started& at = *started_;
  while (at.table < tables_.size() && !at.share.count(at.table)) ++at.table;
  if (at.table == tables_.size()) return 0;
  Table& table = tables_[at.table];
  const size_t count = at.share.count(at.table);
  if (!at.selected) {
    select(table, at.share.aside[at.table], at.share.rest[at.table], at.slots_next);
    at.rows = number_rows(table.layout, table.settings.rows, settings_.server, {at.slots_next, count}, at.words_next);
    at.captured.counts[at.table] = static_cast<int32_t>(at.rows);
    at.words_next += at.rows;
    at.selected = true;
    at.rows_copied = 0;
  }
  for (uint32_t list = 0; list < table.aside->lists(); ++list) table.aside->index(list);
  const size_t first = at.rows_copied;
  const size_t rows = std::min(rows_max, at.rows - first);
  const bool ends = first + rows == at.rows;
  const std::span<const uint32_t> taken(at.slots_next + first, ends ? count - first : rows);  // holes come last
  keep_copies(at.table, taken);
  uint32_t* words = at.words_next;
  for (const RecordPart part : record_parts(table.settings)) {
    const bool past_caches = at.rows * part.width * sizeof(float) >= cached_bytes_max;
    copy_rows(table, taken.first(rows), part, reinterpret_cast<float*>(words) + first * part.width, past_caches);
    words += at.rows * part.width;
  }
  forget(table, taken);
  at.rows_copied += rows;
  at.slots_copied += taken.size();
  if (!ends) return rows;
  at.words_next = words;
  at.slots_next += count;
  at.selected = false;
  ++at.table;
  return taken.size();
}

bool Shard::prepare_chunk(int64_t bytes_max, bool aside_first, int64_t slice_bytes) {
  if (slice_bytes < 1)
    throw std::invalid_argument("slice_bytes must be at least 1, not " + std::to_string(slice_bytes));
  if (!started_) begin_chunk(bytes_max, aside_first);
  for (auto left = static_cast<size_t>(slice_bytes); left;) {
    if (started_->table == tables_.size()) return false;
    const size_t row_bytes = tables_[started_->table].records.stride * sizeof(float);
    left -= std::min(left, std::max<size_t>(1, copy_some(left / row_bytes + 1)) * row_bytes);
  }
  return true;
}

CapturedChunk Shard::capture_chunk(int64_t bytes_max, bool aside_first) {
  if (!started_) begin_chunk(bytes_max, aside_first);
  while (copy_some(SIZE_MAX)) continue;
  CapturedChunk captured = std::move(started_->captured);
  started_.reset();
  return captured;
}

size_t Shard::load_rows(size_t table, std::span<const uint32_t> ids, const std::vector<std::span<const float>>& values,
                        std::optional<size_t> clean_to) {
  at(table);  // or there is none
  Table& found = tables_[table];
  const std::vector<RecordPart> parts = record_parts(found.settings);
  const Records& records = found.records;
  if (clean_to) check_tenant(*clean_to);
  const bool absent = found.recovery && found.recovery->absent_rows();
  if (absent && found.recovery->unknown)
    throw std::invalid_argument("which rows of table " + std::to_string(table) + " are to come is not known yet");
  if (values.size() != parts.size())
    throw std::invalid_argument("rows of table " + std::to_string(table) + " have " + std::to_string(parts.size()) +
                                " parts, not " + std::to_string(values.size()));
  for (size_t p = 0; p < parts.size(); ++p)
    if (values[p].size() != ids.size() * parts[p].width)
      throw std::invalid_argument("part " + std::to_string(p) + " of " + std::to_string(ids.size()) + " rows has " +
                                  std::to_string(ids.size() * parts[p].width) + " floats; the array has " +
                                  std::to_string(values[p].size()));
  const uint32_t most = ids.empty() ? 0 : kernels().max_u32(ids.data(), ids.size());
  if (!ids.empty() && most >= found.settings.rows)
    throw std::out_of_range("there is no row " + std::to_string(most) + " in table " + std::to_string(table));
  found.returning |= absent && found.parity;
  const bool first_wins = found.returning || absent;
  // A row that was absent is in no capture, and nobody's parity has anything of it: there is nothing to keep.
  const std::array savers{first_wins ? nullptr : found.pending.get(), first_wins ? nullptr : found.aside.get()};
  for (PendingRows* saver : savers)
    if (saver) saver->reserve(ids.size());

  std::vector<std::atomic<size_t>> rows(found.members());
  ThreadPool::shared().parallel_for((ids.size() + rows_per_task - 1) / rows_per_task, [&](size_t task, size_t) {
    uint32_t taken[rows_per_task];
    uint32_t slots[rows_per_task];
    size_t count = 0;
    for (size_t i = task * rows_per_task; i < std::min(ids.size(), (task + 1) * rows_per_task); ++i) {
      const Place place = found.layout.place(ids[i]);
      taken[count] = static_cast<uint32_t>(i);
      slots[count] = place.slot;
      count += place.server == settings_.server;
    }
    if (first_wins) count = take_missing(found, taken, slots, count);
    for (PendingRows* saver : savers)
      if (saver) saver->save(slots, count);
    // What follows the parts in a record, up to a multiple of four, is zero and stays so.
    for (size_t p = 0; p < parts.size(); ++p)
      put_part(values[p].data(), {taken, count}, slots, parts[p].width, records.base + parts[p].first, records.stride);
    if (first_wins) mark_loaded(table, {slots, count}, clean_to);
    uint64_t bits = 0;  // of one word: rows rise, and most of them follow each other
    for (size_t i = 0; !first_wins && i < count; ++i) {
      bits |= uint64_t{1} << (slots[i] % 64);
      if (i + 1 < count && slots[i + 1] / 64 == slots[i] / 64) continue;
      __atomic_fetch_or(records.changed + slots[i] / 64, bits, __ATOMIC_RELAXED);
      bits = 0;
    }
    std::vector<size_t> written(rows.size(), 0);
    for (size_t i = 0; i < count; ++i) ++written[found.member_of(slots[i])];
    for (size_t member = 0; member < rows.size(); ++member)
      if (written[member]) rows[member].fetch_add(written[member], std::memory_order_relaxed);
  });
  size_t loaded = 0;
  for (size_t member = 0; member < rows.size(); ++member) {
    const size_t count = rows[member].load(std::memory_order_relaxed);
    if (first_wins && count) found.recovery->missing[member] -= count;
    loaded += count;
  }
  end_recovery();
  return loaded;
}

std::vector<uint64_t> Shard::find_slots(size_t table, std::span<const uint32_t> ids) const {
  const Table& found = at(table);
  const uint32_t most = ids.empty() ? 0 : kernels().max_u32(ids.data(), ids.size());
  if (!ids.empty() && most >= found.settings.rows)
    throw std::out_of_range("there is no row " + std::to_string(most) + " in table " + std::to_string(table));
  std::vector<uint64_t> words(found.words(), 0);
  for (const uint32_t id : ids) {
    const Place place = found.layout.place(id);
    words[place.slot / 64] |= uint64_t{place.server == settings_.server} << (place.slot % 64);
  }
  return words;
}

void Shard::copy_rows(const Table& table, std::span<const uint32_t> slots, RecordPart part, float* out,
                      bool past_caches) const {
  ThreadPool::shared().parallel_for((slots.size() + rows_per_task - 1) / rows_per_task, [&](size_t task, size_t) {
    const size_t first = task * rows_per_task;
    const size_t count = std::min(rows_per_task, slots.size() - first);
    copy_part({table, slots.data() + first, count, 0}, part, out + first * part.width, past_caches);
  });
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

// Some floats of each row: of what was kept of it, if it has changed since.
void Shard::copy_part(const Run& run, RecordPart part, float* out, bool past_caches) const {
  Records records = run.table.records;
  records.base += part.first;
  records.dim = part.width;
  kernels().gather(records, run.slots, run.count, out, past_caches);
  for (size_t i = 0; i < run.count; ++i)
    if (run.table.aside->pending(run.slots[i]))
      std::memcpy(out + i * part.width, run.table.aside->saved(run.slots[i]) + part.first, part.width * sizeof(float));
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
  tracking.rows_left -= slots.size();
  free_lists(table);
}

// Lists of which all rows were taken.
void Shard::free_lists(Table& table) const {
  Tracking& tracking = *table.tracking;
  for (uint32_t list = 0; list < table.aside->lists(); ++list) {
    if (!tracking.taken[list] || tracking.taken[list] < table.aside->rows(list)) continue;
    table.aside->clear(list);
    tracking.taken[list] = tracking.looked[list] = 0;
  }
  if (!tracking.rows_left) table.aside.reset();
}

void Shard::end_capture(bool durable) {
  if (!capturing_) throw std::invalid_argument("no capture is under way; begin one first");
  if (const size_t left = capture_left(); durable && left)
    throw std::invalid_argument(std::to_string(left) +
                                " captured rows were not taken yet: the capture cannot be durable");
  started_.reset();
  end_priority(*capturing_, durable);
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
