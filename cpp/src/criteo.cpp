#include "regrow/criteo.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "text_fields.hpp"

namespace regrow {
namespace {

constexpr int fields_min = 1 + criteo_integers + 1;  // fewer: the line was cut, or is something else
constexpr int hex_digits_max = 16;

constexpr std::array<int8_t, 256> hex_values = [] {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  for (int digit = 0; digit < 10; ++digit) values['0' + digit] = static_cast<int8_t>(digit);
  for (int digit = 10; digit < 16; ++digit)
    values['a' + digit - 10] = values['A' + digit - 10] = static_cast<int8_t>(digit);
  return values;
}();

// Reads one line. On failure `reason` is not empty and what was written is to be overwritten.
class LineParser {
 public:
  LineParser(const char* begin, const char* end, const CriteoOutput& output, int64_t sample)
      : next_(begin), end_(end), output_(output), sample_(sample) {}

  bool parse() {
    if (next_ == end_) return fail(0, "the line is empty");
    return parse_label() && parse_integers() && parse_categories();
  }

  int field = 0;
  std::string reason;

 private:
  bool fail(int at, std::string why) {
    field = at;
    reason = std::move(why);
    return false;
  }

  // The next field, up to a tab or the end of the line. False past the last field.
  bool take(std::span<const char>& value) {
    if (next_ == nullptr) return false;
    const char* stop = next_;
    while (stop != end_ && *stop != '\t') ++stop;
    value = {next_, static_cast<size_t>(stop - next_)};
    next_ = stop == end_ ? nullptr : stop + 1;
    ++field;
    return true;
  }

  bool too_few() {
    return fail(0, "the line has " + std::to_string(field) + " fields; a whole one has " +
                       std::to_string(criteo_fields) + ", and one without its empty last fields at least " +
                       std::to_string(fields_min));
  }

  bool parse_label() {
    std::span<const char> value;
    take(value);
    if (value.size() != 1 || (value[0] != '0' && value[0] != '1')) return fail(field, quoted(value) + " is not 0 or 1");
    output_.labels[sample_] = value[0] == '1' ? 1.0f : 0.0f;
    return true;
  }

  bool parse_integers() {
    float* dense = output_.dense.data() + sample_ * criteo_integers;
    std::span<const char> value;
    for (int index = 0; index < criteo_integers; ++index) {
      if (!take(value)) return too_few();
      int64_t x = 0;
      if (!value.empty() && !parse_whole(value, x, reason)) return false;
      dense[index] = log1p_whole(std::max<int64_t>(x, 0));
    }
    return true;
  }

  bool parse_categories() {
    std::span<const char> value;
    for (int index = 0; index < criteo_categories; ++index) {
      int64_t id = 0;
      if (take(value)) {
        if (!value.empty() && !parse_category(value, output_.rows[index], id)) return false;
      } else if (field < fields_min) {
        return too_few();
      }
      output_.ids[index * output_.capacity + sample_] = id;
    }
    if (next_ != nullptr) {
      const auto extra = std::count(next_, end_, '\t') + 1;
      return fail(criteo_fields + 1, "the line has " + std::to_string(criteo_fields + extra) + " fields instead of " +
                                         std::to_string(criteo_fields));
    }
    return true;
  }

  bool parse_category(std::span<const char> value, int64_t rows, int64_t& id) {
    if (value.size() > hex_digits_max)
      return fail(field, quoted(value) + " has more than " + std::to_string(hex_digits_max) + " hexadecimal digits");
    uint64_t category = 0;
    for (const char c : value) {
      const int digit = hex_values[static_cast<unsigned char>(c)];
      if (digit < 0) return fail(field, quoted(value) + " is not a hexadecimal number");
      category = category << 4 | static_cast<uint64_t>(digit);
    }
    id = criteo_id(category, rows);
    return true;
  }

  const char* next_;  // null once the last field was taken
  const char* end_;
  const CriteoOutput& output_;
  int64_t sample_;
};

void check(const CriteoOutput& output) {
  if (output.rows.size() != criteo_categories) throw std::invalid_argument("rows must have 26 sizes");
  for (const int64_t rows : output.rows)
    if (rows < 1) throw std::invalid_argument("rows must be at least 1");
  const auto capacity = static_cast<size_t>(output.capacity);
  if (output.dense.size() != capacity * criteo_integers) throw std::invalid_argument("dense must be [capacity, 13]");
  if (output.ids.size() != capacity * criteo_categories) throw std::invalid_argument("ids must be [26, capacity]");
}

}  // namespace

int64_t criteo_id(uint64_t category, int64_t rows) {
  if (rows == 1) return 0;
  // Categories are hashes already, but a poor one would favour some remainders: mix before dividing.
  return 1 + static_cast<int64_t>(mix64(category) % static_cast<uint64_t>(rows - 1));
}

CriteoProgress parse_criteo(std::span<const char> text, int64_t lines_max, bool final, bool skip_bad,
                            const CriteoOutput& output) {
  check(output);
  CriteoProgress done;
  while (done.lines < lines_max && done.samples < output.capacity) {
    const CriteoProgress line = skip_lines(text.subspan(done.bytes), 1, final);
    if (line.lines == 0) break;
    const char* begin = text.data() + done.bytes;
    const char* end = begin + line.bytes;
    if (end[-1] == '\n') --end;
    if (end != begin && end[-1] == '\r') --end;
    LineParser parser(begin, end, output, done.samples);
    if (parser.parse()) {
      ++done.samples;
    } else {
      if (done.error_line < 0) {
        done.error_line = done.lines;
        done.error_field = parser.field;
        done.error_reason = std::move(parser.reason);
      }
      if (!skip_bad) break;
    }
    ++done.lines;
    done.bytes += line.bytes;
  }
  return done;
}

CriteoProgress skip_lines(std::span<const char> text, int64_t lines_max, bool final) {
  CriteoProgress done;
  const char* next = text.data();
  const char* const end = next + text.size();
  while (done.lines < lines_max && next != end) {
    const void* newline = std::memchr(next, '\n', static_cast<size_t>(end - next));
    if (newline == nullptr && !final) break;
    next = newline == nullptr ? end : static_cast<const char*>(newline) + 1;
    ++done.lines;
  }
  done.bytes = next - text.data();
  return done;
}

}  // namespace regrow
