// Initial values: a pure function of (seed, table, row, column), so any server can compute any initial row
// without a message. 24 random bits, uniform in [-bound, bound). The column part is in src/kernels.inl; the
// twin of both is initial_rows in src/regrow/core/twins.py.
#pragma once

#include <cstdint>

namespace regrow {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
constexpr uint64_t mixed64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

constexpr uint64_t table_key(uint64_t seed, uint64_t table) {
  return mixed64(mixed64(seed + 0x9e3779b97f4a7c15u) + table * 0x9e3779b97f4a7c15u);
}

constexpr uint64_t row_key(uint64_t table_key, uint64_t row) {
  return mixed64(table_key + (row + 1) * 0x9e3779b97f4a7c15u);
}

}  // namespace regrow
