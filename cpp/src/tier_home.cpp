#include "regrow/tier_home.hpp"

#include <algorithm>
#include <cstring>

#include "regrow/crc32c.hpp"

namespace regrow {
namespace {

constexpr size_t sector_words = sector_bits / 64;
static_assert(sector_bits % 64 == 0);

uint32_t bits_checksum(const std::byte* sector, uint64_t number) {
  const uint32_t seed = crc32c({reinterpret_cast<const uint8_t*>(&number), sizeof number});
  return crc32c({reinterpret_cast<const uint8_t*>(sector) + 8, sector_bytes - 8}, seed);
}

}  // namespace

uint32_t home_checksum(uint32_t table, uint32_t slot, const void* record, size_t bytes) {
  const uint32_t who[2] = {table, slot};
  const uint32_t crc = crc32c({reinterpret_cast<const uint8_t*>(who), sizeof who});
  return crc32c({static_cast<const uint8_t*>(record), bytes}, crc);
}

void write_bit_sector(std::byte* sector, std::span<const uint64_t> words, uint64_t number) {
  std::memset(sector, 0, sector_bytes);
  const size_t first = number * sector_words;
  if (first >= words.size()) return;
  const size_t count = std::min(sector_words, words.size() - first);
  std::memcpy(sector + 8, words.data() + first, count * sizeof(uint64_t));
  const uint32_t check[2] = {bits_checksum(sector, number), 1};
  std::memcpy(sector, check, sizeof check);
}

bool read_bit_sector(const std::byte* sector, std::span<uint64_t> words, uint64_t number) {
  uint32_t check[2];
  std::memcpy(check, sector, sizeof check);
  const bool is_blank = std::all_of(sector, sector + sector_bytes, [](std::byte each) { return each == std::byte{}; });
  if (is_blank) return true;
  if (check[1] != 1 || check[0] != bits_checksum(sector, number)) return false;
  const size_t first = number * sector_words;
  const size_t count = std::min(sector_words, words.size() - first);
  std::memcpy(words.data() + first, sector + 8, count * sizeof(uint64_t));
  return true;
}

}  // namespace regrow
