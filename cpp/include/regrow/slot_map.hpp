// A map from slots to 32-bit numbers: open addressing, eight bytes an entry, between 64 and 80 % full, so ten to twelve
// and a half bytes a slot. A lookup is one line of memory most of the time; who has many to look up prefetches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace regrow {

class SlotMap {
 public:
  static constexpr uint32_t none = UINT32_MAX;  // neither a slot nor a number

  explicit SlotMap(size_t entries = 0) { rebuild(entries); }

  size_t size() const { return size_; }
  size_t bytes() const { return cells_.size() * sizeof(Cell); }
  void prefetch(uint32_t slot) const { __builtin_prefetch(&cells_[start(slot)]); }

  uint32_t find(uint32_t slot) const {
    for (size_t at = start(slot);; at = next(at)) {
      if (cells_[at].slot == slot) return cells_[at].number;
      if (cells_[at].slot == none) return none;
    }
  }

  void put(uint32_t slot, uint32_t number) {
    if ((size_ + 1) * 5 > cells_.size() * 4) rebuild(size_ + size_ / 4 + 1);
    place(slot, number);
  }

  void erase(uint32_t slot) {
    size_t at = start(slot);
    while (cells_[at].slot != slot) {
      if (cells_[at].slot == none) return;
      at = next(at);
    }
    // What follows moves up, unless it would stand before its own place.
    size_t gap = at;
    for (at = next(at); cells_[at].slot != none; at = next(at)) {
      const size_t home = start(cells_[at].slot);
      const bool stays = gap <= at ? gap < home && home <= at : gap < home || home <= at;
      if (stays) continue;
      cells_[gap] = cells_[at];
      gap = at;
    }
    cells_[gap] = {};
    --size_;
  }

  template <typename Body>
  void for_each(Body&& body) const {
    for (const Cell& cell : cells_)
      if (cell.slot != none) body(cell.slot, cell.number);
  }

 private:
  struct Cell {
    uint32_t slot = none;
    uint32_t number = none;
  };

  size_t start(uint32_t slot) const {
    const uint64_t mixed = (uint64_t{slot} * 0x9e3779b97f4a7c15u) >> 32;
    return (mixed * cells_.size()) >> 32;
  }
  size_t next(size_t at) const { return at + 1 == cells_.size() ? 0 : at + 1; }
  void place(uint32_t slot, uint32_t number) {
    size_t at = start(slot);
    while (cells_[at].slot != none && cells_[at].slot != slot) at = next(at);
    size_ += cells_[at].slot == none;
    cells_[at] = {slot, number};
  }
  void rebuild(size_t entries) {
    std::vector<Cell> old(entries * 5 / 4 + 8);
    old.swap(cells_);
    size_ = 0;
    for (const Cell& cell : old)
      if (cell.slot != none) place(cell.slot, cell.number);
  }

  std::vector<Cell> cells_;
  size_t size_ = 0;
};

}  // namespace regrow
