// Many small parts of one file, read by one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace regrow {

// Reads [starts[i], ends[i]) one after the other into `out`, which has room for all of them. Those that are nearer to
// each other than `gap` bytes, and rise, are read at once. Returns how many bytes of `out` are read, less than there is
// room for if the file ends before; or the negative of errno.
int64_t read_ranges(int fd, std::span<const int64_t> starts, std::span<const int64_t> ends, int64_t gap,
                    std::span<uint8_t> out);

}  // namespace regrow
