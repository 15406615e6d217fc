// Lines of Criteo's click logs: a label, 13 integers and 26 hexadecimal categories, separated by tabs, an empty
// field for a missing value. A line either becomes a sample or is refused with the field at fault; nothing is
// guessed. Files, compression and what a bad line means for the run are the caller's business.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace regrow {

inline constexpr int criteo_integers = 13;
inline constexpr int criteo_categories = 26;
inline constexpr int criteo_fields = 1 + criteo_integers + criteo_categories;

// Where samples go; `capacity` of them. Categories are feature-major: ids[category * capacity + sample].
struct CriteoOutput {
  std::span<const int64_t> rows;  // of the 26 tables, each at least 1
  std::span<float> dense;         // [capacity, 13]: log(1 + x), 0 when x is missing or negative
  std::span<int64_t> ids;         // [26, capacity]: see criteo_id
  std::span<float> labels;        // [capacity]
  int64_t capacity = 0;
};

struct CriteoProgress {
  int64_t lines = 0;    // taken from the text, good and bad
  int64_t samples = 0;  // written: the good ones
  int64_t bytes = 0;    // of those lines, newlines included
  // The first bad line: its number among these (from 0), its field (from 1; 0 when it is the line as a whole) and
  // what is wrong with it.
  int64_t error_line = -1;
  int error_field = 0;
  std::string error_reason;
};

// A category's row: 0 when missing, else one of the others by hash. The hash is fixed: rows learned by one run mean
// the same in the next.
int64_t criteo_id(uint64_t category, int64_t rows);

// Reads up to `lines_max` whole lines, but no more than there is room for. The last line may lack its newline when
// `final`; otherwise it is left for the next call. Lines end in LF or CRLF. Empty fields at the end of a line may be
// missing altogether, down to the first category. Stops before the first bad line, or, if `skip_bad`, leaves it out.
CriteoProgress parse_criteo(std::span<const char> text, int64_t lines_max, bool final, bool skip_bad,
                            const CriteoOutput& output);

// The same as far as lines are concerned, without looking at them: how many, and how many bytes.
CriteoProgress skip_lines(std::span<const char> text, int64_t lines_max, bool final);

}  // namespace regrow
