#include "regrow/shard.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/gf.hpp"
#include "regrow/init.hpp"
#include "regrow/thread_pool.hpp"
#include "shard_runs.hpp"
#include "table_rules.hpp"

namespace regrow {
namespace {

constexpr size_t floats_per_task = 1 << 18;
// Rows read into more than this (a quarter of a usual last-level cache) are written past the caches.
constexpr size_t cached_bytes_max = 8 << 20;

size_t bit_words(uint64_t bits) { return (bits + 63) / 64; }

size_t bit_bytes(uint64_t bits) { return bit_words(bits) * sizeof(uint64_t); }

size_t records_bytes(uint64_t slots, size_t stride) { return (slots * stride * sizeof(float) + 63) / 64 * 64; }

size_t arena_bytes(uint32_t slots, size_t stride) { return records_bytes(slots, stride) + bit_bytes(slots); }

// Parities, a bitmap over blocks for each (q, member), a pending bit per row.
size_t parity_bytes(uint64_t blocks, uint64_t k, uint64_t r, size_t stride) {
  return records_bytes(blocks * r, stride) + k * r * bit_bytes(blocks) + bit_bytes(blocks * k);
}

}  // namespace

size_t shard_bytes(int64_t rows, int64_t dim, int64_t k, int64_t r, int64_t rings, int64_t servers,
                   Optimizer optimizer) {
  check_shape(rows, dim);
  const uint32_t slots = checked_slots(Layout(servers, k, r, rings, 0), rows);
  const auto stride = static_cast<size_t>(record_floats(optimizer, dim));
  const size_t parity = r ? Arena::rounded(parity_bytes(slots / static_cast<uint64_t>(k), static_cast<uint64_t>(k),
                                                        static_cast<uint64_t>(r), stride))
                          : 0;
  return Arena::rounded(arena_bytes(slots, stride)) + parity;
}

Shard::Shard(const ShardSettings& settings) : settings_(settings), recovering_(settings.recovering) {
  Layout(settings.servers, 1, 0, settings.rings, 0);  // checks servers and rings
  if (settings.server < 0 || settings.server >= settings.servers)
    throw std::invalid_argument("server must be between 0 and " + text(settings.servers - 1) + ", not " +
                                text(settings.server));
  for (const CodingGroup& group : settings.coding) {
    const auto same = [&](const CodingGroup& other) { return other.distance == group.distance && other.r == group.r; };
    const std::string name = "coding group (" + text(group.distance) + ", " + text(group.r) + ")";
    if (group.distance < 1 || group.r < 1 || group.distance > ring() || group.r > ring() - group.distance)
      throw std::invalid_argument(name + " does not fit a ring of " + text(ring()) + " servers");
    if (std::count_if(settings.coding.begin(), settings.coding.end(), same) > 1)
      throw std::invalid_argument(name + " is there twice");
  }
}

size_t Shard::add_table(const TableSettings& settings) {
  check_settings(settings);
  const Layout layout(settings_.servers, settings.k, settings.r, settings_.rings, settings.table);
  const uint32_t slots = checked_slots(layout, settings.rows);
  const auto stride = static_cast<size_t>(regrow::record_floats(settings.optimizer, settings.dim));
  const Divider per_k(static_cast<uint32_t>(settings.k));
  Table table{.settings = settings,
              .layout = layout,
              .per_k = per_k,
              .slots = slots,
              .blocks = slots / per_k.divisor(),
              .initial_key = table_key(settings.seed, static_cast<uint64_t>(settings.table)),
              .arena = Arena(arena_bytes(slots, stride), pages()),
              .records = {},
              .parity = {},
              .pending = {},
              .recovery = {},
              .returning = false,
              .tracking = {},
              .aside = {}};
  table.records.base = reinterpret_cast<float*>(table.arena.data());
  table.records.stride = stride;
  table.records.dim = static_cast<size_t>(settings.dim);
  table.records.changed = reinterpret_cast<uint64_t*>(table.arena.data() + records_bytes(slots, stride));
  if (settings.r > 0 && !settings_.coding.empty()) protect(table);
  if (settings_.recovering) {
    Arena bits(2 * bit_bytes(slots));
    auto* present = reinterpret_cast<uint64_t*>(bits.data());
    std::vector<size_t> missing(table.members(), slots / table.members());
    table.recovery.emplace(
        Recovery{std::move(bits), present, present + bit_words(slots), std::move(missing), 0, 0, slots});
  } else {
    fill_initial(table);
  }
  if (tenants_) track(table, tenants_);
  tables_.push_back(std::move(table));
  return tables_.size() - 1;
}

// Takes memory for parities, and touches none of it: they start as zero.
void Shard::protect(Table& table) const {
  if (!gf_codable(table.settings.k, table.settings.r))
    throw std::invalid_argument("k + r must be at most 256 where both are above 1, not " +
                                text(table.settings.k + table.settings.r));
  for (int64_t distance = 1; distance <= table.settings.k; ++distance) {
    const auto ours = [&](const CodingGroup& group) {
      return group.distance == distance && group.r == table.settings.r;
    };
    if (std::none_of(settings_.coding.begin(), settings_.coding.end(), ours))
      throw std::invalid_argument("coding group (" + text(distance) + ", " + text(table.settings.r) +
                                  ") of a table is not among those of the shard");
  }
  const size_t records = records_bytes(uint64_t{table.blocks} * table.r(), table.records.stride);
  Arena arena(parity_bytes(table.blocks, table.k(), table.r(), table.records.stride), pages());
  // A flush that takes thousands of huge pages for the first time would keep a server silent for seconds.
  if (!settings_.recovering) arena.touch_new();
  auto* members = reinterpret_cast<uint64_t*>(arena.data() + records);
  const size_t words = bit_words(table.blocks);
  uint64_t* pending = members + words * table.k() * table.r();
  table.pending = std::make_unique<PendingRows>(table.records, table.k(), table.blocks, pending);
  auto* base = reinterpret_cast<float*>(arena.data());
  table.parity.emplace(Parity{std::move(arena), base, members, words});
}

// Also the first touch of every page. Optimizer state and holes stay zero.
void Shard::fill_initial(const Table& table) const {
  const Records& records = table.records;
  const size_t slots_per_task = std::max<size_t>(1, floats_per_task / records.stride);
  const size_t tasks = (table.slots + slots_per_task - 1) / slots_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](size_t task, size_t) {
    const size_t end = std::min<size_t>(table.slots, (task + 1) * slots_per_task);
    for (size_t slot = task * slots_per_task; slot < end; ++slot)
      write_initial(table, static_cast<uint32_t>(slot), records.base + slot * records.stride);
  });
}

// The initial weights of a row; those of a hole are zero.
void Shard::write_initial(const Table& table, uint32_t slot, float* weights) const {
  write_initial_weights(table.layout, table.settings, settings_.server, slot, table.initial_key, weights);
}

const Shard::Table& Shard::at(size_t table) const {
  if (table >= tables_.size())
    throw std::out_of_range("there is no table " + std::to_string(table) + "; this shard has " +
                            std::to_string(tables_.size()));
  return tables_[table];
}

size_t Shard::memory_bytes() const {
  size_t bytes = 0;
  for (const Table& table : tables_) {
    bytes += table.arena.bytes() + (table.recovery ? table.recovery->arena.bytes() : 0);
    if (table.tracking) bytes += (4 + tenants_) * table.words() * sizeof(uint64_t);
  }
  return bytes + redundancy_bytes();
}

size_t Shard::redundancy_bytes() const {
  size_t bytes = 0;
  for (const Table& table : tables_) bytes += table.parity ? table.parity->arena.bytes() : 0;
  return bytes;
}

void Shard::check_call(std::span<const int32_t> counts, std::span<const uint32_t> slots, size_t floats,
                       Width width) const {
  check_counts(counts, slots);
  size_t floats_due = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    const Records& records = tables_[t].records;
    floats_due += static_cast<size_t>(counts[t]) * (width == Width::weights ? records.dim : records.stride);
  }
  if (floats != floats_due)
    throw std::invalid_argument("these rows have " + std::to_string(floats_due) + " floats; the array has " +
                                std::to_string(floats));
  check_ranges(counts, slots);
}

void Shard::check_counts(std::span<const int32_t> counts, std::span<const uint32_t> slots) const {
  if (counts.size() != tables_.size())
    throw std::invalid_argument("counts has " + std::to_string(counts.size()) + " entries; this shard has " +
                                std::to_string(tables_.size()) + " tables");
  size_t rows = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    if (counts[t] < 0)
      throw std::invalid_argument("counts[" + std::to_string(t) + "] must not be negative, not " + text(counts[t]));
    rows += static_cast<size_t>(counts[t]);
  }
  if (rows != slots.size())
    throw std::invalid_argument("counts add up to " + std::to_string(rows) + " rows; there are " +
                                std::to_string(slots.size()) + " slots");
}

void Shard::check_ranges(std::span<const int32_t> counts, std::span<const uint32_t> slots) const {
  size_t begin = 0;
  for (size_t t = 0; t < counts.size(); begin += static_cast<size_t>(counts[t]), ++t)
    check_slots(t, slots.subspan(begin, static_cast<size_t>(counts[t])), tables_[t].slots, "slot");
}

void Shard::check_slots(size_t table, std::span<const uint32_t> slots, uint32_t end, const char* name) const {
  const uint32_t most = slots.empty() ? 0 : kernels().max_u32(slots.data(), slots.size());
  if (!slots.empty() && most >= end)
    throw std::out_of_range(std::string(name) + " " + std::to_string(most) + " of table " + std::to_string(table) +
                            " is out of range; this server has " + std::to_string(end) + " " + name + "s of it");
}

// A row that was not recovered yet has no value: reading or changing it would be silent damage.
void Shard::check_present(std::span<const int32_t> counts, std::span<const uint32_t> slots) const {
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); slot += counts[t], ++t) {
    if (!tables_[t].recovery) continue;
    for (int32_t i = 0; i < counts[t]; ++i)
      if (tables_[t].recovery->absent(slot[i]))
        throw std::invalid_argument("slot " + std::to_string(slot[i]) + " of table " + std::to_string(t) +
                                    " was not recovered yet; prepare it first");
  }
}

void Shard::gather(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out) const {
  check_call(counts, slots, out.size());
  if (recovering_) check_present(counts, slots);
  const Kernels& kernel = kernels();
  const bool past_caches = out.size_bytes() >= cached_bytes_max;
  for_runs(counts, slots, Width::weights, [&](const Run& run) {
    kernel.gather(run.table.records, run.slots, run.count, out.data() + run.float_begin, past_caches);
  });
}

void Shard::reserve_room(std::span<const int32_t> counts) {
  for (size_t t = 0; t < counts.size(); ++t) {
    if (tables_[t].pending && counts[t]) tables_[t].pending->reserve(static_cast<size_t>(counts[t]));
    if (tables_[t].aside && counts[t]) tables_[t].aside->reserve(static_cast<size_t>(counts[t]));
  }
}

void Shard::update(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> grads,
                   int64_t step, std::span<const double> rates) {
  check_call(counts, slots, grads.size());
  if (recovering_) check_present(counts, slots);
  const std::vector<UpdateNumbers> numbers = numbers_of(tables_, step, rates);
  reserve_room(counts);
  const Kernels& kernel = kernels();
  for_runs(counts, slots, Width::weights, [&](const Run& run) {
    if (run.table.pending) run.table.pending->save(run.slots, run.count);
    if (run.table.aside) run.table.aside->save(run.slots, run.count);
    const auto rule = static_cast<size_t>(run.table.settings.optimizer);
    const auto table = static_cast<size_t>(&run.table - tables_.data());
    kernel.update[rule](run.table.records, run.slots, run.count, grads.data() + run.float_begin, numbers[table]);
  });
}

void Shard::assign_untouched(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                             std::span<const float> weights) {
  check_call(counts, slots, weights.size());
  if (recovering_) check_present(counts, slots);
  const float* source = weights.data();
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); ++t) {
    const Records& records = tables_[t].records;
    PendingRows* pending = tables_[t].pending.get();
    if (pending) pending->reserve(static_cast<size_t>(counts[t]));
    for (int32_t i = 0; i < counts[t]; ++i, ++slot, source += records.dim) {
      if (tables_[t].touched(*slot)) continue;  // so it is in no capture, and nothing is kept aside
      if (pending) pending->save(slot, 1);
      std::memcpy(records.base + *slot * records.stride, source, records.dim * sizeof(float));
      records.changed[*slot / 64] |= uint64_t{1} << (*slot % 64);
    }
  }
}

void Shard::check_range(size_t table, int64_t first_slot, int64_t count, size_t floats) const {
  const Table& found = at(table);
  if (first_slot < 0 || count < 0 || first_slot > int64_t{found.slots} || count > int64_t{found.slots} - first_slot) {
    int64_t end = 0;
    if (__builtin_add_overflow(first_slot, count, &end)) end = INT64_MAX;
    throw std::out_of_range("slots " + text(first_slot) + " to " + text(end) + " of table " + std::to_string(table) +
                            " are out of range; this server has " + std::to_string(found.slots) + " slots of it");
  }
  const size_t floats_due = static_cast<size_t>(count) * found.records.stride;
  if (floats != floats_due)
    throw std::invalid_argument("these records have " + std::to_string(floats_due) + " floats; the array has " +
                                std::to_string(floats));
  for (int64_t slot = first_slot; found.recovery && slot < first_slot + count; ++slot)
    if (found.recovery->absent(static_cast<uint32_t>(slot)))
      throw std::invalid_argument("slot " + text(slot) + " of table " + std::to_string(table) +
                                  " was not recovered yet; prepare it first");
}

void Shard::read_records(size_t table, int64_t first_slot, int64_t count, std::span<float> out) const {
  check_range(table, first_slot, count, out.size());
  const Records& records = tables_[table].records;
  const float* source = records.base + static_cast<size_t>(first_slot) * records.stride;
  ThreadPool::shared().parallel_for((out.size() + floats_per_task - 1) / floats_per_task, [&](size_t task, size_t) {
    const size_t begin = task * floats_per_task;
    std::memcpy(out.data() + begin, source + begin, std::min(floats_per_task, out.size() - begin) * sizeof(float));
  });
}

void Shard::write_records(size_t table, int64_t first_slot, int64_t count, std::span<const float> source) {
  check_range(table, first_slot, count, source.size());
  const Records& records = tables_[table].records;
  PendingRows* const savers[] = {tables_[table].pending.get(), tables_[table].aside.get()};
  if (savers[0] || savers[1]) {
    std::vector<uint32_t> slots(static_cast<size_t>(count));
    std::iota(slots.begin(), slots.end(), static_cast<uint32_t>(first_slot));
    for (PendingRows* saver : savers)
      if (saver) saver->reserve(slots.size());
    for (PendingRows* saver : savers)
      if (saver) saver->save(slots.data(), slots.size());
  }
  float* target = records.base + static_cast<size_t>(first_slot) * records.stride;
  ThreadPool::shared().parallel_for((source.size() + floats_per_task - 1) / floats_per_task, [&](size_t task, size_t) {
    const size_t begin = task * floats_per_task;
    std::memcpy(target + begin, source.data() + begin,
                std::min(floats_per_task, source.size() - begin) * sizeof(float));
  });
  // What was loaded is not an initial value any more.
  for (int64_t slot = first_slot; slot < first_slot + count; ++slot)
    records.changed[slot / 64] |= uint64_t{1} << (slot % 64);
}

std::vector<uint64_t> Shard::touched(size_t table) const {
  const Table& found = at(table);
  std::vector<uint64_t> words(found.words());
  for (size_t word = 0; word < words.size(); ++word) words[word] = found.touched_word(word);
  return words;
}

}  // namespace regrow
