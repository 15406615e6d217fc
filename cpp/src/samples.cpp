#include "regrow/samples.hpp"

#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "text_fields.hpp"

namespace regrow {
namespace {

// Fields of numbers may have spaces around them.
std::span<const char> trim(std::span<const char> field) {
  while (!field.empty() && field.front() == ' ') field = field.subspan(1);
  while (!field.empty() && field.back() == ' ') field = field.first(field.size() - 1);
  return field;
}

bool is_nan(std::span<const char> field) {
  constexpr char nan[] = "nan";
  if (field.size() != 3) return false;
  for (size_t i = 0; i < 3; ++i)
    if ((field[i] | 0x20) != nan[i]) return false;
  return true;
}

float transform(const Column& column, double x) {
  if (!column.log1p) return static_cast<float>(x);
  if (x <= 0) return 0.0f;
  const auto whole = static_cast<int64_t>(std::min(x, 1e15));
  return static_cast<double>(whole) == x ? log1p_whole(whole) : static_cast<float>(std::log1p(x));
}

// Which characters a number has at all: no "inf", no hexadecimal digits.
bool is_decimal(std::span<const char> digits) {
  bool any = false;
  for (const char c : digits) {
    any = any || (c >= '0' && c <= '9');
    if (!((c >= '0' && c <= '9') || c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-')) return false;
  }
  return any;
}

// Any decimal number, rounded to the nearest double.
bool parse_number(std::span<const char> field, double& x, std::string& reason) {
  auto digits = field;
  if (!digits.empty() && digits[0] == '+') digits = digits.subspan(1);
  const bool sign_twice = digits.size() != field.size() && !digits.empty() && digits[0] == '-';
  if (is_decimal(digits) && !sign_twice) {
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), x);
    if (error == std::errc::result_out_of_range) {
      reason = quoted(field) + " is too large or too small";
      return false;
    }
    if (error == std::errc() && stop == digits.data() + digits.size()) return true;
  }
  reason = quoted(field) + " is not a number";
  return false;
}

constexpr double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                             1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

// The usual case in one pass: a sign, at most 15 digits, perhaps a point. Then digits and power of ten are exact, and
// one division rounds once. Returns where it stopped, or null if this is not such a number.
const char* scan_number(const char* next, const char* end, double& x) {
  const bool negative = next != end && *next == '-';
  if (negative) ++next;
  uint64_t digits = 0;
  const char* const begin = next;
  while (next != end && static_cast<unsigned char>(*next - '0') < 10)
    digits = digits * 10 + static_cast<uint64_t>(*next++ - '0');
  auto count = next - begin;
  ptrdiff_t fraction = 0;
  if (next != end && *next == '.' && count > 0) {
    const char* const point = ++next;
    while (next != end && static_cast<unsigned char>(*next - '0') < 10)
      digits = digits * 10 + static_cast<uint64_t>(*next++ - '0');
    fraction = next - point;
    count += fraction;
  }
  if (count == 0 || count > 15) return nullptr;
  const double value = static_cast<double>(digits) / powers[fraction];
  x = negative ? -value : value;
  return next;
}

void note(BadLine& first, std::span<uint8_t> bad, size_t line, size_t column, std::string&& reason) {
  bad[line] = 1;
  if (first.line < 0) first = {static_cast<int64_t>(line), static_cast<int64_t>(column), std::move(reason)};
  reason.clear();
}

void check_size(const char* name, size_t size, size_t expected) {
  if (size != expected)
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(expected) + " entries, not " +
                                std::to_string(size));
}

void check_valid(std::span<const uint8_t> valid, size_t values) {
  if (!valid.empty()) check_size("valid", valid.size(), values);
}

// Runs over the values of each line: of its bag, or its only one.
template <typename Add>
ColumnIds collect(size_t field, const IdRule& rule, size_t values, std::span<const uint8_t> valid,
                  std::optional<std::span<const int64_t>> bags, std::span<uint8_t> bad, const Add& add) {
  check_valid(valid, values);
  check_size("bad", bad.size(), bags ? bags->size() - 1 : values);
  ColumnIds made;
  made.values.reserve(values);
  made.lengths.reserve(bad.size());
  std::string reason;
  for (size_t line = 0; line < bad.size(); ++line) {
    const int64_t from = bags ? (*bags)[line] : static_cast<int64_t>(line);
    const int64_t to = bags ? (*bags)[line + 1] : from + 1;
    if (from < 0 || from > to || to > static_cast<int64_t>(values))
      throw std::invalid_argument("bags must be offsets into the values, in order");
    const size_t before = made.values.size();
    bool good = true;
    for (auto i = static_cast<size_t>(from); good && i < static_cast<size_t>(to); ++i)
      if (valid.empty() || valid[i]) good = add(i, made.values, reason);
    if (!good) {
      made.values.resize(before);
      note(made.bad, bad, line, field, std::move(reason));
    } else if (made.values.size() == before) {
      rule.add_missing(made.values);
    }
    made.lengths.push_back(static_cast<int32_t>(made.values.size() - before));
  }
  return made;
}

}  // namespace

uint64_t hash_text(std::span<const char> text) {
  uint64_t hash = 0x9e3779b97f4a7c15ULL ^ text.size() * 0xff51afd7ed558ccdULL;
  size_t at = 0;
  for (; at < text.size(); at += 8) {
    uint64_t word = 0;  // the bytes in this order, the first the lowest; the last word ends in zeros
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    hash = (hash ^ word) * 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return mix64(hash);
}

// ---- ids

void IdRule::set_words(std::span<const std::string> words) {
  auto made = std::make_shared<Words>();
  size_t bytes = 0;
  for (const std::string& word : words) bytes += word.size();
  made->text.reserve(bytes);  // views of it stay right
  int64_t row = 0;
  for (const std::string& word : words) {
    const size_t begin = made->text.size();
    made->text += word;
    if (!made->rows.emplace(std::string_view(made->text).substr(begin), ++row).second)
      throw std::invalid_argument("word " + std::to_string(row) + " comes twice");
  }
  words_ = std::move(made);
}

void IdRule::check() const {
  if (rows < 1) throw std::invalid_argument("rows must be at least 1");
  if (missing >= rows) throw std::invalid_argument("missing must be a row");
  if (kind == IdKind::hash && missing >= 0 && rows < 2) throw std::invalid_argument("a row is left for hashed values");
  if (kind == IdKind::vocabulary && !words_) throw std::invalid_argument("a vocabulary has words");
}

void IdRule::add_missing(std::vector<int64_t>& ids) const {
  if (missing >= 0) ids.push_back(missing);
}

bool IdRule::add_whole(int64_t value, std::vector<int64_t>& ids, std::string& reason) const {
  if (kind != IdKind::whole) {
    char text[24];
    const auto written = std::to_chars(text, text + sizeof text, value);
    return add_part({text, static_cast<size_t>(written.ptr - text)}, ids, reason);
  }
  if (value < 0 || value >= values) {
    reason = std::to_string(value) + " is not an id from 0 to " + std::to_string(values - 1);
    return false;
  }
  ids.push_back(value < rows ? value : value % rows);
  return true;
}

bool IdRule::add_part(std::span<const char> part, std::vector<int64_t>& ids, std::string& reason) const {
  if (part.empty()) return true;
  if (kind == IdKind::hash) {
    const int64_t others = rows - (missing >= 0 ? 1 : 0);
    auto id = static_cast<int64_t>(hash_text(part) % static_cast<uint64_t>(others));
    if (missing >= 0 && id >= missing) ++id;  // its row is for missing values alone
    ids.push_back(id);
    return true;
  }
  if (kind == IdKind::vocabulary) {
    const auto found = words_->rows.find(std::string_view(part.data(), part.size()));
    const int64_t row = found == words_->rows.end() ? 0 : found->second;
    ids.push_back(row < rows ? row : row % rows);
    return true;
  }
  const auto digits = trim(part);
  int64_t value = 0;
  if (digits.empty()) return true;
  return parse_whole(digits, value, reason) && add_whole(value, ids, reason);
}

bool IdRule::add(std::span<const char> field, std::vector<int64_t>& ids, std::string& reason) const {
  const size_t before = ids.size();
  if (separator < 0) {
    if (!add_part(field, ids, reason)) return false;
  } else {
    const char* next = field.data();
    const char* const end = next + field.size();
    while (next != end) {
      const void* found = std::memchr(next, separator, static_cast<size_t>(end - next));
      const char* const stop = found == nullptr ? end : static_cast<const char*>(found);
      if (!add_part({next, static_cast<size_t>(stop - next)}, ids, reason)) return false;
      next = stop == end ? end : stop + 1;
    }
  }
  if (ids.size() == before) add_missing(ids);
  return true;
}

// ---- lines

// One line, field by field. What a bad one has written is to be overwritten.
class SampleParser::Line {
 public:
  Line(SampleParser& parser, const char* begin, const char* end, float* dense, float& label)
      : parser_(parser), next_(begin), end_(end), dense_(dense), label_(label) {}

  bool parse() {
    if (next_ == end_ && parser_.columns_.size() > 1) return fail("the line is empty");
    for (field = 0; field < static_cast<int64_t>(parser_.columns_.size()); ++field) {
      if (next_ == nullptr) return miscount(field);
      if (!take(parser_.columns_[static_cast<size_t>(field)])) return false;
    }
    return next_ == nullptr || miscount(field + count_rest());
  }

  int64_t field = 0;
  std::string reason;

 private:
  bool fail(std::string why) {
    field = -1;
    reason = std::move(why);
    return false;
  }

  bool miscount(int64_t found) {
    return fail("the line has " + std::to_string(found) + (found == 1 ? " field" : " fields") + " instead of " +
                std::to_string(parser_.columns_.size()));
  }

  int64_t count_rest() {
    int64_t rest = 0;
    std::span<const char> value;
    for (; next_ != nullptr; ++rest)
      if (!find_field(value)) break;
    return rest;
  }

  bool take(const Column& column) {
    double number = 0;
    if (column.use == Use::dense || column.use == Use::label) {
      const char* const stop = scan_number(next_, end_, number);
      if (stop != nullptr && (stop == end_ || *stop == parser_.delimiter_)) {
        next_ = stop == end_ ? nullptr : stop + 1;
        return use_number(column, number);
      }
    }
    std::span<const char> value;
    if (!find_field(value)) return false;
    if (column.use == Use::none) return true;
    if (column.use == Use::ids) {
      auto& ids = parser_.ids_[column.index];
      const size_t before = ids.size();
      if (!column.rule.add(value, ids, reason)) return false;
      parser_.lengths_[column.index].push_back(static_cast<int32_t>(ids.size() - before));
      return true;
    }
    value = trim(value);
    if (value.empty() || is_nan(value)) return use_missing(column);
    return parse_number(value, number, reason) && use_number(column, number);
  }

  bool use_missing(const Column& column) {
    if (column.use == Use::label) {
      reason = "the label is missing";
      return false;
    }
    dense_[column.index] = column.missing;
    return true;
  }

  bool use_number(const Column& column, double number) {
    if (column.use == Use::label) return parser_.make_label(number, label_, reason);
    const float value = transform(column, number);
    if (!std::isfinite(value)) {
      reason = "the number does not fit 32 bits";
      return false;
    }
    dense_[column.index] = value;
    return true;
  }

  // The next field without its quotes. It may lie in `unquoted_`, until the next call.
  bool find_field(std::span<const char>& value) {
    if (next_ != end_ && *next_ == '"') return find_quoted(value);
    const char* stop = next_;
    while (stop != end_ && *stop != parser_.delimiter_) ++stop;
    value = {next_, static_cast<size_t>(stop - next_)};
    next_ = stop == end_ ? nullptr : stop + 1;
    return true;
  }

  bool find_quoted(std::span<const char>& value) {
    const char* from = next_ + 1;
    bool doubled = false;
    unquoted_.clear();
    while (true) {
      const auto* quote = static_cast<const char*>(std::memchr(from, '"', static_cast<size_t>(end_ - from)));
      if (quote == nullptr) {
        reason = "a field in quotes does not end on its line";
        return false;
      }
      if (quote + 1 != end_ && quote[1] == '"') {
        unquoted_.append(from, quote + 1);
        from = quote + 2;
        doubled = true;
        continue;
      }
      if (quote + 1 != end_ && quote[1] != parser_.delimiter_) {
        reason = "there is text after the quotes of a field";
        return false;
      }
      value = {from, static_cast<size_t>(quote - from)};
      if (doubled) value = unquoted_.append(from, quote);
      next_ = quote + 1 == end_ ? nullptr : quote + 2;
      return true;
    }
  }

  SampleParser& parser_;
  const char* next_;  // null once the last field was taken
  const char* end_;
  float* dense_;
  float& label_;
  std::string unquoted_;
};

SampleParser::SampleParser(size_t fields, char delimiter, std::optional<double> threshold)
    : columns_(fields), delimiter_(delimiter), threshold_(threshold) {
  if (fields == 0) throw std::invalid_argument("there must be a column");
}

void SampleParser::set_label(size_t field) { columns_.at(field).use = Use::label; }

void SampleParser::set_dense(size_t field, size_t index, float missing, bool log1p) {
  Column& column = columns_.at(field);
  column.use = Use::dense;
  column.index = index;
  column.missing = missing;
  column.log1p = log1p;
  dense_count_ = std::max(dense_count_, index + 1);
}

void SampleParser::set_ids(size_t field, size_t index, IdRule rule) {
  rule.check();
  Column& column = columns_.at(field);
  column.use = Use::ids;
  column.index = index;
  column.rule = std::move(rule);
  ids_.resize(std::max(ids_.size(), index + 1));
  lengths_.resize(ids_.size());
}

bool SampleParser::make_label(double value, float& label, std::string& reason) const {
  if (threshold_) {
    label = value >= *threshold_ ? 1.0f : 0.0f;
    return true;
  }
  if (value != 0 && value != 1) {
    reason = "the label is not 0 or 1";
    return false;
  }
  label = static_cast<float>(value);
  return true;
}

Samples SampleParser::parse(std::span<const char> text, bool skip_bad, std::span<float> dense,
                            std::span<float> labels) {
  check_size("dense", dense.size(), labels.size() * dense_count_);
  for (auto& ids : ids_) ids.clear();
  for (auto& lengths : lengths_) lengths.clear();
  std::vector<size_t> before(ids_.size());
  Samples made;
  const char* next = text.data();
  const char* const end = next + text.size();
  while (next != end && static_cast<size_t>(made.samples) < labels.size()) {
    const auto* newline = static_cast<const char*>(std::memchr(next, '\n', static_cast<size_t>(end - next)));
    const char* stop = newline == nullptr ? end : newline;
    const char* const following = newline == nullptr ? end : newline + 1;
    if (stop != next && stop[-1] == '\r') --stop;
    for (size_t index = 0; index < ids_.size(); ++index) before[index] = ids_[index].size();
    const auto sample = static_cast<size_t>(made.samples);
    Line line(*this, next, stop, dense.data() + sample * dense_count_, labels[sample]);
    if (line.parse()) {
      ++made.samples;
    } else {
      for (size_t index = 0; index < ids_.size(); ++index) {
        ids_[index].resize(before[index]);
        lengths_[index].resize(sample);
      }
      if (made.bad.line < 0) made.bad = {made.lines, line.field, std::move(line.reason)};
      if (!skip_bad) break;
    }
    ++made.lines;
    next = following;
  }
  bool single = true;
  size_t total = 0;
  for (size_t index = 0; index < ids_.size(); ++index) {
    total += ids_[index].size();
    for (const int32_t length : lengths_[index]) single = single && length == 1;
  }
  made.values.reserve(total);
  for (const auto& ids : ids_) made.values.insert(made.values.end(), ids.begin(), ids.end());
  if (!single)
    for (const auto& lengths : lengths_) made.lengths.insert(made.lengths.end(), lengths.begin(), lengths.end());
  return made;
}

// ---- arrays

const Column& SampleParser::column(size_t field, Use use) const {
  const Column& found = columns_.at(field);
  if (found.use != use) throw std::invalid_argument("column " + std::to_string(field) + " is used otherwise");
  return found;
}

BadLine SampleParser::take_labels(size_t field, std::span<const double> values, std::span<const uint8_t> valid,
                                  std::span<float> labels, std::span<uint8_t> bad) const {
  column(field, Use::label);
  check_valid(valid, values.size());
  check_size("labels", labels.size(), values.size());
  check_size("bad", bad.size(), values.size());
  BadLine first;
  std::string reason;
  for (size_t line = 0; line < values.size(); ++line) {
    const bool missing = (!valid.empty() && !valid[line]) || std::isnan(values[line]);
    if (missing) reason = "the label is missing";
    if (missing || !make_label(values[line], labels[line], reason)) note(first, bad, line, field, std::move(reason));
  }
  return first;
}

BadLine SampleParser::take_dense(size_t field, std::span<const double> values, std::span<const uint8_t> valid,
                                 std::span<float> dense, std::span<uint8_t> bad) const {
  const Column& own = column(field, Use::dense);
  check_valid(valid, values.size());
  check_size("dense", dense.size(), values.size() * dense_count_);
  check_size("bad", bad.size(), values.size());
  BadLine first;
  for (size_t line = 0; line < values.size(); ++line) {
    const bool missing = (!valid.empty() && !valid[line]) || std::isnan(values[line]);
    const float value = missing ? own.missing : transform(own, values[line]);
    dense[line * dense_count_ + own.index] = value;
    if (!std::isfinite(value)) note(first, bad, line, field, "the number does not fit 32 bits");
  }
  return first;
}

ColumnIds SampleParser::take_texts(size_t field, std::span<const int64_t> offsets, std::span<const char> text,
                                   std::span<const uint8_t> valid, std::optional<std::span<const int64_t>> bags,
                                   std::span<uint8_t> bad) const {
  const IdRule& rule = column(field, Use::ids).rule;
  if (offsets.empty() || (bags && bags->empty()))
    throw std::invalid_argument("offsets have one entry more than values");
  for (size_t i = 0; i + 1 < offsets.size(); ++i)
    if (offsets[i] < 0 || offsets[i] > offsets[i + 1] || offsets[i + 1] > static_cast<int64_t>(text.size()))
      throw std::invalid_argument("offsets must lie within the text, in order");
  const auto add = [&](size_t i, std::vector<int64_t>& ids, std::string& reason) {
    const auto value = text.subspan(static_cast<size_t>(offsets[i]), static_cast<size_t>(offsets[i + 1] - offsets[i]));
    // A list has its values apart already.
    return bags || rule.separator < 0 ? rule.add_part(value, ids, reason) : rule.add(value, ids, reason);
  };
  return collect(field, rule, offsets.size() - 1, valid, bags, bad, add);
}

ColumnIds SampleParser::take_wholes(size_t field, std::span<const int64_t> values, std::span<const uint8_t> valid,
                                    std::optional<std::span<const int64_t>> bags, std::span<uint8_t> bad) const {
  const IdRule& rule = column(field, Use::ids).rule;
  if (bags && bags->empty()) throw std::invalid_argument("bags have one entry more than lines");
  const auto add = [&](size_t i, std::vector<int64_t>& ids, std::string& reason) {
    return rule.add_whole(values[i], ids, reason);
  };
  return collect(field, rule, values.size(), valid, bags, bad, add);
}

}  // namespace regrow
