// Where a tiered store keeps its bytes: three files that can be read, written and synced, in whole blocks. Two forms:
// files of a directory, and memory that forgets at a crash whatever was not synced (crash_disk.hpp). Nothing here knows
// what the bytes mean. All methods may be called by several threads at once; who writes what another reads keeps
// them apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>

namespace regrow {

enum class DiskFile : int { state, log, home };
inline constexpr size_t disk_file_count = 3;
inline constexpr const char* disk_file_names[disk_file_count] = {"state", "log", "home"};

// Bytes that a device writes whole or not at all. Pages are torn at multiples of it, never within.
inline constexpr size_t sector_bytes = 512;

// Offset, address and length are multiples of Disk::block_bytes().
struct Piece {
  DiskFile file;
  uint64_t offset;
  std::byte* data;
  size_t bytes;
};

// A call of the system that failed.
class DiskError : public std::runtime_error {
 public:
  DiskError(int code, const std::string& message) : std::runtime_error(message), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// Memory that a device can read from and write to.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
    if (!data_) throw std::bad_alloc();
  }
  std::byte* data() const { return data_.get(); }
  size_t size() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t bytes_ = 0;
};

class Disk {
 public:
  virtual ~Disk() = default;
  virtual size_t block_bytes() const = 0;  // a power of two, at least a sector
  // All pieces at once, in any order; returns when the last is done. What was never written is zeros. DiskError.
  virtual void read(std::span<const Piece> pieces) = 0;
  virtual void write(std::span<const Piece> pieces) = 0;
  virtual void sync(DiskFile file) = 0;  // after it, all that was written to the file survives
  // Bytes where they are, if the file is mapped and has them; null: they have to be read. For one thread, and until its
  // next call. What is written meanwhile may be seen, or not.
  virtual const std::byte* view(DiskFile, uint64_t /*offset*/, size_t /*bytes*/) { return nullptr; }
  virtual bool is_mapped() const { return false; }
  virtual uint64_t file_bytes() const = 0;
  virtual std::string description() const = 0;  // how it reads and writes, and why so
};

// The files of a directory, made if they are not there, emptied if `wipe`. `io`: direct (past the page cache, many
// reads at a time), mmap (rows are copied from where the files are mapped), threads (through the page cache, by a few
// threads), auto (what the file system is for, and says why).
std::unique_ptr<Disk> open_files(const std::string& directory, const std::string& io, int threads, bool wipe);

}  // namespace regrow
