// CRC-32C (Castagnoli), the checksum of frames and files. crc32c(b, crc32c(a)) is the checksum of a then b.
#pragma once

#include <cstdint>
#include <span>

namespace regrow {

uint32_t crc32c(std::span<const uint8_t> data, uint32_t seed = 0);

}  // namespace regrow
