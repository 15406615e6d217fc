// Which frame has a row of one table, of those that are in memory. Usually a map. Where there is a frame for every row,
// it is whole: the frame of a row is arithmetic, nothing is looked up, and a bit says whether the row is there.
#pragma once

#include <cstdint>
#include <vector>

#include "regrow/slot_map.hpp"

namespace regrow {

class FrameMap {
 public:
  static constexpr uint32_t none = SlotMap::none;

  // From now on, and before any row is there: row s has frame base + s.
  void make_whole(uint32_t base, uint32_t slots) {
    is_whole_ = true;
    base_ = base;
    there_.assign((size_t{slots} + 63) / 64, 0);
  }
  bool is_whole() const { return is_whole_; }
  uint32_t base() const { return base_; }
  bool is_there(uint32_t slot) const { return there_[slot / 64] >> (slot % 64) & 1; }  // of one that is whole

  void prefetch(uint32_t slot) const { map_.prefetch(slot); }
  uint32_t find(uint32_t slot) const {
    if (is_whole_) return is_there(slot) ? base_ + slot : none;
    return map_.find(slot);
  }
  void put(uint32_t slot, uint32_t frame) {
    if (is_whole_)
      there_[slot / 64] |= uint64_t{1} << (slot % 64);
    else
      map_.put(slot, frame);
  }
  void erase(uint32_t slot) { map_.erase(slot); }  // nothing leaves one that is whole

 private:
  bool is_whole_ = false;
  uint32_t base_ = 0;
  std::vector<uint64_t> there_;
  SlotMap map_;
};

}  // namespace regrow
