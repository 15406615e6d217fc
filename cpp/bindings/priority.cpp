// The Shard's methods for what goes first into a checkpoint.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "arrays.hpp"
#include "regrow/shard.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

void set_priority(Shard& shard, size_t tenant, const std::string& kind, const std::vector<int64_t>& tables,
                  double share, uint64_t seed, int64_t period) {
  nb::gil_scoped_release release;
  shard.set_priority(tenant, priority_from_name(kind), tables, share, seed, period);
}

void note_updates(Shard& shard, const Input& counts, const Input& slots) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  nb::gil_scoped_release release;
  shard.note_updates(counts_span, slots_span);
}

}  // namespace

void bind_priority(nb::class_<Shard>& shard) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  shard.def("set_priority", &set_priority, "tenant"_a, "kind"_a, "tables"_a, "share"_a, "seed"_a, "period"_a)
      .def("note_updates", &note_updates, "counts"_a, "slots"_a)
      .def("updates_noted", &Shard::updates_noted)
      .def("set_updates_noted", &Shard::set_updates_noted, "total"_a)
      .def("updates_uncaptured", &Shard::updates_uncaptured, "tenant"_a, Released())
      .def("capture_skipped", &Shard::capture_skipped, Released())
      .def("updates_skipped", &Shard::updates_skipped, Released())
      .def("priority_bytes", &Shard::priority_bytes)
      .def("count_bytes", &Shard::count_bytes);
}

}  // namespace regrow::bindings
