#include "regrow/shard.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "regrow/sums.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

void construct(Shard* shard, int64_t servers, int64_t server, int64_t rings,
               const std::vector<std::pair<int64_t, int64_t>>& coding_groups, bool recovering) {
  ShardSettings settings{servers, server, rings, {}, recovering};
  for (const auto& [distance, r] : coding_groups) settings.coding.push_back({distance, r});
  new (shard) Shard(settings);
}

size_t add_table(Shard& shard, int64_t rows, int64_t dim, int64_t k, int64_t r, const std::string& optimizer,
                 double learning_rate, double eps, double beta1, double beta2, double momentum, double weight_decay,
                 uint64_t seed, double init_bound, int64_t table) {
  nb::gil_scoped_release release;
  TableSettings settings;
  settings.rows = rows;
  settings.dim = dim;
  settings.k = k;
  settings.r = r;
  settings.optimizer = optimizer_from_name(optimizer);
  settings.numbers = {learning_rate, eps, beta1, beta2, momentum, weight_decay};
  settings.seed = seed;
  settings.init_bound = init_bound;
  settings.table = table;
  return shard.add_table(settings);
}

void gather(const Shard& shard, const Input& counts, const Input& slots, const Output& out) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  shard.gather(counts_span, slots_span, out_span);
}

void update(Shard& shard, const Input& counts, const Input& slots, const Input& grads, int64_t step,
            const std::vector<double>& rates) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto grads_span = read<float>(grads, "grads");
  nb::gil_scoped_release release;
  shard.update(counts_span, slots_span, grads_span, step, rates);
}

void assign_untouched(Shard& shard, const Input& counts, const Input& slots, const Input& weights) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto weights_span = read<float>(weights, "weights");
  nb::gil_scoped_release release;
  shard.assign_untouched(counts_span, slots_span, weights_span);
}

void read_records(const Shard& shard, size_t table, int64_t first_slot, int64_t count, const Output& out) {
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  shard.read_records(table, first_slot, count, out_span);
}

void write_records(Shard& shard, size_t table, int64_t first_slot, int64_t count, const Input& src) {
  const auto source_span = read<float>(src, "src");
  nb::gil_scoped_release release;
  shard.write_records(table, first_slot, count, source_span);
}

nb::tuple merged(const Input& dims, const std::vector<std::tuple<Input, Input, Input>>& parts) {
  const auto dims_span = read<int32_t>(dims, "dims");
  std::vector<PushView> views;
  for (const auto& [counts, slots, grads] : parts)
    views.push_back({read<int32_t>(counts, "counts"), read<uint32_t>(slots, "slots"), read<float>(grads, "grads")});
  SummedPush push;
  {
    nb::gil_scoped_release release;
    push = sum_pushes(dims_span, views);
  }
  return nb::make_tuple(owned(std::move(push.counts)), owned(std::move(push.slots)), owned(std::move(push.grads)));
}

bool has_repeated_slots(const Input& counts, const Input& slots) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  nb::gil_scoped_release release;
  return regrow::has_repeated_slots(counts_span, slots_span);
}

std::string described(const Shard& shard) {
  return "Shard(server " + std::to_string(shard.server()) + " of " + std::to_string(shard.servers()) + ", " +
         std::to_string(shard.table_count()) + " tables, " + std::to_string(shard.memory_bytes()) + " bytes)";
}

}  // namespace

void bind_redundancy(nb::class_<Shard>& shard);  // the methods in redundancy.cpp
void bind_capture(nb::class_<Shard>& shard);     // those in capture.cpp
void bind_priority(nb::class_<Shard>& shard);    // and in priority.cpp

void bind_shard(nb::module_& m) {
  nb::class_<Shard> shard(m, "Shard", "The rows of one server.");
  shard
      .def("__init__", &construct, "servers"_a, "server"_a, "rings"_a = 1, "coding_groups"_a = nb::list(),
           "recovering"_a = false)
      .def("add_table", &add_table, nb::kw_only(), "rows"_a, "dim"_a, "k"_a = 1, "r"_a = 0, "optimizer"_a,
           "learning_rate"_a, "eps"_a = 1e-8, "beta1"_a = 0.9, "beta2"_a = 0.999, "momentum"_a = 0.9,
           "weight_decay"_a = 0.0, "seed"_a, "init_bound"_a, "table"_a,
           "Takes memory for this server's part of a table, fills in initial values, returns the table's "
           "position.")
      .def_prop_ro("table_count", &Shard::table_count)
      .def_prop_ro("memory_bytes", &Shard::memory_bytes)
      .def("record_floats", &Shard::record_floats, "table"_a)
      .def("slots", &Shard::slots, "table"_a)
      .def("gather", &gather, "counts"_a, "slots"_a, "out"_a)
      .def("update", &update, "counts"_a, "slots"_a, "grads"_a, "step"_a, "rates"_a = std::vector<double>{})
      .def("assign_untouched", &assign_untouched, "counts"_a, "slots"_a, "weights"_a)
      .def("read_records", &read_records, "table"_a, "first_slot"_a, "count"_a, "out"_a)
      .def("write_records", &write_records, "table"_a, "first_slot"_a, "count"_a, "src"_a)
      .def(
          "touched", [](const Shard& shard, size_t table) { return owned(shard.touched(table)); }, "table"_a)
      .def("__repr__", &described);
  bind_redundancy(shard);
  bind_capture(shard);
  bind_priority(shard);

  m.def(
      "shard_bytes",
      [](int64_t rows, int64_t dim, int64_t k, int64_t r, int64_t rings, int64_t servers,
         const std::string& optimizer) {
        return shard_bytes(rows, dim, k, r, rings, servers, optimizer_from_name(optimizer));
      },
      "rows"_a, "dim"_a, "k"_a, "r"_a, "rings"_a, "servers"_a, "optimizer"_a, "Bytes one table takes on each server.");
  m.def("sum_pushes", &merged, "dims"_a, "parts"_a, "Sums pushes row by row.");
  m.def("has_repeated_slots", &has_repeated_slots, "counts"_a, "slots"_a,
        "Whether some slot is named twice within its table.");
}

}  // namespace regrow::bindings
