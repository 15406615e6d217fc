#include "regrow/samples.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "arrays.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

using Error = std::optional<std::tuple<int64_t, int64_t, std::string>>;
using Ids = nb::ndarray<nb::numpy, int64_t>;
using Lengths = nb::ndarray<nb::numpy, int32_t>;

std::span<const char> chars(const Input& array, const char* name) {
  const auto bytes = read<uint8_t>(array, name);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Error error_of(const BadLine& bad) {
  if (bad.line < 0) return std::nullopt;
  return std::tuple(bad.line, bad.column, bad.reason);
}

std::span<const uint8_t> valid_of(const std::optional<Input>& valid) {
  return valid ? read<uint8_t>(*valid, "valid") : std::span<const uint8_t>();
}

std::optional<std::span<const int64_t>> bags_of(const std::optional<Input>& bags) {
  if (!bags) return std::nullopt;
  return read<int64_t>(*bags, "bags");
}

char one_character(const std::string& text, const char* name) {
  if (text.size() != 1) throw std::invalid_argument(std::string(name) + " must be one ASCII character");
  return text[0];
}

void set_ids(SampleParser& parser, size_t field, size_t index, const std::string& kind, int64_t values, int64_t rows,
             int64_t missing, const std::optional<std::string>& separator, const std::vector<nb::bytes>& words) {
  IdRule rule;
  if (kind != "hash" && kind != "int" && kind != "vocabulary")
    throw std::invalid_argument("kind must be hash, int or vocabulary");
  rule.kind = kind == "hash" ? IdKind::hash : kind == "int" ? IdKind::whole : IdKind::vocabulary;
  rule.values = values;
  rule.rows = rows;
  rule.missing = missing;
  if (separator) rule.separator = one_character(*separator, "separator");
  if (rule.kind == IdKind::vocabulary) {
    std::vector<std::string> texts;
    texts.reserve(words.size());
    for (const nb::bytes& word : words) texts.emplace_back(word.c_str(), word.size());
    rule.set_words(texts);
  }
  parser.set_ids(field, index, std::move(rule));
}

std::tuple<int64_t, int64_t, Ids, std::optional<Lengths>, Error> parse(SampleParser& parser, const Input& text,
                                                                       bool skip_bad, const Output& dense,
                                                                       const Output& labels) {
  const auto bytes = chars(text, "text");
  const auto dense_out = write<float>(dense, "dense");
  const auto labels_out = write<float>(labels, "labels");
  Samples made;
  {
    nb::gil_scoped_release release;
    made = parser.parse(bytes, skip_bad, dense_out, labels_out);
  }
  std::optional<Lengths> lengths;
  if (!made.lengths.empty()) lengths = owned(std::move(made.lengths));
  return {made.lines, made.samples, owned(std::move(made.values)), lengths, error_of(made.bad)};
}

template <auto Take>
Error take_numbers(const SampleParser& parser, size_t field, const Input& values, const std::optional<Input>& valid,
                   const Output& out, const Output& bad) {
  const auto numbers = read<double>(values, "values");
  const auto known = valid_of(valid);
  const auto target = write<float>(out, "out");
  const auto marks = write<uint8_t>(bad, "bad");
  nb::gil_scoped_release release;
  return error_of((parser.*Take)(field, numbers, known, target, marks));
}

std::tuple<Ids, Lengths, Error> given(ColumnIds&& made) {
  const Error error = error_of(made.bad);
  return {owned(std::move(made.values)), owned(std::move(made.lengths)), error};
}

std::tuple<Ids, Lengths, Error> take_texts(const SampleParser& parser, size_t field, const Input& offsets,
                                           const Input& text, const std::optional<Input>& valid,
                                           const std::optional<Input>& bags, const Output& bad) {
  const auto places = read<int64_t>(offsets, "offsets");
  const auto bytes = chars(text, "text");
  const auto known = valid_of(valid);
  const auto groups = bags_of(bags);
  const auto marks = write<uint8_t>(bad, "bad");
  ColumnIds made;
  {
    nb::gil_scoped_release release;
    made = parser.take_texts(field, places, bytes, known, groups, marks);
  }
  return given(std::move(made));
}

std::tuple<Ids, Lengths, Error> take_wholes(const SampleParser& parser, size_t field, const Input& values,
                                            const std::optional<Input>& valid, const std::optional<Input>& bags,
                                            const Output& bad) {
  const auto numbers = read<int64_t>(values, "values");
  const auto known = valid_of(valid);
  const auto groups = bags_of(bags);
  const auto marks = write<uint8_t>(bad, "bad");
  ColumnIds made;
  {
    nb::gil_scoped_release release;
    made = parser.take_wholes(field, numbers, known, groups, marks);
  }
  return given(std::move(made));
}

}  // namespace

void bind_samples(nb::module_& m) {
  nb::class_<SampleParser>(m, "SampleParser", "Columns to samples, as a schema says.")
      .def(
          "__init__",
          [](SampleParser* self, size_t fields, const std::string& delimiter, std::optional<double> threshold) {
            new (self) SampleParser(fields, one_character(delimiter, "delimiter"), threshold);
          },
          nb::kw_only(), "fields"_a, "delimiter"_a = ",", "threshold"_a = nb::none())
      .def("set_label", &SampleParser::set_label, "field"_a)
      .def("set_dense", &SampleParser::set_dense, "field"_a, nb::kw_only(), "index"_a, "missing"_a, "log1p"_a)
      .def("set_ids", &set_ids, "field"_a, nb::kw_only(), "index"_a, "kind"_a, "values"_a, "rows"_a, "missing"_a,
           "separator"_a = nb::none(), "words"_a = std::vector<nb::bytes>())
      .def("parse", &parse, "text"_a, nb::kw_only(), "skip_bad"_a, "dense"_a, "labels"_a,
           "Samples of whole lines: (lines, samples, ids, lengths, (line, column, reason) of the first bad one).")
      .def("take_labels", &take_numbers<&SampleParser::take_labels>, "field"_a, "values"_a, "valid"_a.none(),
           "labels"_a, "bad"_a, "Labels from an array; marks bad lines, returns the first.")
      .def("take_dense", &take_numbers<&SampleParser::take_dense>, "field"_a, "values"_a, "valid"_a.none(), "dense"_a,
           "bad"_a, "A dense feature from an array; marks bad lines, returns the first.")
      .def("take_texts", &take_texts, "field"_a, "offsets"_a, "text"_a, "valid"_a.none(), "bags"_a.none(), "bad"_a,
           "(ids, lengths, first bad line) of texts; those of a bag are bags[i]..bags[i + 1].")
      .def("take_wholes", &take_wholes, "field"_a, "values"_a, "valid"_a.none(), "bags"_a.none(), "bad"_a,
           "(ids, lengths, first bad line) of whole numbers.");
}

}  // namespace regrow::bindings
