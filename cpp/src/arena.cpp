#include "regrow/arena.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <utility>

namespace regrow {
namespace {

constexpr size_t small_page = size_t{1} << 12;
constexpr size_t huge_page = size_t{1} << 21;

}  // namespace

size_t Arena::rounded(size_t bytes) {
  if (bytes > SIZE_MAX - 2 * huge_page) throw OutOfMemory("a table cannot have " + std::to_string(bytes) + " bytes");
  // What is left over at the end of the last huge page lies on small ones: to take it whole would cost a megabyte
  // for every table and parity, several percent of a model with many tables.
  return (bytes + small_page - 1) / small_page * small_page;
}

Arena::Arena(size_t bytes, Pages pages) : data_(nullptr), bytes_(rounded(bytes ? bytes : 1)) {
  const bool huge = bytes_ >= huge_page;
  const size_t asked = huge ? bytes_ + huge_page : bytes_;  // room to begin on a huge page
  void* got = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED)
    throw OutOfMemory("the system refused " + std::to_string(bytes_) +
                      " bytes for the rows of a table; use more servers, a smaller table or a smaller dim");
  auto* start = static_cast<std::byte*>(got);
  if (huge) {
    const size_t skip = (huge_page - reinterpret_cast<uintptr_t>(start) % huge_page) % huge_page;
    if (skip) munmap(start, skip);
    if (skip < huge_page) munmap(start + skip + bytes_, huge_page - skip);
    start += skip;
  }
  data_ = start;
  advise(pages);
}

void Arena::touch_new() const {
  for (size_t at = 0; at < bytes_; at += small_page) {
    // It is all zero. To read it first would have every page taken twice: the shared zero page, then its own.
    *reinterpret_cast<volatile unsigned char*>(data_ + at) = 0;
  }
}

void Arena::advise([[maybe_unused]] Pages pages) const {
#if defined(MADV_HUGEPAGE)
  // Where refused, small pages serve.
  if (bytes_ >= huge_page) madvise(data_, bytes_, pages == Pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Arena::~Arena() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace regrow
