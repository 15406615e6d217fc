#include "regrow/fold.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "regrow/buffer.hpp"

namespace regrow {
namespace {

// Of a number, sorted by at a time. Too few: passes over all rows. Too many: counters that do not stay in the cache.
constexpr unsigned digit_bits = 11;
constexpr size_t digits = size_t{1} << digit_bits;

struct Key {
  uint32_t id;     // less the smallest one
  uint32_t order;  // of the row in all lists, one after the other
};

// By id; of equal ones the later stay behind the earlier.
void sort_keys(Buffer<Key>& keys, unsigned bits) {
  Buffer<Key> sorted(keys.size());
  for (unsigned shift = 0; shift < bits; shift += digit_bits) {
    const auto digit = [=](Key key) { return (key.id >> shift) & (digits - 1); };
    std::array<uint32_t, digits> next{};
    for (size_t i = 0; i < keys.size(); ++i) ++next[digit(keys[i])];
    uint32_t end = 0;
    for (uint32_t& count : next) end += std::exchange(count, end);
    for (size_t i = 0; i < keys.size(); ++i) sorted[next[digit(keys[i])]++] = keys[i];
    std::swap(keys, sorted);
  }
}

template <typename Copy>
void copy_rows(std::span<const std::span<const uint32_t>> lists, size_t width, std::span<const RowAt> places,
               uint32_t* out, Copy copy) {
  for (size_t i = 0; i < places.size(); ++i)
    copy(out + i * width, lists[places[i] >> 32].data() + (places[i] & UINT32_MAX) * width);
}

}  // namespace

std::vector<RowAt> newest_rows(std::span<const std::span<const uint32_t>> lists) {
  size_t rows = 0;
  uint32_t low = UINT32_MAX, high = 0;
  for (const auto list : lists) {
    rows += list.size();
    for (const uint32_t id : list) {
      low = std::min(low, id);
      high = std::max(high, id);
    }
  }
  if (rows > UINT32_MAX) throw std::invalid_argument("too many rows at once: " + std::to_string(rows));
  if (!rows) return {};
  Buffer<Key> keys(rows);
  Buffer<RowAt> at(rows);
  uint32_t order = 0;
  for (size_t list = 0; list < lists.size(); ++list)
    for (size_t row = 0; row < lists[list].size(); ++row, ++order) {
      keys[order] = {lists[list][row] - low, order};
      at[order] = RowAt{list} << 32 | row;
    }
  sort_keys(keys, static_cast<unsigned>(std::bit_width(high - low)));
  std::vector<RowAt> found;
  found.reserve(rows);
  for (size_t i = 0; i < rows; ++i)
    if (i + 1 == rows || keys[i].id != keys[i + 1].id) found.push_back(at[keys[i].order]);
  return found;
}

void gather_rows(std::span<const std::span<const uint32_t>> lists, size_t width, std::span<const RowAt> places,
                 std::span<uint32_t> out) {
  if (out.size() != places.size() * width)
    throw std::invalid_argument(std::to_string(places.size()) + " rows have " + std::to_string(places.size() * width) +
                                " words; out has " + std::to_string(out.size()));
  for (const RowAt place : places)
    if (place >> 32 >= lists.size() || ((place & UINT32_MAX) + 1) * width > lists[place >> 32].size())
      throw std::out_of_range("there is no row " + std::to_string(place & UINT32_MAX) + " in list " +
                              std::to_string(place >> 32));
  const auto fixed = [](auto words) {
    return [](uint32_t* to, const uint32_t* from) { std::memcpy(to, from, decltype(words)::value * sizeof(uint32_t)); };
  };
  // Of a few widths that are usual, the copy needs no call.
  switch (width) {
    case 1:
      return copy_rows(lists, width, places, out.data(), fixed(std::integral_constant<size_t, 1>()));
    case 16:
      return copy_rows(lists, width, places, out.data(), fixed(std::integral_constant<size_t, 16>()));
    case 32:
      return copy_rows(lists, width, places, out.data(), fixed(std::integral_constant<size_t, 32>()));
    default:
      return copy_rows(lists, width, places, out.data(),
                       [=](uint32_t* to, const uint32_t* from) { std::memcpy(to, from, width * sizeof(uint32_t)); });
  }
}

}  // namespace regrow
