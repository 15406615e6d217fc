#include "regrow/crc32c.hpp"

#include "regrow/dispatch.hpp"

namespace regrow {
namespace {

constexpr uint32_t polynomial = 0x82f63b78u;  // Castagnoli, bits reversed

Crc32cTables made_tables() {
  Crc32cTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? polynomial : 0);
    tables.slices[0][byte] = crc;
  }
  for (int slice = 1; slice < 8; ++slice)
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables.slices[slice - 1][byte];
      tables.slices[slice][byte] = crc >> 8 ^ tables.slices[0][crc & 255];
    }
  // Appending zeros is linear in the register: what it does to each bit gives what it does to any byte.
  uint32_t moved[32];
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t zero = 0; zero < crc32c_lane; ++zero) crc = crc >> 8 ^ tables.slices[0][crc & 255];
    moved[bit] = crc;
  }
  for (int position = 0; position < 4; ++position)
    for (int byte = 0; byte < 256; ++byte)
      for (int bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) tables.shift[position][byte] ^= moved[8 * position + bit];
  return tables;
}

}  // namespace

uint32_t crc32c(std::span<const uint8_t> data, uint32_t seed) {
  static const Crc32cTables tables = made_tables();
  return kernels().crc32c(seed, data.data(), data.size(), tables);
}

}  // namespace regrow
