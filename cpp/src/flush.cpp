// The Shard as the source of rows that other servers hold parities of.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/shard.hpp"
#include "shard_runs.hpp"

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
  write_initial(table, slot, out);
  kernels().xor_bytes(reinterpret_cast<uint8_t*>(out), reinterpret_cast<const uint8_t*>(out),
                      reinterpret_cast<const uint8_t*>(record), dim * sizeof(float));
  std::memcpy(out + dim, record + dim, (table.records.stride - dim) * sizeof(float));
}

void Shard::published(size_t table, std::span<const uint32_t> slots, std::span<float> out) const {
  const Table& found = at(table);
  check_slots(table, slots, found.slots, "slot");
  const size_t stride = found.records.stride;
  if (out.size() != slots.size() * stride)
    throw std::invalid_argument("these records have " + std::to_string(slots.size() * stride) +
                                " floats; the array has " + std::to_string(out.size()));
  if (found.recovery)
    for (const uint32_t slot : slots) {
      const bool blank = (found.recovery->known[slot / 64] >> (slot % 64) & 1) && !found.touched(slot);
      if (found.recovery->absent(slot) && !blank)
        throw std::invalid_argument("slot " + std::to_string(slot) + " of table " + std::to_string(table) +
                                    " was not recovered yet");
    }
  if (found.pending) {
    std::lock_guard lock(index_mutex_);
    for (uint32_t member = 0; member < found.k(); ++member) found.pending->index(member);
  }
  const size_t tasks = (slots.size() + rows_per_task - 1) / rows_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](size_t task, size_t) {
    const size_t end = std::min(slots.size(), (task + 1) * rows_per_task);
    for (size_t i = task * rows_per_task; i < end; ++i) {
      if (i + rows_ahead < end) {
        const uint32_t later = slots[i + rows_ahead];
        const auto* bytes = reinterpret_cast<const char*>(found.records.base + later * stride);
        for (size_t at = 0; at < stride * sizeof(float); at += line_bytes) __builtin_prefetch(bytes + at);
        __builtin_prefetch(found.records.touched + later / 64);
      }
      const uint32_t slot = slots[i];
      const float* record = found.records.base + slot * stride;
      if (found.pending && found.pending->pending(slot)) record = found.pending->saved(slot);
      if (found.touched(slot))
        write_relative(found, slot, record, out.data() + i * stride);
      else
        std::memset(out.data() + i * stride, 0, stride * sizeof(float));
    }
  });
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
    const uint64_t rest = __atomic_load_n(found.records.touched + slot / 64, __ATOMIC_RELAXED) >> (slot % 64);
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
