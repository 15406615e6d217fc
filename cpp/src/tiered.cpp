// Rows that are in memory: the same kernels as Shard's, on frames instead of slots.
#include "regrow/tiered.hpp"

#include <algorithm>
#include <cstring>

#include "regrow/thread_pool.hpp"
#include "table_rules.hpp"

namespace regrow {
namespace {

constexpr size_t rows_per_task = 512;
constexpr size_t cached_bytes_max = 8 << 20;  // as in Shard::gather
constexpr size_t lookups_ahead = 12;

}  // namespace

const TieredShard::Table& TieredShard::at(size_t table) const {
  if (table >= tables_.size())
    throw std::out_of_range("there is no table " + std::to_string(table) + "; this store has " +
                            std::to_string(tables_.size()));
  return tables_[table];
}

size_t TieredShard::memory_bytes() const {
  size_t bytes = 0;
  for (const auto& frames : frames_) bytes += frames->bytes();
  for (const Table& table : tables_) {
    bytes +=
        (2 * table.words() + 2 * table.gone.size()) * sizeof(uint64_t) + table.places.bytes() + table.loading.bytes();
    for (const SlotMap& noted : table.places_before) bytes += noted.bytes();
    if (table.tracking) bytes += (3 + tenants_) * table.words() * sizeof(uint64_t);
  }
  return bytes;
}

std::string TieredShard::name(RowRef row) const {
  const Table& table = tables_[row.table];
  const uint64_t number = table.layout.row_of(static_cast<uint32_t>(settings_.server), row.slot);
  return "row " + std::to_string(number) + " of table " + std::to_string(row.table) + " (slot " +
         std::to_string(row.slot) + ")";
}

std::string TieredShard::describe(const LogDamage& damage) const {
  const std::string at = std::to_string(damage.at);
  if (damage.end) return "whatever follows byte " + at + " of the log, up to byte " + std::to_string(damage.end);
  // The header that says which row it is may be what is damaged.
  if (damage.slot >= tables_[damage.table].slots) return "byte " + at + " of the log";
  return name(RowRef{damage.table, damage.slot}) + " in the log, at byte " + at;
}

void TieredShard::check_counts(std::span<const int32_t> counts, std::span<const uint32_t> slots) const {
  if (counts.size() != tables_.size())
    throw std::invalid_argument("counts has " + std::to_string(counts.size()) + " entries; this store has " +
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
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); slot += counts[t], ++t) {
    const uint32_t most = counts[t] ? kernels().max_u32(slot, static_cast<size_t>(counts[t])) : 0;
    if (counts[t] && most >= tables_[t].slots)
      throw std::out_of_range("slot " + std::to_string(most) + " of table " + std::to_string(t) +
                              " is out of range; this server has " + std::to_string(tables_[t].slots) + " slots of it");
  }
}

void TieredShard::check_call(std::span<const int32_t> counts, std::span<const uint32_t> slots, size_t floats) const {
  check_counts(counts, slots);
  size_t due = 0;
  for (size_t t = 0; t < counts.size(); ++t) due += static_cast<size_t>(counts[t]) * tables_[t].dim;
  if (floats != due)
    throw std::invalid_argument("these rows have " + std::to_string(due) + " floats; the array has " +
                                std::to_string(floats));
}

void TieredShard::check_range(size_t table, int64_t first_slot, int64_t count, size_t floats) const {
  const Table& found = at(table);
  if (first_slot < 0 || count < 0 || first_slot > int64_t{found.slots} || count > int64_t{found.slots} - first_slot)
    throw std::out_of_range(text(count) + " slots from " + text(first_slot) + " on, of table " + std::to_string(table) +
                            ", are out of range; this server has " + std::to_string(found.slots) + " slots of it");
  const size_t due = static_cast<size_t>(count) * found.stride;
  if (floats != due)
    throw std::invalid_argument("these records have " + std::to_string(due) + " floats; the array has " +
                                std::to_string(floats));
}

void TieredShard::write_initial(const Table& table, uint32_t slot, float* record) const {
  write_initial_weights(table.layout, table.settings, settings_.server, slot, table.initial_key, record);
  std::memset(record + table.dim, 0, (table.stride - table.dim) * sizeof(float));
}

// Those of one table, from `begin` on. Of a table whose rows all have frames it is only looked whether they are there.
void TieredShard::translate_table(size_t index, size_t begin, std::span<const uint32_t> slots) {
  const FrameMap& frames = tables_[index].frames;
  const auto check = [&](bool is_there, uint32_t slot) {
    if (!is_there)
      throw std::invalid_argument(name({static_cast<uint32_t>(index), slot}) + " is not in memory; fetch it first");
  };
  if (frames.is_whole()) {
    for (const uint32_t slot : slots) check(frames.is_there(slot), slot);
    return;
  }
  for (size_t i = 0; i < std::min(slots.size(), lookups_ahead); ++i) frames.prefetch(slots[i]);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i + lookups_ahead < slots.size()) frames.prefetch(slots[i + lookups_ahead]);
    const uint32_t frame = frames.find(slots[i]);
    check(frame != FrameMap::none, slots[i]);
    memo_.frames[begin + i] = frame;
  }
}

// The frames of rows, all of which must be in memory; of tables whose rows all have frames there is nothing in it. A
// push names the rows of its pull: the same list, most often, as the call before, and then nothing is looked up.
std::span<const uint32_t> TieredShard::translate(std::span<const int32_t> counts, std::span<const uint32_t> slots) {
  if (memo_.is_valid && std::ranges::equal(memo_.counts, counts) && memo_.slots.size() == slots.size() &&
      std::memcmp(memo_.slots.data(), slots.data(), slots.size_bytes()) == 0)
    return memo_.frames;
  memo_.is_valid = false;
  memo_.frames.resize(slots.size());
  size_t begin = 0;
  for (size_t t = 0; t < counts.size(); ++t) {
    const auto count = static_cast<size_t>(counts[t]);
    translate_table(t, begin, slots.subspan(begin, count));
    begin += count;
  }
  memo_.counts.assign(counts.begin(), counts.end());
  memo_.slots.assign(slots.begin(), slots.end());
  memo_.is_valid = true;
  return memo_.frames;
}

namespace {

// Calls body(table, first, count, float_begin) for pieces of a call, each within one table, on the threads of the pool.
template <typename Tables, typename Body>
void for_pieces(const Tables& tables, std::span<const int32_t> counts, size_t rows, Body&& body) {
  ThreadPool::shared().parallel_for((rows + rows_per_task - 1) / rows_per_task, [&](size_t task, size_t) {
    const size_t begin = task * rows_per_task;
    const size_t end = std::min(rows, begin + rows_per_task);
    size_t table_begin = 0, float_begin = 0;
    for (size_t t = 0; t < counts.size() && table_begin < end; ++t) {
      const size_t count = static_cast<size_t>(counts[t]);
      const size_t first = std::max(begin, table_begin);
      const size_t last = std::min(end, table_begin + count);
      if (first < last) body(t, first, last - first, float_begin + (first - table_begin) * tables[t].dim);
      float_begin += count * tables[t].dim;
      table_begin += count;
    }
  });
}

}  // namespace

void TieredShard::gather(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out) {
  check_call(counts, slots, out.size());
  const std::span<const uint32_t> frames = translate(counts, slots);
  const Kernels& kernel = kernels();
  const bool past_caches = out.size_bytes() >= cached_bytes_max;
  for_pieces(tables_, counts, slots.size(), [&](size_t t, size_t first, size_t count, size_t float_begin) {
    const Table& table = tables_[t];
    const bool is_whole = table.frames.is_whole();
    const Records records{frames_of(table).record(table.frames.base()), table.stride, table.dim, nullptr};
    const uint32_t* numbers = (is_whole ? slots : frames).data() + first;
    kernel.gather(records, numbers, count, out.data() + float_begin, past_caches);
  });
}

// What must be kept of a row that is about to change: for a capture, and for a checkpoint that is being made.
void TieredShard::before_change(Table& table, uint32_t slot, uint32_t index) {
  Frames& frames = frames_of(table);
  Frame& frame = frames.at(index);
  if (capturing_) keep_aside(table, slot, frames.record(index));
  if (frame.dirty_epoch == epoch_) return;
  if (frame.dirty_epoch && frame.dirty_epoch <= making_) {
    if (log_->has_room(table.record_bytes())) {
      log_frame(frames, index);
      ++counters_.rows_copied;
    } else {
      spoil_epoch();
    }
  }
  dirty_now_ += frame.dirty_epoch == 0;
  frame.dirty_epoch = static_cast<uint32_t>(epoch_);
  if (frames.is_whole()) table.fresh[slot / 64] |= uint64_t{1} << (slot % 64);
}

// Training goes on, and the checkpoint does not come about.
void TieredShard::spoil_epoch() {
  spoiled_ = std::max(spoiled_, making_);
  making_ = 0;
  dirty_now_ += std::exchange(dirty_old_, 0);
}

// All that a change of rows of a table needs before it. Of a table whose rows all have frames the kernel marks what
// changed, and a row that has changed in this epoch before needs nothing, unless there is a capture.
void TieredShard::change_table(size_t index, size_t begin, std::span<const uint32_t> slots,
                               std::span<const uint32_t> frames) {
  Table& table = tables_[index];
  if (table.frames.is_whole()) {
    for (const uint32_t slot : slots)
      if (capturing_ || !(table.fresh[slot / 64] >> (slot % 64) & 1))
        before_change(table, slot, table.frames.base() + slot);
    return;
  }
  Frames& own = frames_of(table);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (i + lookups_ahead < slots.size()) own.prefetch(frames[begin + i + lookups_ahead]);
    mark_changed(table, slots[i]);
    before_change(table, slots[i], frames[begin + i]);
  }
}

void TieredShard::update(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> grads,
                         int64_t step, std::span<const double> rates) {
  check_call(counts, slots, grads.size());
  const std::vector<UpdateNumbers> numbers = numbers_of(tables_, step, rates);
  const std::span<const uint32_t> frames = translate(counts, slots);
  size_t at = 0;
  for (size_t t = 0; t < counts.size(); at += static_cast<size_t>(counts[t]), ++t)
    change_table(t, at, slots.subspan(at, static_cast<size_t>(counts[t])), frames);
  const Kernels& kernel = kernels();
  for_pieces(tables_, counts, slots.size(), [&](size_t t, size_t first, size_t count, size_t float_begin) {
    Table& table = tables_[t];
    const bool is_whole = table.frames.is_whole();
    const Records records{frames_of(table).record(table.frames.base()), table.stride, table.dim,
                          is_whole ? table.changed.data() : frames_of(table).bits()};
    const auto rule = static_cast<size_t>(table.settings.optimizer);
    const uint32_t* rows = (is_whole ? slots : frames).data() + first;
    kernel.update[rule](records, rows, count, grads.data() + float_begin, numbers[t]);
  });
}

std::vector<uint64_t> TieredShard::touched(size_t table) const {
  const Table& found = at(table);
  std::vector<uint64_t> words(found.words());
  for (size_t word = 0; word < words.size(); ++word) words[word] = found.touched_word(word);
  return words;
}

}  // namespace regrow
