#include "regrow/criteo.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "arrays.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

std::span<const char> text_of(const Input& array) {
  const auto bytes = read<uint8_t>(array, "text");
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

using Error = std::tuple<int64_t, int, std::string>;

std::tuple<int64_t, int64_t, int64_t, std::optional<Error>> parse(const Input& text, int64_t lines_max, bool final,
                                                                  bool skip_bad, const Input& rows, const Output& dense,
                                                                  const Output& ids, const Output& labels) {
  const auto bytes = text_of(text);
  CriteoOutput output;
  output.rows = read<int64_t>(rows, "rows");
  output.dense = write<float>(dense, "dense");
  output.ids = write<int64_t>(ids, "ids");
  output.labels = write<float>(labels, "labels");
  output.capacity = static_cast<int64_t>(output.labels.size());
  CriteoProgress done;
  {
    nb::gil_scoped_release release;
    done = parse_criteo(bytes, lines_max, final, skip_bad, output);
  }
  std::optional<Error> error;
  if (done.error_line >= 0) error = Error(done.error_line, done.error_field, done.error_reason);
  return {done.lines, done.samples, done.bytes, error};
}

std::tuple<int64_t, int64_t> skip(const Input& text, int64_t lines_max, bool final) {
  const auto bytes = text_of(text);
  nb::gil_scoped_release release;
  const CriteoProgress done = skip_lines(bytes, lines_max, final);
  return {done.lines, done.bytes};
}

}  // namespace

void bind_criteo(nb::module_& m) {
  m.def("parse_criteo", &parse, "text"_a, nb::kw_only(), "lines_max"_a, "final"_a, "skip_bad"_a, "rows"_a, "dense"_a,
        "ids"_a, "labels"_a,
        "Parses Criteo lines: (lines, samples, bytes, (line, field, reason) of the first bad one).");
  m.def("skip_lines", &skip, "text"_a, nb::kw_only(), "lines_max"_a, "final"_a,
        "(lines, bytes) of up to lines_max lines.");
}

}  // namespace regrow::bindings
