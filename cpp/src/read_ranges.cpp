#include "regrow/read_ranges.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace regrow {
namespace {

// Less than `bytes` only at the end of the file.
int64_t read_all(int fd, uint8_t* into, size_t bytes, int64_t at) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(fd, into + done, bytes - done, at + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -errno;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<int64_t>(done);
}

}  // namespace

int64_t read_ranges(int fd, std::span<const int64_t> starts, std::span<const int64_t> ends, int64_t gap,
                    std::span<uint8_t> out) {
  std::vector<uint8_t> together;
  size_t filled = 0;
  for (size_t first = 0, last = 0; first < starts.size(); first = last + 1) {
    last = first;
    while (last + 1 < starts.size() && starts[last + 1] >= ends[last] && starts[last + 1] - ends[last] <= gap) ++last;
    const size_t bytes = static_cast<size_t>(ends[last] - starts[first]);
    const bool alone = last == first;
    if (!alone) together.resize(bytes);
    const int64_t got = read_all(fd, alone ? out.data() + filled : together.data(), bytes, starts[first]);
    if (got < 0) return got;
    for (size_t i = first; i <= last; ++i) {
      const int64_t from = starts[i] - starts[first], to = ends[i] - starts[first];
      if (got < to) return static_cast<int64_t>(filled);
      if (!alone) std::memcpy(out.data() + filled, together.data() + from, static_cast<size_t>(to - from));
      filled += static_cast<size_t>(to - from);
    }
  }
  return static_cast<int64_t>(filled);
}

}  // namespace regrow
