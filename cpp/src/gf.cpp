#include "regrow/gf.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"

namespace regrow {
namespace {

constexpr unsigned polynomial = 0x11d;

// exps[i] = 2^i, long enough that the sum of two logarithms needs no modulo.
struct Field {
  std::array<uint8_t, 510> exps{};
  std::array<uint16_t, 256> logs{};
  std::array<GfTable, 256> tables{};
};

constexpr uint8_t product_in(const Field& field, unsigned a, unsigned b) {
  return a && b ? field.exps[field.logs[a] + field.logs[b]] : 0;
}

constexpr Field made_field() {
  Field field;
  unsigned power = 1;
  for (unsigned i = 0; i < 255; ++i) {
    field.exps[i] = field.exps[i + 255] = static_cast<uint8_t>(power);
    field.logs[power] = static_cast<uint16_t>(i);
    power = power << 1 ^ (power & 128 ? polynomial : 0);
  }
  for (unsigned c = 0; c < 256; ++c) {
    field.tables[c].coefficient = static_cast<uint8_t>(c);
    for (unsigned half = 0; half < 16; ++half) {
      field.tables[c].low[half] = product_in(field, c, half);
      field.tables[c].high[half] = product_in(field, c, half << 4);
    }
  }
  return field;
}

constexpr Field field = made_field();

const GfTable& checked_table(int64_t coefficient) {
  if (coefficient < 0 || coefficient > 255)
    throw std::invalid_argument("coefficient must be between 0 and 255, not " + std::to_string(coefficient));
  return field.tables[static_cast<size_t>(coefficient)];
}

uint8_t* bytes_of(float* floats) { return reinterpret_cast<uint8_t*>(floats); }
const uint8_t* bytes_of(const float* floats) { return reinterpret_cast<const uint8_t*>(floats); }

}  // namespace

uint8_t gf_product(uint8_t a, uint8_t b) { return product_in(field, a, b); }

uint8_t gf_inverse(uint8_t a) { return a ? field.exps[255u - field.logs[a]] : 0; }

uint8_t gf_coefficient(uint32_t q, uint32_t member, uint32_t r) {
  if (q == 0 || member == 0) return 1;
  // 1 / (x_q + y_member) with x_q = q and y_member = r + member, over the entries that scale its row and column.
  const auto x = static_cast<uint8_t>(q);
  const auto y = static_cast<uint8_t>(r + member);
  const auto first = static_cast<uint8_t>(r);
  return gf_product(gf_product(y, x ^ first), gf_inverse(gf_product(x ^ y, first)));
}

bool gf_codable(int64_t k, int64_t r) { return k == 1 || r <= 1 || k + r <= 256; }

const GfTable& gf_table(uint8_t coefficient) { return field.tables[coefficient]; }

void gf_xor(std::span<float> target, std::span<const float> source, int64_t coefficient) {
  const GfTable& table = checked_table(coefficient);
  if (target.size() != source.size())
    throw std::invalid_argument("target has " + std::to_string(target.size()) + " floats; source has " +
                                std::to_string(source.size()));
  if (std::less<>()(target.data(), source.data() + source.size()) &&
      std::less<>()(source.data(), target.data() + target.size()))
    throw std::invalid_argument("target and source must not overlap");
  kernels().gf_xor(bytes_of(target.data()), bytes_of(source.data()), target.size_bytes(), table);
}

size_t xor_matching(std::span<const uint32_t> slots_sorted, std::span<float> records, int64_t floats,
                    std::span<const uint32_t> slots, std::span<const float> deltas, int64_t coefficient) {
  const GfTable& table = checked_table(coefficient);
  if (floats < 1 || floats > int64_t{1} << 32)
    throw std::invalid_argument("floats must be at least 1, not " + std::to_string(floats));
  const auto stride = static_cast<size_t>(floats);
  if (records.size() != slots_sorted.size() * stride || deltas.size() != slots.size() * stride)
    throw std::invalid_argument("records and deltas must have " + std::to_string(stride) + " floats per slot");
  if (std::adjacent_find(slots_sorted.begin(), slots_sorted.end(), std::greater_equal<>()) != slots_sorted.end())
    throw std::invalid_argument("slots_sorted must be strictly rising");
  const Kernels& kernel = kernels();
  size_t matches = 0;
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto found = std::lower_bound(slots_sorted.begin(), slots_sorted.end(), slots[i]);
    if (found == slots_sorted.end() || *found != slots[i]) continue;
    const auto index = static_cast<size_t>(found - slots_sorted.begin());
    kernel.gf_xor(bytes_of(records.data() + index * stride), bytes_of(deltas.data() + i * stride),
                  stride * sizeof(float), table);
    ++matches;
  }
  return matches;
}

}  // namespace regrow
