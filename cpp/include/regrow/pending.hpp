// The rows of one table that changed since they were last flushed: for each, the record as it was before (what the
// parities still stand for). One list per member of a stripe, because members are flushed to different servers.
// A capture keeps the rows that change before it took them in the same way: then there is a list per range of slots,
// because it takes and forgets them in the order of slots, and a row that it does not wait for counts as pending.
//
// Lists are made of chunks, so that rows never move and threads can append to one list at the same time. Chunks are
// set aside before (reserve), so that appending cannot fail halfway through an update.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "regrow/kernels.hpp"
#include "regrow/layout.hpp"

namespace regrow {

class PendingRows {
 public:
  // Of a table of `blocks` blocks of k slots. `bits` has one zero bit per slot; the caller owns it.
  PendingRows(const Records& records, uint32_t k, uint32_t blocks, uint64_t* bits);
  // Lists for up to ranges_max ranges of slots. A bit is zero for those rows that save() is to keep.
  static constexpr uint32_t ranges_max = 16;
  struct Ranges {
    uint32_t slots;
  };
  PendingRows(const Records& records, Ranges ranges, uint64_t* bits);
  PendingRows(const PendingRows&) = delete;
  PendingRows& operator=(const PendingRows&) = delete;
  ~PendingRows();

  uint32_t lists() const { return list_count_; }
  uint32_t list_of(uint32_t slot) const {
    return by_range_ ? slot >> range_shift_ : slot - per_k_.quotient(slot) * per_k_.divisor();
  }
  size_t rows(uint32_t member) const { return lists_[member].size.load(std::memory_order_relaxed); }
  uint32_t slot(uint32_t member, size_t row) const { return slot_at(lists_[member], row); }
  bool pending(uint32_t slot) const { return __atomic_load_n(bits_ + slot / 64, __ATOMIC_RELAXED) >> (slot % 64) & 1; }

  // Makes room for `rows` more rows, of any members. Alone.
  void reserve(size_t rows);
  // Keeps the records of those slots that are not pending yet; several threads may call it at once, for rows that no
  // other thread changes meanwhile.
  void save(const uint32_t* slots, size_t count);
  // Empties a member's list into slots[rows] and deltas[rows * stride]: what each record was, XOR what it is. Alone.
  // With `keep` the list stays as it is.
  void take(uint32_t member, uint32_t* slots, float* deltas, bool keep);
  void clear(uint32_t member);  // forgets its rows, their bits as they are, and gives the memory back. Alone.
  // saved() finds rows appended before the last index(). One thread at a time calls index().
  void index(uint32_t member);
  const float* saved(uint32_t slot) const;  // of a pending row

 private:
  struct FreeChunk {
    void operator()(std::byte* chunk) const { ::operator delete(chunk, std::align_val_t{64}); }
  };
  using Chunk = std::unique_ptr<std::byte, FreeChunk>;  // records, then as many slots

  struct List {
    std::atomic<size_t> size{0};
    std::vector<std::byte*> chunks;  // null until its first row comes; owned
    std::vector<uint32_t> places;    // a hash table of row numbers + 1, by slot
    size_t indexed = 0;              // rows in it
  };

  float* record_at(const List& list, size_t row) const {
    return reinterpret_cast<float*>(list.chunks[row >> chunk_shift_]) + (row & chunk_mask_) * records_.stride;
  }
  uint32_t& slot_at(const List& list, size_t row) const {
    return reinterpret_cast<uint32_t*>(list.chunks[row >> chunk_shift_] + chunk_records_bytes_)[row & chunk_mask_];
  }
  void set_chunk_rows(uint32_t rows_per_list);
  size_t append(List& list, size_t rows);
  void save_piece(const uint32_t* slots, size_t count);
  size_t place_of(const List& list, uint32_t slot) const;  // in places: its row number, or an empty place

  Records records_;
  Divider per_k_;
  bool by_range_ = false;
  int range_shift_ = 0;
  uint32_t list_count_;
  uint64_t* bits_;
  int chunk_shift_;
  size_t chunk_mask_;
  size_t chunk_records_bytes_;
  size_t chunk_bytes_;
  std::unique_ptr<List[]> lists_;
  std::mutex spare_mutex_;
  std::vector<Chunk> spare_;
};

}  // namespace regrow
