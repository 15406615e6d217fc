#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "regrow/crc32c.hpp"
#include "regrow/dispatch.hpp"
#include "regrow/read_ranges.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

// Holds a buffer (bytes, bytearray, memoryview, any contiguous array) while it is read.
class HeldBuffer {
 public:
  explicit HeldBuffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  ~HeldBuffer() { PyBuffer_Release(&view_); }
  std::span<const uint8_t> bytes() const {
    return {static_cast<const uint8_t*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

uint32_t crc32c_of(nb::handle data, uint32_t seed) {
  const HeldBuffer held(data);
  nb::gil_scoped_release release;
  return crc32c(held.bytes(), seed);
}

nb::object crc32c_blocks(nb::handle data, size_t block_bytes) {
  if (!block_bytes) throw std::invalid_argument("a block has at least one byte");
  const HeldBuffer held(data);
  const std::span<const uint8_t> bytes = held.bytes();
  std::vector<uint32_t> sums((bytes.size() + block_bytes - 1) / block_bytes);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < sums.size(); ++i) {
      const size_t first = i * block_bytes;
      sums[i] = crc32c(bytes.subspan(first, std::min(block_bytes, bytes.size() - first)), 0);
    }
  }
  return nb::cast(owned(std::move(sums)));
}

nb::object read_ranges_of(int fd, const Input& starts, const Input& ends, int64_t gap) {
  const std::span<const int64_t> from = read<int64_t>(starts, "starts"), to = read<int64_t>(ends, "ends");
  if (from.size() != to.size() || gap < 0)
    throw std::invalid_argument("every start has an end, and gaps are not negative");
  size_t bytes = 0;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] < 0 || to[i] < from[i]) throw std::invalid_argument("a range ends behind its start");
    bytes += static_cast<size_t>(to[i] - from[i]);
  }
  std::vector<uint8_t> data(bytes);
  int64_t got = 0;
  {
    nb::gil_scoped_release release;
    got = read_ranges(fd, from, to, gap, data);
  }
  if (got < 0) {
    errno = static_cast<int>(-got);
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  data.resize(static_cast<size_t>(got));
  return nb::cast(owned(std::move(data)));
}

// glibc takes large blocks from the system and gives them back at once, so every step pays anew for zeroed
// pages. Kept in the heap they cost the memory of one step and no page faults. (M_MMAP_THRESHOLD would do the
// same, but only for blocks up to 32 MB.) Of threads that come and go, glibc gives whole heaps back; with one heap for
// all, which they take turns at, it does not.
void tune_malloc(bool one_heap) {
#if defined(__GLIBC__)
  constexpr int keep_bytes = 1 << 30;
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, keep_bytes);
  if (one_heap) mallopt(M_ARENA_MAX, 1);
#endif
}

}  // namespace

void bind_system(nb::module_& m) {
  m.def("simd_level", [] { return std::string(kernels().name); }, "The instruction set the kernels use now.");
  m.def(
      "set_simd", [](const std::string& level) { set_simd(level); }, "level"_a,
      "Chooses one of simd_levels(); all give the same bits.");
  m.def("simd_levels", &simd_levels, "The instruction sets that this CPU and build have, the best first.");
  m.def("get_threads", [] { return ThreadPool::shared().size(); }, "Threads that share the loops over rows.");
  m.def(
      "set_threads", [](int n) { ThreadPool::shared().resize(n); }, "n"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Sets how many threads (the caller included) share the loops over rows.");
  m.def("crc32c", &crc32c_of, "data"_a, "seed"_a = 0, "CRC-32C of a buffer; seed is the checksum of what came before.");
  m.def("crc32c_blocks", &crc32c_blocks, "data"_a, "block_bytes"_a,
        "CRC-32C of each block of a buffer; the last may be shorter.");
  m.def("read_ranges", &read_ranges_of, "fd"_a, "starts"_a, "ends"_a, "gap"_a = 0,
        "Parts of a file, one after the other, by one call; those at most `gap` bytes apart are read at once. Fewer "
        "bytes\n"
        "if the file ends before.");
  m.def("tune_malloc", &tune_malloc, "one_heap"_a = false,
        "Lets the process keep its large buffers from step to step.");
}

}  // namespace regrow::bindings
