// Where a row is at home: arithmetic, no index. Each table has two regions of the file: bits that say which rows are
// there at all, and pages of rows. A row of a page is [checksum, record]; one that is larger than a page has as many
// pages of its own as it needs. When it changed, the home does not say: whatever is there counts for every checkpoint
// that anybody may go back to. Bits have a checksum per sector: a torn write leaves each sector old or new.
#pragma once

#include <cstdint>
#include <span>

#include "regrow/disk.hpp"

namespace regrow {

struct HomeHeader {
  uint32_t crc;
};

inline constexpr size_t sector_bits = (sector_bytes - 8) * 8;  // rows that a sector of bits is of

struct HomeTable {
  // Behind `begin`, which is a multiple of a page; the end is too.
  HomeTable(uint64_t begin, uint64_t slots, size_t record_bytes, size_t page_bytes)
      : page_bytes(page_bytes), row_bytes(sizeof(HomeHeader) + record_bytes) {
    rows_per_page = row_bytes <= page_bytes ? page_bytes / row_bytes : 1;
    group_bytes = (rows_per_page * row_bytes + page_bytes - 1) / page_bytes * page_bytes;
    sectors = (slots + sector_bits - 1) / sector_bits;
    bits_begin = begin;
    rows_begin = begin + (sectors * sector_bytes + page_bytes - 1) / page_bytes * page_bytes;
    end = rows_begin + (slots + rows_per_page - 1) / rows_per_page * group_bytes;
  }
  // The pages that a row shares with its neighbours, and where it is in them.
  uint64_t group_of(uint32_t slot) const { return slot / rows_per_page; }
  uint64_t group_begin(uint64_t group) const { return rows_begin + group * group_bytes; }
  uint32_t group_first(uint64_t group) const { return static_cast<uint32_t>(group * rows_per_page); }
  size_t within(uint32_t slot) const { return slot % rows_per_page * row_bytes; }

  size_t page_bytes, row_bytes, rows_per_page, group_bytes;
  uint64_t sectors, bits_begin, rows_begin, end;
};

// Covers whose it is, so that a page in the wrong place is found too.
uint32_t home_checksum(uint32_t table, uint32_t slot, const void* record, size_t bytes);

// A sector of bits: which of `words`, from bit first on, and back. False if the checksum is wrong; zeros are fine.
void write_bit_sector(std::byte* sector, std::span<const uint64_t> words, uint64_t number);
bool read_bit_sector(const std::byte* sector, std::span<uint64_t> words, uint64_t number);

}  // namespace regrow
