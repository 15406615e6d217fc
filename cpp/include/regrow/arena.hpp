// A block of zeroed memory for the records of one table, on huge pages where the system has them: a random
// row then costs one TLB entry per 2 MB instead of one per 4 kB.
#pragma once

#include <cstddef>
#include <new>
#include <string>

namespace regrow {

// Becomes MemoryError, with a text that says how much was asked for.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

class Arena {
 public:
  static size_t rounded(size_t bytes);  // what a request really takes

  // On small pages, the first touch of a page clears 4 kB instead of 2 MB. That is for rows which come back in any
  // order while others wait: 5000 of them in 512 MB took 29 ms instead of 3.9 s (6.18, a virtual machine).
  enum class Pages { huge, small };

  explicit Arena(size_t bytes, Pages pages = Pages::huge);
  Arena(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void touch_new()
      const;  // before anything is in it: takes all its memory now, while nobody waits, instead of page by page later
  void advise(Pages pages) const;  // from now on; the system puts small pages together when it has the time

 private:
  std::byte* data_;
  size_t bytes_;
};

}  // namespace regrow
