// What is to be decoded, place by place.
#include "regrow/places.hpp"

#include <utility>

#include "arrays.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

nb::tuple take(const Output& todo, const Input& first, const Input& floats, int64_t place, int64_t bytes_max) {
  const auto todo_span = write<uint8_t>(todo, "todo");
  const auto first_span = read<int64_t>(first, "first");
  const auto floats_span = read<int64_t>(floats, "floats");
  TakenPlaces taken;
  {
    nb::gil_scoped_release release;
    taken = take_places(todo_span, first_span, floats_span, place, bytes_max);
  }
  return nb::make_tuple(owned(std::move(taken.counts)), owned(std::move(taken.blocks)), taken.next);
}

}  // namespace

void bind_places(nb::module_& m) {
  m.def("take_places", &take, "todo"_a, "first"_a, "floats"_a, "place"_a, "bytes_max"_a,
        "The next blocks that are to be done, by table, and the place to go on from.");
  m.def(
      "mark_places",
      [](const Output& flags, const Input& first, const Input& counts, const Input& blocks) {
        const auto flags_span = write<uint8_t>(flags, "flags");
        const auto first_span = read<int64_t>(first, "first");
        const auto counts_span = read<int32_t>(counts, "counts");
        const auto blocks_span = read<uint32_t>(blocks, "blocks");
        nb::gil_scoped_release release;
        mark_places(flags_span, first_span, counts_span, blocks_span);
      },
      "flags"_a, "first"_a, "counts"_a, "blocks"_a, "Sets the bytes of these blocks.");
  m.def(
      "has_any_bit",
      [](const Input& words, const Input& bits) {
        return has_any_bit(read<uint64_t>(words, "words"), read<uint32_t>(bits, "bits"));
      },
      "words"_a, "bits"_a, "Whether any of these bits is set.");
  m.def(
      "find_nonzero",
      [](const Input& records, int64_t floats) {
        const auto records_span = read<float>(records, "records");
        std::vector<uint8_t> found;
        {
          nb::gil_scoped_release release;
          found = find_nonzero(records_span, floats);
        }
        return owned(std::move(found));
      },
      "records"_a, "floats"_a, "For each record: 1 if any of its bits is set.");
}

}  // namespace regrow::bindings
