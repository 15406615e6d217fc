#include "regrow/router.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

void make_router(Router* self, std::vector<int64_t> rows, std::vector<int64_t> dims, std::vector<int64_t> k,
                 std::vector<int64_t> r, std::vector<int64_t> table_index, std::vector<bool> mean_pooling,
                 std::optional<std::vector<bool>> expanded, std::vector<int64_t> feature_tables,
                 std::vector<int64_t> static_tables, int64_t servers, int64_t rings) {
  std::vector<bool> expanded_tables = expanded ? std::move(*expanded) : std::vector<bool>(rows.size());
  new (self) Router({std::move(rows), std::move(dims), std::move(k), std::move(r), std::move(table_index),
                     std::move(mean_pooling), std::move(expanded_tables), std::move(feature_tables),
                     std::move(static_tables), servers, rings});
}

std::unique_ptr<Plan> make_plan(Router& router, const Input& values, const std::optional<Input>& lengths,
                                int64_t batch) {
  const auto values_span = read<int64_t>(values, "values");
  std::optional<std::span<const int32_t>> lengths_span;
  if (lengths) lengths_span = read<int32_t>(*lengths, "lengths");
  nb::gil_scoped_release release;
  return std::make_unique<Plan>(router.plan(values_span, lengths_span, batch));
}

void check_matrix(const Plan& plan, size_t ndim, const int64_t* shape, const char* name) {
  const auto width = static_cast<int64_t>(plan.tables().width);
  if (ndim != 2 || shape[0] != static_cast<int64_t>(plan.batch()) || shape[1] != width)
    throw std::invalid_argument(std::string(name) + " must have the shape (" + std::to_string(plan.batch()) + ", " +
                                std::to_string(width) + ")");
}

void pool(const Plan& plan, const Input& rows, const Output& out) {
  const auto rows_span = read<float>(rows, "rows");
  const auto out_span = write<float>(out, "out");
  check_matrix(plan, out.ndim(), out.shape_ptr(), "out");
  nb::gil_scoped_release release;
  plan.pool(rows_span, out_span);
}

void unpool(const Plan& plan, const Input& grad, const Output& grads) {
  const auto grad_span = read<float>(grad, "grad");
  const auto grads_span = write<float>(grads, "grads");
  check_matrix(plan, grad.ndim(), grad.shape_ptr(), "grad");
  nb::gil_scoped_release release;
  plan.unpool(grad_span, grads_span);
}

void expand(const Plan& plan, int64_t feature, const Input& rows, const Output& out) {
  const auto rows_span = read<float>(rows, "rows");
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  plan.expand(feature, rows_span, out_span);
}

void collapse(const Plan& plan, int64_t feature, const Input& grad, const Output& grads) {
  const auto grad_span = read<float>(grad, "grad");
  const auto grads_span = write<float>(grads, "grads");
  nb::gil_scoped_release release;
  plan.collapse(feature, grad_span, grads_span);
}

void static_get(const Plan& plan, int64_t table, const Input& rows, const Output& out) {
  const auto rows_span = read<float>(rows, "rows");
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  plan.static_get(table, rows_span, out_span);
}

void static_put(const Plan& plan, int64_t table, const Input& src, const Output& grads) {
  const auto source_span = read<float>(src, "src");
  const auto grads_span = write<float>(grads, "grads");
  nb::gil_scoped_release release;
  plan.static_put(table, source_span, grads_span);
}

// The plan's own memory as a read-only array that keeps the plan alive.
template <typename T>
nb::object part(nb::handle plan, const T* data, std::initializer_list<size_t> shape) {
  return nb::ndarray<nb::numpy, const T>(data, shape, plan).cast();
}

const Plan& plan_of(nb::handle self) { return *nb::inst_ptr<Plan>(self); }

std::string described(const Plan& plan) {
  return "Plan(" + std::to_string(plan.lookups) + " lookups, " + std::to_string(plan.distinct) + " distinct rows, " +
         std::to_string(plan.tables().servers) + " servers, " + std::to_string(plan.floats()) + " floats)";
}

}  // namespace

void bind_router(nb::module_& m) {
  nb::class_<Router>(m, "Router", "A worker's side of a batch: distinct rows, their servers, pooling.")
      .def("__init__", &make_router, nb::kw_only(), "rows"_a, "dims"_a, "k"_a, "r"_a, "table_index"_a, "mean_pooling"_a,
           "expanded"_a = nb::none(), "feature_tables"_a, "static_tables"_a, "servers"_a, "rings"_a = 1)
      .def("plan", &make_plan, "values"_a, "lengths"_a.none(), "batch"_a);

  nb::class_<Plan>(m, "Plan", "Where the rows of one batch are, for its pull and its push.")
      .def_prop_ro("counts",
                   [](nb::handle self) {
                     const Plan& plan = plan_of(self);
                     return part(self, plan.counts.data(), {plan.tables().servers, plan.tables().tables.size()});
                   })
      .def_prop_ro("slots",
                   [](nb::handle self) { return part(self, plan_of(self).slots.data(), {plan_of(self).slots.size()}); })
      .def_prop_ro(
          "row_start",
          [](nb::handle self) { return part(self, plan_of(self).row_start.data(), {plan_of(self).row_start.size()}); })
      .def_prop_ro("float_start",
                   [](nb::handle self) {
                     return part(self, plan_of(self).float_start.data(), {plan_of(self).float_start.size()});
                   })
      .def_ro("lookups", &Plan::lookups)
      .def_ro("distinct", &Plan::distinct)
      .def_prop_ro("floats", &Plan::floats)
      .def("pool", &pool, "rows"_a, "out"_a)
      .def("unpool", &unpool, "grad"_a, "grads"_a)
      .def("expanded_floats", &Plan::expanded_floats, "feature"_a)
      .def("expand", &expand, "feature"_a, "rows"_a, "out"_a)
      .def("collapse", &collapse, "feature"_a, "grad"_a, "grads"_a)
      .def("static_get", &static_get, "table"_a, "rows"_a, "out"_a)
      .def("static_put", &static_put, "table"_a, "src"_a, "grads"_a)
      .def("__repr__", &described);
}

}  // namespace regrow::bindings
