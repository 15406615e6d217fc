// From columns to samples: a label, dense values and ids of embedding rows, as a schema says. Columns come as lines of
// text with delimiters (CSV) or each as an array (Parquet, NumPy); the same value gives the same id either way. A
// sample is whole or refused, with the column at fault. Files, and what a bad line means for the run, are the caller's
// business.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace regrow {

// The hash is fixed: rows learned by one run mean the same in the next.
uint64_t hash_text(std::span<const char> text);

enum class IdKind { hash, whole, vocabulary };

// How the values of one column become ids.
class IdRule {
 public:
  IdKind kind = IdKind::hash;
  int64_t rows = 1;      // of the table; every id is below
  int64_t values = 1;    // whole numbers and words: so many, from 0; those from `rows` on are folded into the table
  int64_t missing = -1;  // the row of a value that is missing; -1: its bag is empty
  int separator = -1;    // between the values of a bag; -1: there is one

  // Words get the rows 1, 2, ... in this order; row 0 is for all others.
  void set_words(std::span<const std::string> words);
  void check() const;

  // Adds the ids of a field to a bag; false, with the reason, for one that is malformed.
  bool add(std::span<const char> field, std::vector<int64_t>& ids, std::string& reason) const;
  bool add_whole(int64_t value, std::vector<int64_t>& ids, std::string& reason) const;
  void add_missing(std::vector<int64_t>& ids) const;
  bool add_part(std::span<const char> part, std::vector<int64_t>& ids, std::string& reason) const;

 private:
  struct Words {
    std::string text;
    std::unordered_map<std::string_view, int64_t> rows;
  };
  std::shared_ptr<const Words> words_;
};

enum class Use { none, label, dense, ids };

struct Column {
  Use use = Use::none;
  size_t index = 0;    // among the dense features, or those with ids
  float missing = 0;   // dense
  bool log1p = false;  // dense: log(1 + x), 0 for a negative x
  IdRule rule;
};

// The first bad line: its number among those given (from 0), its column (from 0; -1: the line as a whole), and why.
struct BadLine {
  int64_t line = -1;
  int64_t column = -1;
  std::string reason;
};

struct Samples {
  int64_t lines = 0;             // taken, good and bad
  int64_t samples = 0;           // made
  std::vector<int64_t> values;   // ids, feature-major
  std::vector<int32_t> lengths;  // per bag, feature-major; empty if every bag has one id
  BadLine bad;
};

// One column's ids, and which lines have none because they are bad.
struct ColumnIds {
  std::vector<int64_t> values;
  std::vector<int32_t> lengths;
  BadLine bad;
};

class SampleParser {
 public:
  SampleParser(size_t fields, char delimiter, std::optional<double> threshold);

  void set_label(size_t field);
  void set_dense(size_t field, size_t index, float missing, bool log1p);
  void set_ids(size_t field, size_t index, IdRule rule);

  // Samples from whole lines, the last with or without its newline. Lines end in LF or CRLF; a field may stand in
  // quotes, which are doubled within, but must end on its line. Stops at the first bad line, or, if `skip_bad`, leaves
  // it out. `dense` is [labels.size(), dense features].
  Samples parse(std::span<const char> text, bool skip_bad, std::span<float> dense, std::span<float> labels);

  // The same from arrays. `valid` is empty if no value is missing; lines that are bad are set in `bad`.
  BadLine take_labels(size_t field, std::span<const double> values, std::span<const uint8_t> valid,
                      std::span<float> labels, std::span<uint8_t> bad) const;
  BadLine take_dense(size_t field, std::span<const double> values, std::span<const uint8_t> valid,
                     std::span<float> dense, std::span<uint8_t> bad) const;
  // Value i is text[offsets[i]..offsets[i + 1]). With `bags`, bag b has the values bags[b]..bags[b + 1]; without, each
  // value is a line's own.
  ColumnIds take_texts(size_t field, std::span<const int64_t> offsets, std::span<const char> text,
                       std::span<const uint8_t> valid, std::optional<std::span<const int64_t>> bags,
                       std::span<uint8_t> bad) const;
  ColumnIds take_wholes(size_t field, std::span<const int64_t> values, std::span<const uint8_t> valid,
                        std::optional<std::span<const int64_t>> bags, std::span<uint8_t> bad) const;

 private:
  class Line;
  const Column& column(size_t field, Use use) const;
  bool make_label(double value, float& label, std::string& reason) const;

  std::vector<Column> columns_;
  char delimiter_;
  std::optional<double> threshold_;
  size_t dense_count_ = 0;
  // Per feature, kept from call to call.
  std::vector<std::vector<int64_t>> ids_;
  std::vector<std::vector<int32_t>> lengths_;
};

}  // namespace regrow
