// The Shard's methods for checkpoints.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "regrow/shard.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

nb::tuple capture_chunk(Shard& shard, int64_t bytes_max, bool aside_first) {
  CapturedChunk captured;
  {
    nb::gil_scoped_release release;
    captured = shard.capture_chunk(bytes_max, aside_first);
  }
  return nb::make_tuple(owned(std::move(captured.counts)), owned(std::move(captured.words)));
}

size_t load_rows(Shard& shard, size_t table, const Input& ids, const std::vector<Input>& parts,
                 std::optional<size_t> clean_to) {
  const auto ids_span = read<uint32_t>(ids, "ids");
  std::vector<std::span<const float>> values;
  for (const Input& part : parts) values.push_back(read<float>(part, "parts"));
  nb::gil_scoped_release release;
  return shard.load_rows(table, ids_span, values, clean_to);
}

nb::object find_slots(const Shard& shard, size_t table, const Input& ids) {
  const auto ids_span = read<uint32_t>(ids, "ids");
  std::vector<uint64_t> words;
  {
    nb::gil_scoped_release release;
    words = shard.find_slots(table, ids_span);
  }
  return nb::cast(owned(std::move(words)));
}

}  // namespace

void bind_capture(nb::class_<Shard>& shard) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  shard.def("add_tenant", &Shard::add_tenant, Released())
      .def("dirty_rows", &Shard::dirty_rows, "tenant"_a, Released())
      .def("begin_capture", &Shard::begin_capture, "tenant"_a, "full"_a, Released())
      .def("choose_captured", &Shard::choose_captured, "rows"_a, Released())
      .def("capture_chunk", &capture_chunk, "bytes_max"_a, "aside_first"_a = false)
      .def("prepare_chunk", &Shard::prepare_chunk, "bytes_max"_a, "aside_first"_a, "slice_bytes"_a, Released())
      .def("capture_left", &Shard::capture_left, Released())
      .def("capture_side_bytes", &Shard::capture_side_bytes)
      .def("end_capture", &Shard::end_capture, "durable"_a, Released())
      .def("find_slots", &find_slots, "table"_a, "ids"_a)
      .def("load_rows", &load_rows, "table"_a, "ids"_a, "parts"_a, "clean_to"_a = nb::none());
}

}  // namespace regrow::bindings
