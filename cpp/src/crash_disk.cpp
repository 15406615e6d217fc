#include "regrow/crash_disk.hpp"

#include <algorithm>
#include <cstring>

namespace regrow {
namespace {

void put(std::vector<std::byte>& file, uint64_t offset, const std::byte* data, size_t bytes) {
  if (file.size() < offset + bytes) file.resize(offset + bytes);
  std::memcpy(file.data() + offset, data, bytes);
}

}  // namespace

void CrashMedia::crash(std::mt19937_64& chance) {
  std::shuffle(unsynced_.begin(), unsynced_.end(), chance);
  for (const Write& write : unsynced_) {
    const uint64_t fate = chance() % 4;  // lost, whole, or torn in one of two ways
    if (fate == 0) continue;
    const size_t sectors = write.bytes.size() / sector_bytes;
    const uint64_t cut = chance() % (sectors + 1);
    for (size_t sector = 0; sector < sectors; ++sector) {
      const bool arrives = fate == 1 || (fate == 2 ? sector < cut : chance() % 2 == 0);
      const size_t at = sector * sector_bytes;
      if (arrives)
        put(durable_[static_cast<size_t>(write.file)], write.offset + at, write.bytes.data() + at, sector_bytes);
    }
  }
  unsynced_.clear();
  present_ = durable_;
}

bool CrashMedia::damage(DiskFile file, std::mt19937_64& chance) {
  auto& bytes = durable_[static_cast<size_t>(file)];
  if (bytes.empty()) return false;
  bytes[chance() % bytes.size()] ^= std::byte{1} << (chance() % 8);
  present_[static_cast<size_t>(file)] = bytes;
  return true;
}

void CrashDisk::read(std::span<const Piece> pieces) {
  for (const Piece& piece : pieces) {
    const auto& file = media_.present_[static_cast<size_t>(piece.file)];
    const uint64_t there = piece.offset < file.size() ? std::min<uint64_t>(piece.bytes, file.size() - piece.offset) : 0;
    if (there) std::memcpy(piece.data, file.data() + piece.offset, there);
    std::memset(piece.data + there, 0, piece.bytes - there);
  }
}

void CrashDisk::write(std::span<const Piece> pieces) {
  for (const Piece& piece : pieces) {
    if (writes_left_ && (*writes_left_)-- == 0) throw CrashNow();
    put(media_.present_[static_cast<size_t>(piece.file)], piece.offset, piece.data, piece.bytes);
    media_.unsynced_.push_back({piece.file, piece.offset, {piece.data, piece.data + piece.bytes}});
  }
}

void CrashDisk::sync(DiskFile file) {
  auto& unsynced = media_.unsynced_;
  for (const CrashMedia::Write& write : unsynced)
    if (write.file == file)
      put(media_.durable_[static_cast<size_t>(file)], write.offset, write.bytes.data(), write.bytes.size());
  std::erase_if(unsynced, [=](const CrashMedia::Write& write) { return write.file == file; });
}

const std::byte* CrashDisk::view(DiskFile file, uint64_t offset, size_t bytes) {
  const auto& there = media_.present_[static_cast<size_t>(file)];
  return is_mapped_ && offset + bytes <= there.size() ? there.data() + offset : nullptr;
}

uint64_t CrashDisk::file_bytes() const {
  uint64_t bytes = 0;
  for (const auto& file : media_.present_) bytes += file.size();
  return bytes;
}

}  // namespace regrow
