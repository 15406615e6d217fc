#include "regrow/sums.hpp"

#include <atomic>
#include <stdexcept>
#include <string>

#include "regrow/dedupe.hpp"
#include "regrow/dispatch.hpp"
#include "regrow/layout.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {
namespace {

constexpr size_t rows_max_per_merge = Dedupe::keys_max;
// Fewer slots than this are not worth waking other threads for.
constexpr size_t slots_shared_min = 4096;
// Up to here a bit for each slot is faster than a hash table: 8 MB in each thread at the most.
constexpr uint32_t bitmap_slots_max = uint32_t{1} << 26;

struct Span {  // the rows of one table in one part
  size_t row;
  size_t offset;
};

// Checks the parts, and finds where each table begins in each of them: [part][table].
std::vector<std::vector<Span>> checked_parts(std::span<const int32_t> dims, std::span<const PushView> parts) {
  for (const int32_t dim : dims)
    if (dim < 1 || dim > dim_max)
      throw std::invalid_argument("dims must be between 1 and " + std::to_string(dim_max) + ", not " +
                                  std::to_string(dim));
  std::vector<std::vector<Span>> begins;
  size_t rows_total = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    const std::string part = "part " + std::to_string(p) + ": ";
    if (parts[p].counts.size() != dims.size())
      throw std::invalid_argument(part + "counts has " + std::to_string(parts[p].counts.size()) +
                                  " entries; dims has " + std::to_string(dims.size()));
    Span at{0, 0};
    begins.emplace_back();
    for (size_t t = 0; t < dims.size(); ++t) {
      begins.back().push_back(at);
      const int32_t count = parts[p].counts[t];
      if (count < 0)
        throw std::invalid_argument(part + "counts[" + std::to_string(t) + "] must not be negative, not " +
                                    std::to_string(count));
      at.row += static_cast<size_t>(count);
      at.offset += static_cast<size_t>(count) * static_cast<size_t>(dims[t]);
    }
    if (at.row != parts[p].slots.size() || at.offset != parts[p].grads.size())
      throw std::invalid_argument(part + "counts add up to " + std::to_string(at.row) + " rows and " +
                                  std::to_string(at.offset) + " floats; there are " +
                                  std::to_string(parts[p].slots.size()) + " slots and " +
                                  std::to_string(parts[p].grads.size()) + " floats");
    rows_total += at.row;
  }
  if (rows_total > rows_max_per_merge)
    throw std::invalid_argument("a merge takes at most " + std::to_string(rows_max_per_merge) + " rows, not " +
                                std::to_string(rows_total));
  return begins;
}

// A bit for each slot, cleared again by looking at the same slots: no time is spent on those not named.
bool is_repeating_in_bits(std::span<const uint32_t> slots, uint32_t most) {
  thread_local std::vector<uint64_t> bits;  // all zero between two calls
  if (bits.size() <= most / 64) bits.resize(most / 64 + 1);
  uint64_t found = 0;
  for (const uint32_t slot : slots) {
    uint64_t& word = bits[slot / 64];
    found |= word >> (slot % 64) & 1;
    word |= uint64_t{1} << (slot % 64);
  }
  for (const uint32_t slot : slots) bits[slot / 64] = 0;
  return found;
}

bool is_repeating(std::span<const uint32_t> slots) {
  if (slots.size() < 2) return false;
  const uint32_t most = kernels().max_u32(slots.data(), slots.size());
  if (most < bitmap_slots_max) return is_repeating_in_bits(slots, most);
  thread_local Dedupe dedupe;
  thread_local std::vector<uint32_t> room;  // numbers, then distinct slots: nobody reads them
  if (room.size() < 2 * slots.size()) room.resize(2 * slots.size());
  dedupe.begin(slots.size(), uint64_t{1} << 32);
  dedupe.number(slots, room.data(), room.data() + slots.size());
  return dedupe.found() < slots.size();
}

}  // namespace

SummedPush sum_pushes(std::span<const int32_t> dims, std::span<const PushView> parts) {
  const std::vector<std::vector<Span>> begins = checked_parts(dims, parts);
  const size_t tables = dims.size();
  std::vector<size_t> table_begin{0};  // in the lists below, which hold table 0 of all parts, then table 1, ...
  for (size_t t = 0; t < tables; ++t) {
    size_t rows = 0;
    for (const PushView& part : parts) rows += static_cast<size_t>(part.counts[t]);
    table_begin.push_back(table_begin.back() + rows);
  }
  Buffer<uint32_t> targets(table_begin.back());
  Buffer<uint32_t> distinct(table_begin.back());
  SummedPush merged;
  merged.counts.assign(tables, 0);
  ThreadPool& pool = ThreadPool::shared();
  thread_local std::vector<Dedupe> dedupes_of_thread;
  std::vector<Dedupe>& dedupes = dedupes_of_thread;
  dedupes.resize(static_cast<size_t>(threads_max));
  pool.parallel_for(tables, [&](size_t t, size_t lane) {
    dedupes[lane].begin(table_begin[t + 1] - table_begin[t], uint64_t{1} << 32);
    uint32_t* target = targets.data() + table_begin[t];
    for (size_t p = 0; p < parts.size(); ++p) {
      const auto slots = parts[p].slots.subspan(begins[p][t].row, static_cast<size_t>(parts[p].counts[t]));
      dedupes[lane].number(slots, target, distinct.data() + table_begin[t]);
      target += slots.size();
    }
    merged.counts[t] = static_cast<int32_t>(dedupes[lane].found());
  });

  std::vector<Span> outs{{0, 0}};
  for (size_t t = 0; t < tables; ++t) {
    const auto count = static_cast<size_t>(merged.counts[t]);
    outs.push_back({outs[t].row + count, outs[t].offset + count * static_cast<size_t>(dims[t])});
  }
  merged.slots = Buffer<uint32_t>(outs.back().row);
  merged.grads = Buffer<float>(outs.back().offset);
  const Kernels& kernel = kernels();
  pool.parallel_for(tables, [&](size_t t, size_t) {
    const uint32_t* target = targets.data() + table_begin[t];
    for (int32_t i = 0; i < merged.counts[t]; ++i)
      merged.slots[outs[t].row + static_cast<size_t>(i)] = distinct[table_begin[t] + static_cast<size_t>(i)];
    for (size_t p = 0; p < parts.size(); ++p) {
      const auto count = static_cast<size_t>(parts[p].counts[t]);
      kernel.add_rows(target, count, static_cast<size_t>(dims[t]), parts[p].grads.data() + begins[p][t].offset,
                      merged.grads.data() + outs[t].offset);
      target += count;
    }
  });
  return merged;
}

bool has_repeated_slots(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  std::vector<size_t> begins{0};
  for (size_t t = 0; t < counts.size(); ++t) {
    if (counts[t] < 0)
      throw std::invalid_argument("counts[" + std::to_string(t) + "] must not be negative, not " +
                                  std::to_string(counts[t]));
    begins.push_back(begins.back() + static_cast<size_t>(counts[t]));
  }
  if (begins.back() != slots.size() || slots.size() > Dedupe::keys_max)
    throw std::invalid_argument("counts add up to " + std::to_string(begins.back()) + " rows; there are " +
                                std::to_string(slots.size()) + " slots, at most " + std::to_string(Dedupe::keys_max) +
                                " may be");
  std::atomic<bool> repeated{false};
  const auto look = [&](size_t t, size_t) {
    if (is_repeating(slots.subspan(begins[t], begins[t + 1] - begins[t])))
      repeated.store(true, std::memory_order_relaxed);
  };
  if (slots.size() < slots_shared_min)
    for (size_t t = 0; t < counts.size(); ++t) look(t, 0);
  else
    ThreadPool::shared().parallel_for(counts.size(), look);
  return repeated.load(std::memory_order_relaxed);
}

}  // namespace regrow
