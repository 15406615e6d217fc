// What readers of text files have in common: fields as they may be shown, whole numbers, logarithms. Nothing here
// knows a format.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>

namespace regrow {

// A field as it may be shown: shortened, and nothing but printable ASCII.
inline std::string quoted(std::span<const char> field) {
  constexpr size_t excerpt_bytes_max = 24;
  constexpr char hex[] = "0123456789abcdef";
  std::string text = "'";
  for (const char c : field.first(std::min(field.size(), excerpt_bytes_max))) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      text += c;
    } else {
      text += "\\x";
      text += hex[byte >> 4];
      text += hex[byte & 15];
    }
  }
  return text + (field.size() > excerpt_bytes_max ? "...'" : "'");
}

// Digits, with a minus before them or not. False, with the reason, for anything else.
inline bool parse_whole(std::span<const char> value, int64_t& x, std::string& reason) {
  const bool negative = !value.empty() && value[0] == '-';
  const auto digits = value.subspan(negative ? 1 : 0);
  x = 0;
  if (digits.empty()) reason = quoted(value) + " is not an integer";
  for (const char c : digits) {
    if (c < '0' || c > '9') {
      reason = quoted(value) + " is not an integer";
      return false;
    }
    if (__builtin_mul_overflow(x, int64_t{10}, &x) || __builtin_add_overflow(x, int64_t{c - '0'}, &x)) {
      reason = quoted(value) + " does not fit 64 bits";
      return false;
    }
  }
  if (negative) x = -x;
  return !digits.empty();
}

// log(1 + x) of a whole number that is not negative. Most are small, and a logarithm costs as much as the rest of a
// field.
inline float log1p_whole(int64_t x) {
  constexpr int64_t table_size = 2048;
  static const auto table = [] {
    std::array<float, table_size> values{};
    for (int64_t each = 0; each < table_size; ++each)
      values[static_cast<size_t>(each)] = static_cast<float>(std::log1p(static_cast<double>(each)));
    return values;
  }();
  return x < table_size ? table[static_cast<size_t>(x)] : static_cast<float>(std::log1p(static_cast<double>(x)));
}

// Every bit of the result depends on every bit of the number.
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

}  // namespace regrow
