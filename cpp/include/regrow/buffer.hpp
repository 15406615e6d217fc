// Memory that is written before it is read; unlike std::vector it is not zeroed first.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace regrow {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size) : data_(std::make_unique_for_overwrite<T[]>(size)), size_(size) {}
  T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  T& operator[](size_t index) const { return data_[index]; }
  std::span<const T> span() const { return {data_.get(), size_}; }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
};

}  // namespace regrow
