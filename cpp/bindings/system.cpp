#include <nanobind/stl/string.h>

#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "regrow/crc32c.hpp"
#include "regrow/dispatch.hpp"
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
      "Chooses 'avx2' or 'portable'; both give the same bits.");
  m.def("get_threads", [] { return ThreadPool::shared().size(); }, "Threads that share the loops over rows.");
  m.def(
      "set_threads", [](int n) { ThreadPool::shared().resize(n); }, "n"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Sets how many threads (the caller included) share the loops over rows.");
  m.def("crc32c", &crc32c_of, "data"_a, "seed"_a = 0, "CRC-32C of a buffer; seed is the checksum of what came before.");
  m.def("crc32c_blocks", &crc32c_blocks, "data"_a, "block_bytes"_a,
        "CRC-32C of each block of a buffer; the last may be shorter.");
  m.def("tune_malloc", &tune_malloc, "one_heap"_a = false,
        "Lets the process keep its large buffers from step to step.");
}

}  // namespace regrow::bindings
