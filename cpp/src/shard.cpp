#include "regrow/shard.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/init.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {
namespace {

// Rows a thread takes at a time: small enough to share evenly, large enough that the prefetches of one piece
// are running most of the time.
constexpr size_t rows_per_task = 512;
constexpr size_t floats_per_task = 1 << 18;
// Rows read into more than this (a quarter of a usual last-level cache) are written past the caches.
constexpr size_t cached_bytes_max = 8 << 20;

std::string text(int64_t number) { return std::to_string(number); }

void check_finite(const char* name, double value, double least) {
  if (!(value >= least) || !(value <= 3.0e38))
    throw std::invalid_argument(std::string(name) + " must be a finite number of at least " +
                                std::to_string(least) + ", not " + std::to_string(value));
}

void check_share(const char* name, double value) {
  if (!(value >= 0.0 && value < 1.0))
    throw std::invalid_argument(std::string(name) + " must be in [0, 1), not " + std::to_string(value));
}

void check_shape(int64_t rows, int64_t dim) {
  if (rows < 1 || rows > rows_max)
    throw std::invalid_argument("rows must be between 1 and " + text(rows_max) + ", not " + text(rows));
  if (dim < 1 || dim > dim_max)
    throw std::invalid_argument("dim must be between 1 and " + text(dim_max) + ", not " + text(dim));
}

void check_settings(const TableSettings& settings) {
  check_shape(settings.rows, settings.dim);
  check_finite("learning_rate", settings.numbers.learning_rate, 0.0);
  check_finite("eps", settings.numbers.eps, 0.0);
  check_finite("weight_decay", settings.numbers.weight_decay, 0.0);
  check_finite("init_bound", settings.init_bound, 0.0);
  check_share("beta1", settings.numbers.beta1);
  check_share("beta2", settings.numbers.beta2);
  check_share("momentum", settings.numbers.momentum);
}

uint32_t checked_slots(const Layout& layout, int64_t rows) {
  const uint64_t slots = layout.slots_per_server(static_cast<uint64_t>(rows));
  if (slots > static_cast<uint64_t>(rows_max))
    throw std::invalid_argument("a table of " + text(rows) +
                                " rows needs more slots than 32 bits can number");
  return static_cast<uint32_t>(slots);
}

size_t touched_words(uint32_t slots) { return (size_t{slots} + 63) / 64; }

size_t records_bytes(uint32_t slots, size_t stride) {
  return (size_t{slots} * stride * sizeof(float) + 63) / 64 * 64;
}

size_t arena_bytes(uint32_t slots, size_t stride) {
  return records_bytes(slots, stride) + touched_words(slots) * sizeof(uint64_t);
}

}  // namespace

size_t shard_bytes(int64_t rows, int64_t dim, int64_t k, int64_t r, int64_t groups, int64_t servers,
                   Optimizer optimizer) {
  check_shape(rows, dim);
  const uint32_t slots = checked_slots(Layout(servers, k, r, groups, 0), rows);
  return Arena::rounded(arena_bytes(slots, static_cast<size_t>(record_floats(optimizer, dim))));
}

Shard::Shard(int64_t servers, int64_t server, int64_t groups)
    : servers_(servers), server_(server), groups_(groups) {
  Layout(servers, 1, 0, groups, 0);  // checks servers and groups
  if (server < 0 || server >= servers)
    throw std::invalid_argument("server must be between 0 and " + text(servers - 1) + ", not " +
                                text(server));
}

size_t Shard::add_table(const TableSettings& settings) {
  check_settings(settings);
  const Layout layout(servers_, settings.k, settings.r, groups_, settings.table);
  const uint32_t slots = checked_slots(layout, settings.rows);
  const auto stride = static_cast<size_t>(regrow::record_floats(settings.optimizer, settings.dim));
  Table table{settings, layout, slots, Arena(arena_bytes(slots, stride)), {}};
  table.records.base = reinterpret_cast<float*>(table.arena.data());
  table.records.stride = stride;
  table.records.dim = static_cast<size_t>(settings.dim);
  table.records.touched = reinterpret_cast<uint64_t*>(table.arena.data() + records_bytes(slots, stride));
  fill_initial(table);
  tables_.push_back(std::move(table));
  return tables_.size() - 1;
}

// Also the first touch of every page. Optimizer state and holes stay zero.
void Shard::fill_initial(const Table& table) const {
  const uint64_t key = table_key(table.settings.seed, static_cast<uint64_t>(table.settings.table));
  const auto rows = static_cast<uint64_t>(table.settings.rows);
  const auto bound = static_cast<float>(table.settings.init_bound);
  const Records& records = table.records;
  const size_t slots_per_task = std::max<size_t>(1, floats_per_task / records.stride);
  const Kernels& kernel = kernels();
  ThreadPool::shared().parallel_for((table.slots + slots_per_task - 1) / slots_per_task, [&](size_t task,
                                                                                             size_t) {
    const size_t end = std::min<size_t>(table.slots, (task + 1) * slots_per_task);
    for (size_t slot = task * slots_per_task; slot < end; ++slot) {
      const uint64_t row = table.layout.row_of(static_cast<uint32_t>(server_), static_cast<uint32_t>(slot));
      if (row < rows)
        kernel.fill_initial(records.base + slot * records.stride, records.dim, row_key(key, row), bound);
    }
  });
}

const Shard::Table& Shard::at(size_t table) const {
  if (table >= tables_.size())
    throw std::out_of_range("there is no table " + std::to_string(table) + "; this shard has " +
                            std::to_string(tables_.size()));
  return tables_[table];
}

size_t Shard::memory_bytes() const {
  size_t bytes = 0;
  for (const Table& table : tables_) bytes += table.arena.bytes();
  return bytes;
}

void Shard::check_call(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                       size_t floats) const {
  if (counts.size() != tables_.size())
    throw std::invalid_argument("counts has " + std::to_string(counts.size()) + " entries; this shard has " +
                                std::to_string(tables_.size()) + " tables");
  size_t rows = 0;
  size_t floats_due = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    if (counts[t] < 0)
      throw std::invalid_argument("counts[" + std::to_string(t) + "] must not be negative, not " +
                                  text(counts[t]));
    rows += static_cast<size_t>(counts[t]);
    floats_due += static_cast<size_t>(counts[t]) * tables_[t].records.dim;
  }
  if (rows != slots.size())
    throw std::invalid_argument("counts add up to " + std::to_string(rows) + " rows; there are " +
                                std::to_string(slots.size()) + " slots");
  if (floats != floats_due)
    throw std::invalid_argument("these rows have " + std::to_string(floats_due) + " floats; the array has " +
                                std::to_string(floats));
  const uint32_t* table_slots = slots.data();
  for (size_t t = 0; t < counts.size(); table_slots += counts[t], ++t) {
    const auto count = static_cast<size_t>(counts[t]);
    const uint32_t most = count ? kernels().max_u32(table_slots, count) : 0;
    if (count && most >= tables_[t].slots)
      throw std::out_of_range("slot " + std::to_string(most) + " of table " + std::to_string(t) +
                              " is out of range; this server has " + std::to_string(tables_[t].slots) +
                              " slots of it");
  }
}

struct Shard::Run {
  const Table& table;
  const uint32_t* slots;
  size_t count;
  size_t float_begin;
};

// Calls body for pieces of the list, each within one table, on the threads of the pool.
template <typename Body>
void Shard::for_runs(std::span<const int32_t> counts, std::span<const uint32_t> slots, Body&& body) const {
  const size_t tasks = (slots.size() + rows_per_task - 1) / rows_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](size_t task, size_t) {
    const size_t begin = task * rows_per_task;
    const size_t end = std::min(slots.size(), begin + rows_per_task);
    size_t table_begin = 0;
    size_t float_begin = 0;
    for (size_t t = 0; t < counts.size() && table_begin < end; ++t) {
      const Table& table = tables_[t];
      const size_t table_end = table_begin + static_cast<size_t>(counts[t]);
      const size_t first = std::max(begin, table_begin);
      const size_t last = std::min(end, table_end);
      if (first < last)
        body(Run{table, slots.data() + first, last - first,
                 float_begin + (first - table_begin) * table.records.dim});
      float_begin += static_cast<size_t>(counts[t]) * table.records.dim;
      table_begin = table_end;
    }
  });
}

void Shard::gather(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                   std::span<float> out) const {
  check_call(counts, slots, out.size());
  const Kernels& kernel = kernels();
  const bool past_caches = out.size_bytes() >= cached_bytes_max;
  for_runs(counts, slots, [&](const Run& run) {
    kernel.gather(run.table.records, run.slots, run.count, out.data() + run.float_begin, past_caches);
  });
}

void Shard::update(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                   std::span<const float> grads, int64_t step) {
  check_call(counts, slots, grads.size());
  std::vector<UpdateNumbers> numbers;
  for (const Table& table : tables_) {
    if (counts_steps(table.settings.optimizer) && step < 1)
      throw std::invalid_argument("step must be at least 1, not " + text(step));
    numbers.push_back(numbers_at(table.settings.numbers, step));
  }
  const Kernels& kernel = kernels();
  for_runs(counts, slots, [&](const Run& run) {
    const auto rule = static_cast<size_t>(run.table.settings.optimizer);
    const auto table = static_cast<size_t>(&run.table - tables_.data());
    kernel.update[rule](run.table.records, run.slots, run.count, grads.data() + run.float_begin,
                        numbers[table]);
  });
}

void Shard::assign_untouched(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                             std::span<const float> weights) {
  check_call(counts, slots, weights.size());
  const float* source = weights.data();
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); ++t) {
    const Records& records = tables_[t].records;
    for (int32_t i = 0; i < counts[t]; ++i, ++slot, source += records.dim) {
      uint64_t& word = records.touched[*slot / 64];
      const uint64_t bit = uint64_t{1} << (*slot % 64);
      if (word & bit) continue;
      std::memcpy(records.base + *slot * records.stride, source, records.dim * sizeof(float));
      word |= bit;
    }
  }
}

void Shard::check_range(size_t table, int64_t first_slot, int64_t count, size_t floats) const {
  const Table& found = at(table);
  if (first_slot < 0 || count < 0 || first_slot > int64_t{found.slots} ||
      count > int64_t{found.slots} - first_slot)
    throw std::out_of_range("slots " + text(first_slot) + " to " + text(first_slot + count) + " of table " +
                            std::to_string(table) + " are out of range; this server has " +
                            std::to_string(found.slots) + " slots of it");
  const size_t floats_due = static_cast<size_t>(count) * found.records.stride;
  if (floats != floats_due)
    throw std::invalid_argument("these records have " + std::to_string(floats_due) +
                                " floats; the array has " + std::to_string(floats));
}

void Shard::read_records(size_t table, int64_t first_slot, int64_t count, std::span<float> out) const {
  check_range(table, first_slot, count, out.size());
  const Records& records = tables_[table].records;
  const float* source = records.base + static_cast<size_t>(first_slot) * records.stride;
  ThreadPool::shared().parallel_for(
      (out.size() + floats_per_task - 1) / floats_per_task, [&](size_t task, size_t) {
        const size_t begin = task * floats_per_task;
        std::memcpy(out.data() + begin, source + begin,
                    std::min(floats_per_task, out.size() - begin) * sizeof(float));
      });
}

void Shard::write_records(size_t table, int64_t first_slot, int64_t count, std::span<const float> source) {
  check_range(table, first_slot, count, source.size());
  const Records& records = tables_[table].records;
  float* target = records.base + static_cast<size_t>(first_slot) * records.stride;
  ThreadPool::shared().parallel_for(
      (source.size() + floats_per_task - 1) / floats_per_task, [&](size_t task, size_t) {
        const size_t begin = task * floats_per_task;
        std::memcpy(target + begin, source.data() + begin,
                    std::min(floats_per_task, source.size() - begin) * sizeof(float));
      });
  // What was loaded is not an initial value any more.
  for (int64_t slot = first_slot; slot < first_slot + count; ++slot)
    records.touched[slot / 64] |= uint64_t{1} << (slot % 64);
}

std::span<const uint64_t> Shard::touched(size_t table) const {
  const Table& found = at(table);
  return {found.records.touched, touched_words(found.slots)};
}

}  // namespace regrow
