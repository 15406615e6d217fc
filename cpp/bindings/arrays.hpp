// From Python's arrays to spans: dtype, contiguity and device are checked here, with a text that names the
// argument. Sizes and values are checked by the code that receives the span.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace regrow::bindings {

namespace nb = nanobind;

using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

template <typename T>
constexpr const char* dtype_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, double>) return "float64";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, uint32_t>) return "uint32";
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, uint64_t>) return "uint64";
  return "bytes";
}

template <typename T, typename Array>
void check_array(const Array& array, const char* name) {
  if (array.dtype() != nb::dtype<T>())
    throw std::invalid_argument(std::string(name) + " must be an array of " + dtype_name<T>());
  int64_t expected = 1;
  for (size_t axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) > 1 && array.size() && array.stride(axis) != expected)
      throw std::invalid_argument(std::string(name) + " must be contiguous in C order");
    expected *= static_cast<int64_t>(array.shape(axis));
  }
  if (reinterpret_cast<uintptr_t>(array.data()) % alignof(T) != 0)
    throw std::invalid_argument(std::string(name) + " must be aligned to its elements of " + std::to_string(sizeof(T)) +
                                " bytes");
}

template <typename T>
std::span<const T> read(const Input& array, const char* name) {
  check_array<T>(array, name);
  return {static_cast<const T*>(array.data()), array.size()};
}

template <typename T>
std::span<T> write(const Output& array, const char* name) {
  check_array<T>(array, name);
  return {static_cast<T*>(array.data()), array.size()};
}

// A NumPy array that owns a copy.
template <typename T>
nb::ndarray<nb::numpy, T> copied(std::span<const T> data) {
  T* copy = new T[data.size()];
  nb::capsule owner(copy, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
  for (size_t i = 0; i < data.size(); ++i) copy[i] = data[i];
  return nb::ndarray<nb::numpy, T>(copy, {data.size()}, owner);
}

// A NumPy array that owns the vector or buffer it is a view of.
template <typename Memory>
auto owned(Memory&& memory) {
  using Plain = std::remove_reference_t<Memory>;
  using T = std::remove_pointer_t<decltype(memory.data())>;
  static_assert(!std::is_lvalue_reference_v<Memory>, "hand it over");
  auto* kept = new Plain(std::move(memory));
  nb::capsule owner(kept, [](void* object) noexcept { delete static_cast<Plain*>(object); });
  return nb::ndarray<nb::numpy, T>(kept->data(), {kept->size()}, owner);
}

}  // namespace regrow::bindings
