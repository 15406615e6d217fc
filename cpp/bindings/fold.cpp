#include "regrow/fold.hpp"

#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "arrays.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

// Rows of numbers or of floats: both are copied as they are.
template <typename Word, typename Array>
std::span<Word> words(const Array& array, const char* name) {
  if (array.dtype() == nb::dtype<float>())
    check_array<float>(array, name);
  else
    check_array<uint32_t>(array, name);
  return {static_cast<Word*>(const_cast<void*>(static_cast<const void*>(array.data()))), array.size()};
}

nb::object newest(const std::vector<Input>& lists) {
  std::vector<std::span<const uint32_t>> spans;
  for (const Input& list : lists) spans.push_back(read<uint32_t>(list, "lists"));
  std::vector<RowAt> found;
  {
    nb::gil_scoped_release release;
    found = newest_rows(spans);
  }
  return nb::cast(owned(std::move(found)));
}

void gather(const std::vector<Input>& lists, const Input& places, const Output& out) {
  std::vector<std::span<const uint32_t>> spans;
  for (const Input& list : lists) spans.push_back(words<const uint32_t>(list, "lists"));
  const size_t width = out.ndim() < 2 ? 1 : out.shape(1);
  for (const Input& list : lists)
    if (list.dtype() != out.dtype() || list.ndim() != out.ndim() || (list.ndim() > 1 && list.shape(1) != width))
      throw std::invalid_argument("lists must have rows like those of out");
  const auto at = read<uint64_t>(places, "places");
  const auto to = words<uint32_t>(out, "out");
  nb::gil_scoped_release release;
  gather_rows(spans, width, at, to);
}

}  // namespace

void bind_fold(nb::module_& m) {
  m.def("newest_rows", &newest, "lists"_a, "Where the newest row of each number is.");
  m.def("gather_rows", &gather, "lists"_a, "places"_a, "out"_a, "Copies the rows at some places.");
}

}  // namespace regrow::bindings
