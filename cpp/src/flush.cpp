// The Shard as the source of rows that other servers hold parities of.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/shard.hpp"
#include "shard_runs.hpp"
#include "table_rules.hpp"

namespace regrow {
namespace {

constexpr size_t rows_ahead = 8;
constexpr size_t line_bytes = 64;

}  // namespace

void Shard::check_group(size_t group) const {
  if (group >= settings_.coding.size())
    throw std::out_of_range("there is no coding group " + std::to_string(group) + "; this shard has " +
                            std::to_string(settings_.coding.size()));
}

// Rows of tables without parities are a group as well, behind all others.
bool Shard::is_bare(size_t group) const {
  return group == settings_.coding.size() &&
         std::any_of(tables_.begin(), tables_.end(), [](const Table& table) { return !table.parity; });
}

// The one member of a table's blocks that is in the group, if any.
std::optional<uint32_t> Shard::member_in(const Table& table, size_t group) const {
  const CodingGroup& coding = settings_.coding[group];
  if (!table.parity || coding.r != table.settings.r || coding.distance > table.settings.k) return {};
  return static_cast<uint32_t>(table.settings.k - coding.distance);
}

uint32_t Shard::checked_member(size_t table, size_t group) const {
  check_group(group);
  const std::optional<uint32_t> member = member_in(at(table), group);
  if (!member)
    throw std::invalid_argument("table " + std::to_string(table) + " has no rows in coding group " +
                                std::to_string(group));
  return *member;
}

size_t Shard::pending_rows(size_t group) const {
  check_group(group);
  size_t rows = 0;
  for (const Table& table : tables_)
    if (const auto member = member_in(table, group)) rows += table.pending->rows(*member);
  return rows;
}

size_t Shard::pending_bytes() const {
  size_t bytes = 0;
  for (const Table& table : tables_)
    for (uint32_t member = 0; table.pending && member < table.k(); ++member)
      bytes += table.pending->rows(member) * table.records.stride * sizeof(float);
  return bytes;
}

Flush Shard::take_flush(size_t group, bool keep) {
  Flush flush;
  flush.counts.assign(tables_.size(), 0);
  flush.slots = Buffer<uint32_t>(pending_rows(group));
  size_t floats = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    const auto member = member_in(tables_[t], group);
    if (!member) continue;
    flush.counts[t] = static_cast<int32_t>(tables_[t].pending->rows(*member));
    floats += static_cast<size_t>(flush.counts[t]) * tables_[t].records.stride;
  }
  flush.deltas = Buffer<float>(floats);
  uint32_t* slots = flush.slots.data();
  float* deltas = flush.deltas.data();
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!flush.counts[t]) continue;
    tables_[t].pending->take(*member_in(tables_[t], group), slots, deltas, keep);
    slots += flush.counts[t];
    deltas += static_cast<size_t>(flush.counts[t]) * tables_[t].records.stride;
  }
  return flush;
}

void Shard::write_relative(const Table& table, uint32_t slot, const float* record, float* out) const {
  const size_t dim = table.records.dim;
  xor_initial_weights(table.layout, table.settings, settings_.server, slot, table.initial_key, record, out);
  std::memcpy(out + dim, record + dim, (table.records.stride - dim) * sizeof(float));
}

void Shard::published(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out) const {
  check_call(counts, slots, out.size(), Width::record);
  if (recovering_) check_known(counts, slots);
  {
    std::lock_guard lock(index_mutex_);
    for (size_t t = 0; t < counts.size(); ++t)
      if (counts[t] && tables_[t].pending)
        for (uint32_t member = 0; member < tables_[t].k(); ++member) tables_[t].pending->index(member);
  }
  for_runs(counts, slots, Width::record, [&](const Run& run) {
    const Table& table = run.table;
    const size_t stride = table.records.stride;
    for (size_t i = 0; i < run.count; ++i) {
      if (i + rows_ahead < run.count) {
        const uint32_t later = run.slots[i + rows_ahead];
        const auto* bytes = reinterpret_cast<const char*>(table.records.base + later * stride);
        for (size_t at = 0; at < stride * sizeof(float); at += line_bytes) __builtin_prefetch(bytes + at);
        __builtin_prefetch(table.records.changed + later / 64);
      }
      const uint32_t slot = run.slots[i];
      const float* record = table.records.base + slot * stride;
      if (table.pending && table.pending->pending(slot)) record = table.pending->saved(slot);
      float* target = out.data() + run.float_begin + i * stride;
      if (table.touched(slot))
        write_relative(table, slot, record, target);
      else
        std::memset(target, 0, stride * sizeof(float));
    }
  });
}

// Of a row that was not recovered yet nothing was published that this server could tell, unless it is blank.
void Shard::check_known(std::span<const int32_t> counts, std::span<const uint32_t> slots) const {
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); slot += counts[t], ++t) {
    const Table& table = tables_[t];
    for (int32_t i = 0; table.recovery && i < counts[t]; ++i) {
      const bool blank = (table.recovery->known[slot[i] / 64] >> (slot[i] % 64) & 1) && !table.touched(slot[i]);
      if (table.recovery->absent(slot[i]) && !blank)
        throw std::invalid_argument("slot " + std::to_string(slot[i]) + " of table " + std::to_string(t) +
                                    " was not recovered yet");
    }
  }
}

std::pair<std::vector<uint32_t>, uint32_t> Shard::next_touched(size_t table, size_t group, int64_t block_first,
                                                               int64_t rows_max) const {
  const uint32_t member = checked_member(table, group);
  const Table& found = at(table);
  if (block_first < 0 || block_first > int64_t{found.blocks})
    throw std::out_of_range("block " + std::to_string(block_first) + " of table " + std::to_string(table) +
                            " is out of range; it has " + std::to_string(found.blocks));
  if (rows_max < 1) throw std::invalid_argument("rows_max must be at least 1, not " + std::to_string(rows_max));
  const uint64_t k = found.k();
  std::pair<std::vector<uint32_t>, uint32_t> result;
  uint64_t block = static_cast<uint64_t>(block_first);
  while (block < found.blocks && result.first.size() < static_cast<size_t>(rows_max)) {
    const uint64_t slot = block * k + member;
    const uint64_t rest = found.touched_word(slot / 64) >> (slot % 64);
    if (!rest) {  // on to the first block of the next word
      const uint64_t word_end = (slot / 64 + 1) * 64;
      block = (word_end - member + k - 1) / k;
      continue;
    }
    if (rest & 1) result.first.push_back(static_cast<uint32_t>(slot));
    ++block;
  }
  result.second = static_cast<uint32_t>(std::min<uint64_t>(block, found.blocks));
  return result;
}

}  // namespace regrow
