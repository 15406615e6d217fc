// The Shard as the replacement of a server that died: rows that are absent until they are filled in, put or loaded.
// Of a row that was never touched the initial value is the value; the others have to be decoded elsewhere, or be read
// from a checkpoint or a save (load_rows in capture.cpp).
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "regrow/shard.hpp"
#include "shard_runs.hpp"

namespace regrow {
namespace {

bool bit_at(const uint64_t* words, uint64_t index) {
  return __atomic_load_n(words + index / 64, __ATOMIC_RELAXED) >> (index % 64) & 1;
}

// Returns whether the bit was set before. `alone`: no other thread is at work on these words.
bool set_bit(uint64_t* words, uint64_t index, bool alone = false) {
  const uint64_t bit = uint64_t{1} << (index % 64);
  uint64_t* word = words + index / 64;
  if (!alone) return __atomic_fetch_or(word, bit, __ATOMIC_RELAXED) & bit;
  const uint64_t before = *word;
  __atomic_store_n(word, before | bit, __ATOMIC_RELAXED);  // whoever looks meanwhile sees the one or the other
  return before & bit;
}

constexpr size_t put_rows_ahead = 4;
constexpr size_t line_bytes = 64;

}  // namespace

void Shard::know_touched(size_t group, size_t table, std::span<const uint64_t> words) {
  const bool bare = is_bare(group);
  if (bare && at(table).parity)
    throw std::invalid_argument("table " + std::to_string(table) + " has parities; its rows are in other groups");
  const uint32_t member = bare ? 0 : checked_member(table, group);
  Table& found = tables_[table];
  const uint32_t count = bare ? found.slots : found.blocks;  // without parities a block has nothing in common
  const uint32_t step = bare ? 1 : found.k();
  if (const size_t due = (size_t{count} + 63) / 64; words.size() != due)
    throw std::invalid_argument("the bits of " + std::to_string(count) + " blocks are " + std::to_string(due) +
                                " words, not " + std::to_string(words.size()));
  if (count % 64 && words.back() >> (count % 64))
    throw std::invalid_argument("there are bits beyond the last of " + std::to_string(count) + " blocks");
  if (!found.recovery) return;  // every row is there already
  Recovery& recovery = *found.recovery;
  // To tenants it has not changed before it is there.
  uint64_t* touched = found.tracking ? found.tracking->settled.data() : found.records.changed;
  // By words of slots: whoever waits for the first rows waits for this too.
  for (uint32_t block = 0; block < count;) {
    const size_t word = (size_t{block} * step + member) / 64;
    uint64_t absent = 0, wanted = 0;  // of this member: rows that are not there, and those of them that were touched
    for (size_t slot; block < count && (slot = size_t{block} * step + member) / 64 == word; ++block) {
      absent |= uint64_t{1} << (slot % 64);
      wanted |= uint64_t{bit_at(words.data(), block)} << (slot % 64);
    }
    absent &= ~recovery.present[word];
    const uint64_t blank = absent & ~wanted;
    const uint64_t was_blank = absent & recovery.known[word] & ~found.touched_word(word);
    const auto more = std::popcount(blank) - std::popcount(was_blank);
    recovery.unknown -= std::popcount(absent & ~recovery.known[word]);
    recovery.blank += more;
    recovery.missing[member] -= more;
    found.returning |= bare && (absent & wanted);
    recovery.known[word] |= absent;
    found.records.changed[word] &= ~absent;
    touched[word] = (touched[word] & ~absent) | (absent & wanted);
  }
  recovery.fill_next = 0;
}

RowNames Shard::prepare(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  check_counts(counts, slots);
  check_ranges(counts, slots);
  RowNames missing;
  missing.counts.assign(counts.size(), 0);
  const uint32_t* slot = slots.data();
  for (size_t t = 0; recovering_ && t < counts.size(); slot += counts[t], ++t) {
    Table& table = tables_[t];
    for (int32_t i = 0; table.recovery && i < counts[t]; ++i) {
      if (!table.recovery->absent(slot[i])) continue;
      if (bit_at(table.recovery->known, slot[i]) && !table.touched(slot[i])) {
        write_initial(table, slot[i], table.records.base + slot[i] * table.records.stride);
        set_bit(table.recovery->present, slot[i]);
        --table.recovery->blank;
      } else {
        missing.slots.push_back(slot[i]);
        ++missing.counts[t];
      }
    }
  }
  end_recovery();
  return missing;
}

size_t Shard::put(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> relatives) {
  check_call(counts, slots, relatives.size(), Width::record);
  if (!recovering_) return 0;
  std::vector<size_t> first{0};  // where the members of each table are counted
  for (const Table& table : tables_) first.push_back(first.back() + table.members());
  std::vector<std::atomic<size_t>> rows(first.back());
  const bool alone = ThreadPool::shared().size() == 1;
  for_runs(counts, slots, Width::record, [&](const Run& run) {
    const Table& table = run.table;
    if (!table.recovery) return;
    const size_t stride = table.records.stride;
    std::vector<size_t> written(table.members(), 0);
    for (size_t i = 0; i < run.count; ++i) {
      const uint32_t slot = run.slots[i];
      if (i + put_rows_ahead < run.count) {
        const auto* bytes = reinterpret_cast<const char*>(table.records.base + run.slots[i + put_rows_ahead] * stride);
        for (size_t at = 0; at < stride * sizeof(float); at += line_bytes) __builtin_prefetch(bytes + at, 1, 3);
      }
      if (!bit_at(table.recovery->known, slot) || !table.touched(slot)) continue;
      if (bit_at(table.recovery->present, slot) || set_bit(table.recovery->present, slot, alone)) continue;
      write_relative(table, slot, relatives.data() + run.float_begin + i * stride, table.records.base + slot * stride);
      set_bit(table.records.changed, slot, alone);  // it was absent, so it is in no capture
      ++written[table.member_of(slot)];
    }
    std::atomic<size_t>* counter = rows.data() + first[static_cast<size_t>(&table - tables_.data())];
    for (const size_t count : written) counter++->fetch_add(count, std::memory_order_relaxed);
  });
  size_t all = 0;
  for (size_t t = 0; t < tables_.size(); ++t)
    for (uint32_t member = 0; tables_[t].recovery && member < tables_[t].members(); ++member) {
      const size_t written = rows[first[t] + member].load(std::memory_order_relaxed);
      tables_[t].recovery->missing[member] -= written;
      all += written;
    }
  end_recovery();
  return all;
}

size_t Shard::fill(int64_t rows_max) {
  if (rows_max < 1) throw std::invalid_argument("rows_max must be at least 1, not " + std::to_string(rows_max));
  RowNames blank;
  blank.counts.assign(tables_.size(), 0);
  const auto limit = static_cast<size_t>(std::min<int64_t>(rows_max, INT32_MAX));
  for (size_t t = 0; t < tables_.size(); ++t) {
    Table& table = tables_[t];
    if (!table.recovery || !table.recovery->blank) continue;
    Recovery& recovery = *table.recovery;
    const size_t before = blank.slots.size();
    uint64_t slot = recovery.fill_next;
    while (slot < table.slots && blank.slots.size() < limit) {
      const uint64_t word = recovery.known[slot / 64] & ~table.touched_word(slot / 64) & ~recovery.present[slot / 64] &
                            ~uint64_t{0} << (slot % 64);
      if (word) {
        slot = slot / 64 * 64 + static_cast<uint64_t>(std::countr_zero(word));
        blank.slots.push_back(static_cast<uint32_t>(slot++));
      } else {
        slot = (slot / 64 + 1) * 64;
      }
    }
    recovery.fill_next = static_cast<uint32_t>(std::min<uint64_t>(slot, table.slots));
    blank.counts[t] = static_cast<int32_t>(blank.slots.size() - before);
    recovery.blank -= blank.slots.size() - before;
  }
  for_runs(blank.counts, blank.slots, Width::record, [&](const Run& run) {
    for (size_t i = 0; i < run.count; ++i) {
      write_initial(run.table, run.slots[i], run.table.records.base + run.slots[i] * run.table.records.stride);
      set_bit(run.table.recovery->present, run.slots[i]);
    }
  });
  end_recovery();
  return blank.slots.size();
}

// Of rows that somebody has the values of: those that were waited for. From now on they are there. They go first.
size_t Shard::take_missing(const Table& table, uint32_t* rows, uint32_t* slots, size_t count) const {
  size_t taken = 0;
  for (size_t i = 0; table.recovery && i < count; ++i) {
    const uint32_t slot = slots[i];
    if (!bit_at(table.recovery->known, slot) || !table.touched(slot)) continue;
    if (bit_at(table.recovery->present, slot) || set_bit(table.recovery->present, slot)) continue;
    rows[taken] = rows[i];
    slots[taken++] = slot;
  }
  return taken;
}

// Rows that came from where one of the tenants puts them: to the others they are new.
void Shard::mark_loaded(size_t table_index, std::span<const uint32_t> slots, std::optional<size_t> clean_to) const {
  const Table& table = tables_[table_index];
  const RowPriority* priority = clean_to ? priorities_[*clean_to].of(table_index) : nullptr;
  for (const uint32_t slot : slots) {
    if (!clean_to) set_bit(table.records.changed, slot);
    for (size_t tenant = 0; clean_to && tenant < tenants_; ++tenant)
      if (tenant != *clean_to) set_bit(table.tracking->dirty[tenant].data(), slot);
    if (priority && priority->kind() == PriorityKind::scar)
      std::memcpy(priority->copy(slot), table.records.base + slot * table.records.stride,
                  table.records.dim * sizeof(float));
  }
}

// Once every row is there, a recovered shard is like any other.
void Shard::end_recovery() {
  if (!recovering_ || missing_rows() || blank_rows()) return;
  recovering_ = false;
  for (Table& table : tables_) {
    table.recovery.reset();
    table.arena.advise(pages());
    if (table.parity) table.parity->arena.advise(pages());
  }
}

size_t Shard::missing_rows(std::optional<size_t> group) const {
  const bool bare = group && is_bare(*group);
  if (group && !bare) check_group(*group);
  size_t rows = 0;
  for (const Table& table : tables_) {
    if (!table.recovery) continue;
    const std::vector<size_t>& missing = table.recovery->missing;
    if (!group || (bare && !table.parity))
      rows += std::accumulate(missing.begin(), missing.end(), size_t{0});
    else if (const auto member = bare ? std::nullopt : member_in(table, *group))
      rows += missing[*member];
  }
  return rows;
}

size_t Shard::blank_rows() const {
  size_t rows = 0;
  for (const Table& table : tables_) rows += table.recovery ? table.recovery->blank : 0;
  return rows;
}

}  // namespace regrow
