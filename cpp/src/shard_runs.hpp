// Part of the Shard's own sources: how a call over rows of several tables is cut into pieces for the thread pool.
#pragma once

#include <algorithm>

#include "regrow/shard.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {

// Rows a thread takes at a time: small enough to share evenly, large enough that the prefetches of one piece
// are running most of the time.
inline constexpr size_t rows_per_task = 512;

struct Shard::Run {
  const Table& table;
  const uint32_t* slots;
  size_t count;
  size_t float_begin;
};

// Calls body for pieces of the list, each within one table, on the threads of the pool.
template <typename Body>
void Shard::for_runs(std::span<const int32_t> counts, std::span<const uint32_t> slots, Width width, Body&& body) const {
  const size_t tasks = (slots.size() + rows_per_task - 1) / rows_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](size_t task, size_t) {
    const size_t begin = task * rows_per_task;
    const size_t end = std::min(slots.size(), begin + rows_per_task);
    size_t table_begin = 0;
    size_t float_begin = 0;
    for (size_t t = 0; t < counts.size() && table_begin < end; ++t) {
      const Table& table = tables_[t];
      const size_t floats = width == Width::weights ? table.records.dim : table.records.stride;
      const size_t table_end = table_begin + static_cast<size_t>(counts[t]);
      const size_t first = std::max(begin, table_begin);
      const size_t last = std::min(end, table_end);
      if (first < last)
        body(Run{table, slots.data() + first, last - first, float_begin + (first - table_begin) * floats});
      float_begin += static_cast<size_t>(counts[t]) * floats;
      table_begin = table_end;
    }
  });
}

}  // namespace regrow
