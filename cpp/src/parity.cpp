// The Shard as a holder of parities of other servers' rows.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/gf.hpp"
#include "regrow/shard.hpp"
#include "shard_runs.hpp"

namespace regrow {
namespace {

constexpr size_t parity_rows_ahead = 8;
constexpr size_t line_bytes = 64;
// Fewer rows than this are not worth waking other threads for.
constexpr size_t rows_shared_min = 2048;

}  // namespace

void Shard::check_source(int64_t source) const {
  if (source < 0 || source >= settings_.servers)
    throw std::out_of_range("there is no server " + std::to_string(source) + "; there are " +
                            std::to_string(settings_.servers));
  if (source / ring() != settings_.server / ring())
    throw std::invalid_argument("server " + std::to_string(source) + " is in another ring than server " +
                                std::to_string(settings_.server));
}

// Which parity of the source's rows is here, for each member; -1: none.
std::vector<int32_t> Shard::parities_of(int64_t source, const Table& table) const {
  std::vector<int32_t> parities(table.k(), -1);
  for (int64_t member = 0; table.parity && member < table.settings.k; ++member) {
    const int64_t q = (settings_.server - source + member - table.settings.k + 2 * ring()) % ring();
    if (q < table.settings.r) parities[static_cast<size_t>(member)] = static_cast<int32_t>(q);
  }
  return parities;
}

void Shard::check_held(int64_t source, size_t table, std::span<const int32_t> parities,
                       std::span<const uint32_t> slots) const {
  const Table& found = tables_[table];
  if (std::find(parities.begin(), parities.end(), -1) == parities.end()) return;
  for (const uint32_t slot : slots)
    if (parities[slot - found.per_k.quotient(slot) * found.k()] < 0)
      throw std::invalid_argument("server " + std::to_string(settings_.server) + " holds no parity of slot " +
                                  std::to_string(slot) + " of table " + std::to_string(table) + " of server " +
                                  std::to_string(source));
}

// Parity records are shared out by the word of their touched bit, so that neither is ever written by two threads,
// whatever the list says. Every thread looks at the whole list.
void Shard::parity_apply(int64_t source, std::span<const int32_t> counts, std::span<const uint32_t> slots,
                         std::span<const float> deltas) {
  check_source(source);
  check_call(counts, slots, deltas.size(), Width::record);
  std::vector<std::vector<int32_t>> parities;
  size_t begin = 0;
  for (size_t t = 0; t < tables_.size(); begin += static_cast<size_t>(counts[t]), ++t) {
    parities.push_back(counts[t] ? parities_of(source, tables_[t]) : std::vector<int32_t>());
    check_held(source, t, parities[t], slots.subspan(begin, static_cast<size_t>(counts[t])));
  }
  const auto threads = static_cast<size_t>(ThreadPool::shared().size());
  const size_t parts = slots.size() < rows_shared_min ? 1 : threads;
  ThreadPool::shared().parallel_for(parts, [&](size_t part, size_t) {
    size_t row = 0;
    const float* delta = deltas.data();
    for (size_t t = 0; t < tables_.size(); ++t) {
      const auto count = static_cast<size_t>(counts[t]);
      if (count) apply_part(tables_[t], parities[t], slots.subspan(row, count), delta, part, parts);
      row += count;
      delta += count * tables_[t].records.stride;
    }
  });
}

void Shard::apply_part(const Table& table, std::span<const int32_t> parities, std::span<const uint32_t> slots,
                       const float* deltas, size_t part, size_t parts) const {
  struct Target {
    float* record;
    uint64_t* word;
    uint64_t bit;
    const float* delta;
    const GfTable* coefficient;
  };
  Target targets[rows_per_task];
  const uint32_t k = table.k();
  const uint32_t r = table.r();
  const size_t stride = table.records.stride;
  const Parity& parity = *table.parity;
  const Kernels& kernel = kernels();
  std::vector<const GfTable*> coefficients;
  for (uint32_t member = 0; member < k; ++member)
    coefficients.push_back(&gf_table(gf_coefficient(static_cast<uint32_t>(std::max(0, parities[member])), member, r)));
  const auto prefetch = [stride](const Target& target) {
    const auto* bytes = reinterpret_cast<const char*>(target.record);
    for (size_t i = 0; i < stride * sizeof(float); i += line_bytes) __builtin_prefetch(bytes + i, 1, 3);
    __builtin_prefetch(target.word, 1, 3);
  };
  for (size_t begin = 0; begin < slots.size(); begin += rows_per_task) {
    const size_t end = std::min(slots.size(), begin + rows_per_task);
    size_t count = 0;
    for (size_t i = begin; i < end; ++i) {
      const uint32_t block = table.per_k.quotient(slots[i]);
      const uint32_t member = slots[i] - block * k;
      if (parts > 1 && block / 64 % parts != part) continue;
      const auto q = static_cast<size_t>(parities[member]);
      targets[count] = {parity.base + (size_t{block} * r + q) * stride,
                        parity.members + (q * k + member) * parity.words + block / 64, uint64_t{1} << (block % 64),
                        deltas + i * stride, coefficients[member]};
      if (count < parity_rows_ahead) prefetch(targets[count]);
      ++count;
    }
    for (size_t i = 0; i < count; ++i) {
      if (i + parity_rows_ahead < count) prefetch(targets[i + parity_rows_ahead]);
      const Target& target = targets[i];
      kernel.gf_xor(reinterpret_cast<uint8_t*>(target.record), reinterpret_cast<const uint8_t*>(target.delta),
                    stride * sizeof(float), *target.coefficient);
      *target.word |= target.bit;
    }
  }
}

void Shard::check_parities(int64_t q, std::span<const int32_t> counts, std::span<const uint32_t> blocks,
                           size_t floats_given) const {
  check_counts(counts, blocks);
  size_t begin = 0;
  size_t floats = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    const auto count = static_cast<size_t>(counts[t]);
    if (count) parity_members(t, q, 0);  // checks q
    check_slots(t, blocks.subspan(begin, count), tables_[t].blocks, "block");
    begin += count;
    floats += count * tables_[t].records.stride;
  }
  if (floats_given != floats)
    throw std::invalid_argument("these records have " + std::to_string(floats) + " floats; the array has " +
                                std::to_string(floats_given));
}

void Shard::parity_read(int64_t q, std::span<const int32_t> counts, std::span<const uint32_t> blocks,
                        std::span<float> out) const {
  check_parities(q, counts, blocks, out.size());
  for_runs(counts, blocks, Width::record, [&](const Run& run) {
    const size_t stride = run.table.records.stride;
    const size_t r = run.table.r();
    const float* base = run.table.parity->base + static_cast<size_t>(q) * stride;
    for (size_t i = 0; i < run.count; ++i)
      std::memcpy(out.data() + run.float_begin + i * stride, base + run.slots[i] * r * stride, stride * sizeof(float));
  });
}

void Shard::parity_add(int64_t q, std::span<const int32_t> counts, std::span<const uint32_t> blocks,
                       std::span<float> records) const {
  check_parities(q, counts, blocks, records.size());
  const Kernels& kernel = kernels();
  for_runs(counts, blocks, Width::record, [&](const Run& run) {
    const size_t stride = run.table.records.stride;
    const size_t r = run.table.r();
    const float* base = run.table.parity->base + static_cast<size_t>(q) * stride;
    for (size_t i = 0; i < run.count; ++i) {
      auto* record = reinterpret_cast<uint8_t*>(records.data() + run.float_begin + i * stride);
      const auto* parity = reinterpret_cast<const uint8_t*>(base + run.slots[i] * r * stride);
      kernel.xor_bytes(record, record, parity, stride * sizeof(float));
    }
  });
}

std::span<const uint64_t> Shard::parity_members(size_t table, int64_t q, int64_t member) const {
  const Table& found = at(table);
  if (!found.parity) throw std::invalid_argument("table " + std::to_string(table) + " has no parities");
  if (q < 0 || q >= found.settings.r)
    throw std::out_of_range("there is no parity " + std::to_string(q) + "; table " + std::to_string(table) + " has " +
                            std::to_string(found.settings.r));
  if (member < 0 || member >= found.settings.k)
    throw std::out_of_range("there is no member " + std::to_string(member) + "; blocks of table " +
                            std::to_string(table) + " have " + std::to_string(found.settings.k));
  const size_t index = static_cast<size_t>(q) * found.k() + static_cast<size_t>(member);
  return {found.parity->members + index * found.parity->words, found.parity->words};
}

void Shard::parity_void(size_t table, int64_t q) {
  parity_members(table, q, 0);  // checks both
  const Table& found = tables_[table];
  const Parity& parity = *found.parity;
  const size_t stride = found.records.stride;
  const size_t r = found.r();
  float* base = parity.base + static_cast<size_t>(q) * stride;
  constexpr size_t blocks_per_task = 4096;
  const size_t tasks = (size_t{found.blocks} + blocks_per_task - 1) / blocks_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](size_t task, size_t) {
    const size_t end = std::min<size_t>(found.blocks, (task + 1) * blocks_per_task);
    for (size_t block = task * blocks_per_task; block < end; ++block)
      std::memset(base + block * r * stride, 0, stride * sizeof(float));
  });
  uint64_t* members = parity.members + static_cast<size_t>(q) * found.k() * parity.words;
  std::memset(members, 0, found.k() * parity.words * sizeof(uint64_t));
}

std::span<const uint64_t> Shard::parity_touched(int64_t source, size_t group, size_t table) const {
  check_source(source);
  const uint32_t member = checked_member(table, group);
  const int32_t q = parities_of(source, at(table))[member];
  if (q < 0)
    throw std::invalid_argument("server " + std::to_string(settings_.server) + " holds no parity of group " +
                                std::to_string(group) + " of server " + std::to_string(source));
  return parity_members(table, q, member);
}

}  // namespace regrow
