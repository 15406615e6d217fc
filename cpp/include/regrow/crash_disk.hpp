// A disk for tests, in memory: it keeps apart what was not synced, and at a crash any part of that is lost. It fails at
// a write that was chosen before, so that a process can be ended at every one of them.
#pragma once

#include <array>
#include <optional>
#include <random>
#include <vector>

#include "regrow/disk.hpp"

namespace regrow {

struct CrashNow {};  // thrown by the write at which the process ends

// What survives processes. One of them at a time has a CrashDisk of it.
class CrashMedia {
 public:
  // Unsynced writes reach the device in any order, each whole, torn at sectors, or not at all.
  void crash(std::mt19937_64& chance);
  // Flips one bit of what is there; false if the file is empty.
  bool damage(DiskFile file, std::mt19937_64& chance);
  size_t unsynced() const { return unsynced_.size(); }

 private:
  friend class CrashDisk;
  struct Write {
    DiskFile file;
    uint64_t offset;
    std::vector<std::byte> bytes;
  };
  std::array<std::vector<std::byte>, disk_file_count> durable_, present_;  // present_: with what was not synced
  std::vector<Write> unsynced_;
};

class CrashDisk : public Disk {
 public:
  // The process ends at write number `writes_left`; without one, never. `is_mapped`: as files that are.
  CrashDisk(CrashMedia& media, std::optional<uint64_t> writes_left, bool is_mapped)
      : media_(media), writes_left_(writes_left), is_mapped_(is_mapped) {}
  size_t block_bytes() const override { return sector_bytes; }
  void read(std::span<const Piece> pieces) override;
  void write(std::span<const Piece> pieces) override;
  void sync(DiskFile file) override;
  const std::byte* view(DiskFile file, uint64_t offset, size_t bytes) override;
  bool is_mapped() const override { return is_mapped_; }
  uint64_t file_bytes() const override;
  std::string description() const override { return "memory that forgets at a crash what was not synced"; }

 private:
  CrashMedia& media_;
  std::optional<uint64_t> writes_left_;
  bool is_mapped_;
};

}  // namespace regrow
