#include "regrow/pending.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "regrow/dispatch.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {
namespace {

// A list takes memory in pieces of this size: small enough that a hundred lists with a row each cost little, large
// enough that taking one is rare.
constexpr size_t chunk_bytes_target = size_t{1} << 16;
constexpr size_t piece_rows = 512;
constexpr size_t words_ahead = 24;
constexpr size_t rows_ahead = 8;
constexpr size_t line_bytes = 64;

void prefetch(const float* record, size_t stride) {
  const auto* bytes = reinterpret_cast<const char*>(record);
  for (size_t i = 0; i < stride * sizeof(float); i += line_bytes) __builtin_prefetch(bytes + i, 1, 3);
}

}  // namespace

PendingRows::PendingRows(const Records& records, uint32_t k, uint32_t blocks, uint64_t* bits)
    : records_(records), per_k_(k), list_count_(k), bits_(bits), lists_(std::make_unique<List[]>(k)) {
  set_chunk_rows(blocks);
}

PendingRows::PendingRows(const Records& records, Ranges ranges, uint64_t* bits)
    : records_(records), per_k_(1), by_range_(true), bits_(bits) {
  while ((ranges.slots - 1) >> range_shift_ >= ranges_max) ++range_shift_;
  list_count_ = ((ranges.slots - 1) >> range_shift_) + 1;
  lists_ = std::make_unique<List[]>(list_count_);
  set_chunk_rows(uint32_t{1} << range_shift_);
}

void PendingRows::set_chunk_rows(uint32_t rows_per_list) {
  const size_t record_bytes = records_.stride * sizeof(float);
  const size_t rows_target = std::bit_floor(std::max<size_t>(1, chunk_bytes_target / record_bytes));
  const size_t rows = std::min(rows_target, std::bit_ceil(size_t{rows_per_list}));  // small tables have short lists
  chunk_shift_ = std::countr_zero(rows);
  chunk_mask_ = rows - 1;
  chunk_records_bytes_ = rows * record_bytes;
  chunk_bytes_ = chunk_records_bytes_ + rows * sizeof(uint32_t);
}

PendingRows::~PendingRows() {
  for (uint32_t member = 0; member < list_count_; ++member)
    for (std::byte* chunk : lists_[member].chunks) FreeChunk()(chunk);
}

void PendingRows::reserve(size_t rows) {
  // Rows may fall to the members in any way: each list may begin one chunk that it does not fill.
  const size_t spare_due = (rows >> chunk_shift_) + list_count_;
  while (spare_.size() < spare_due)
    spare_.emplace_back(static_cast<std::byte*>(::operator new(chunk_bytes_, std::align_val_t{line_bytes})));
  for (uint32_t member = 0; member < list_count_; ++member) {
    List& list = lists_[member];
    const size_t chunks_due = ((list.size.load(std::memory_order_relaxed) + rows) >> chunk_shift_) + 1;
    if (list.chunks.size() < chunks_due) list.chunks.resize(chunks_due, nullptr);
  }
}

// Returns the number of the first of `rows` new rows, all of which have memory.
size_t PendingRows::append(List& list, size_t rows) {
  const size_t first = list.size.fetch_add(rows, std::memory_order_relaxed);
  for (size_t chunk = first >> chunk_shift_; chunk <= (first + rows - 1) >> chunk_shift_; ++chunk) {
    std::atomic_ref<std::byte*> entry(list.chunks[chunk]);
    if (entry.load(std::memory_order_acquire)) continue;
    std::lock_guard lock(spare_mutex_);
    if (entry.load(std::memory_order_relaxed)) continue;
    entry.store(spare_.back().release(), std::memory_order_release);
    spare_.pop_back();
  }
  return first;
}

void PendingRows::save(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; i += piece_rows) save_piece(slots + i, std::min(piece_rows, count - i));
}

void PendingRows::save_piece(const uint32_t* slots, size_t count) {
  uint32_t fresh[piece_rows];
  uint32_t members[piece_rows];
  size_t rows_at[servers_max];  // per member: rows, then where the next one goes
  size_t found = 0;
  // Threads may share a word. Most rows are pending already: looking first spares the atomic write.
  for (size_t i = 0; i < count; ++i) {
    if (i + words_ahead < count) __builtin_prefetch(bits_ + slots[i + words_ahead] / 64, 1, 3);
    uint64_t* word = bits_ + slots[i] / 64;
    const uint64_t bit = uint64_t{1} << (slots[i] % 64);
    if (__atomic_load_n(word, __ATOMIC_RELAXED) & bit) continue;
    if (__atomic_fetch_or(word, bit, __ATOMIC_RELAXED) & bit) continue;
    fresh[found++] = slots[i];
  }
  if (!found) return;
  std::fill_n(rows_at, list_count_, 0);
  for (size_t i = 0; i < found; ++i) {
    members[i] = list_of(fresh[i]);
    ++rows_at[members[i]];
  }
  for (uint32_t member = 0; member < list_count_; ++member)
    if (rows_at[member]) rows_at[member] = append(lists_[member], rows_at[member]);
  const size_t stride = records_.stride;
  for (size_t i = 0; i < found && i < rows_ahead; ++i) prefetch(records_.base + fresh[i] * stride, stride);
  for (size_t i = 0; i < found; ++i) {
    if (i + rows_ahead < found) prefetch(records_.base + fresh[i + rows_ahead] * stride, stride);
    const List& list = lists_[members[i]];
    const size_t row = rows_at[members[i]]++;
    std::memcpy(record_at(list, row), records_.base + fresh[i] * stride, stride * sizeof(float));
    slot_at(list, row) = fresh[i];
  }
}

void PendingRows::take(uint32_t member, uint32_t* slots, float* deltas, bool keep) {
  List& list = lists_[member];
  const size_t rows = list.size.load(std::memory_order_relaxed);
  const size_t used = (rows + chunk_mask_) >> chunk_shift_;
  spare_.reserve(spare_.size() + used);
  const size_t stride = records_.stride;
  const Kernels& kernel = kernels();
  ThreadPool::shared().parallel_for((rows + piece_rows - 1) / piece_rows, [&](size_t task, size_t) {
    const size_t end = std::min(rows, (task + 1) * piece_rows);
    for (size_t row = task * piece_rows; row < end; ++row) {
      if (row + rows_ahead < end) {
        const uint32_t later = slot_at(list, row + rows_ahead);
        prefetch(records_.base + later * stride, stride);
        __builtin_prefetch(bits_ + later / 64, 1, 3);
      }
      const uint32_t slot = slot_at(list, row);
      slots[row] = slot;
      kernel.xor_bytes(reinterpret_cast<uint8_t*>(deltas + row * stride),
                       reinterpret_cast<const uint8_t*>(record_at(list, row)),
                       reinterpret_cast<const uint8_t*>(records_.base + slot * stride), stride * sizeof(float));
      if (!keep) __atomic_fetch_and(bits_ + slot / 64, ~(uint64_t{1} << (slot % 64)), __ATOMIC_RELAXED);
    }
  });
  if (keep) return;
  for (size_t chunk = 0; chunk < used; ++chunk) spare_.emplace_back(std::exchange(list.chunks[chunk], nullptr));
  list.size.store(0, std::memory_order_relaxed);
  list.places.clear();
  list.indexed = 0;
  // What this flush used, for every member, is likely to be used again; what a rare large one left is given back.
  const size_t spare_max = (used + 1) * per_k_.divisor();
  if (spare_.size() > spare_max) spare_.resize(spare_max);
}

void PendingRows::clear(uint32_t member) {
  List& list = lists_[member];
  for (std::byte*& chunk : list.chunks) FreeChunk()(std::exchange(chunk, nullptr));
  list.size.store(0, std::memory_order_relaxed);
  list.places = {};
  list.indexed = 0;
}

size_t PendingRows::place_of(const List& list, uint32_t slot) const {
  const size_t mask = list.places.size() - 1;
  size_t place = (slot * 0x9e3779b97f4a7c15u >> 32) & mask;
  while (list.places[place] && slot_at(list, list.places[place] - 1) != slot) place = (place + 1) & mask;
  return place;
}

void PendingRows::index(uint32_t member) {
  List& list = lists_[member];
  const size_t rows = list.size.load(std::memory_order_relaxed);
  if (list.indexed == rows) return;
  if (list.places.size() < 2 * rows) {
    list.places.assign(std::bit_ceil(4 * rows), 0);
    list.indexed = 0;
  }
  for (; list.indexed < rows; ++list.indexed)
    list.places[place_of(list, slot_at(list, list.indexed))] = static_cast<uint32_t>(list.indexed + 1);
}

const float* PendingRows::saved(uint32_t slot) const {
  const List& list = lists_[list_of(slot)];
  return record_at(list, list.places[place_of(list, slot)] - 1);
}

}  // namespace regrow
