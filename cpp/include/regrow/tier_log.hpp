// The log of a tiered store: versions of rows, one behind the other, in segments. Only written at its end and freed at
// its beginning, in the order of segments; a segment that is free may lie anywhere in the file. What was appended can
// be read from memory until it is in the file. Here is where versions are; which of them count is TieredShard's to
// know.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "regrow/io_lanes.hpp"
#include "regrow/tier_state.hpp"

namespace regrow {

// In front of each record. Padding has a table of its own, and its bytes where others have the slot.
struct LogHeader {
  uint32_t crc;
  uint32_t slot;
  uint32_t epoch;
  uint16_t table;
  uint16_t incarnation;
};
static_assert(sizeof(LogHeader) == 16);
inline constexpr uint16_t padding_table = UINT16_MAX;
inline constexpr uint64_t place_bytes = 16;  // places in the log are counted in so many bytes
inline constexpr uint64_t log_bytes_most = place_bytes * UINT32_MAX;

struct LogSettings {
  uint64_t fingerprint = 0;
  uint64_t segment_bytes = 1 << 20;
  uint64_t block_bytes = sector_bytes;
  uint64_t segments_max = 0;
  uint64_t write_bytes = 1 << 18;  // so much is handed over at a time
};

// One version as a scan finds it.
struct LogEntry {
  LogHeader header;
  uint32_t place;
  const float* record;
};

class TierLog {
 public:
  TierLog(const LogSettings& settings, IoLanes& lanes) : settings_(settings), lanes_(lanes) {}

  // From now on it grows behind `end`; what was written so far is in the segments that adopt() named.
  void begin(uint64_t incarnation, LogPosition end);
  void adopt(uint64_t index, uint64_t sequence, uint64_t bytes, uint32_t epoch_max);

  bool has_room(size_t record_bytes) const;
  uint32_t append(uint16_t table, uint32_t slot, uint32_t epoch, std::span<const float> record);  // its place
  void flush();  // hands over all that was appended, with padding up to a block
  LogPosition end() const;
  void settle();  // forgets memory whose writes are done

  // Of a place: its record, if it is still in memory; else the piece of the file that has it, and where in the piece.
  const std::byte* in_memory(uint32_t place) const;
  uint64_t offset_of(uint32_t place) const { return uint64_t{place} * place_bytes; }
  uint32_t epoch_max_of(uint32_t place) const { return segments_[segment_of(place)].epoch_max; }
  uint64_t sequence_of(uint32_t place) const { return segments_[segment_of(place)].sequence; }
  void add_reader(uint32_t place) { ++segments_[segment_of(place)].readers; }
  void drop_reader(uint32_t place) { --segments_[segment_of(place)].readers; }

  // The oldest segments, for the cleaner.
  size_t used() const { return order_.size(); }
  struct Oldest {
    uint64_t index, sequence, bytes;
    uint32_t epoch_max;
    bool is_written;  // and nothing is appended to it any more
  };
  Oldest oldest(size_t number) const;
  bool is_place_in(uint32_t place, uint64_t index) const { return segment_of(place) == index; }
  // Frees the oldest `count` segments. Those that are still being read are reused later.
  void free_oldest(size_t count);

  uint64_t segment_bytes() const { return settings_.segment_bytes; }
  uint64_t bytes_appended() const { return bytes_appended_; }
  uint64_t bytes_written() const { return bytes_written_; }
  uint64_t bytes_unwritten() const;  // in memory, handed over or not
  uint64_t bytes_unsent() const { return open_ ? segments_[*open_].bytes - segments_[*open_].sent : 0; }
  uint64_t segments_in_file() const { return segments_.size(); }
  uint64_t segments_free() const;

 private:
  struct Segment {
    uint64_t sequence = 0;  // 0: free
    uint64_t bytes = 0;     // that have something in them
    uint64_t sent = 0;
    uint64_t last_write = 0;  // the job of the write lane
    uint32_t epoch_max = 0;
    uint32_t readers = 0;
    AlignedBytes memory;
  };
  size_t segment_of(uint32_t place) const { return offset_of(place) / settings_.segment_bytes; }
  bool take_segment();
  void send(Segment& segment);
  void pad(Segment& segment, uint64_t bytes);

  LogSettings settings_;
  IoLanes& lanes_;
  uint64_t incarnation_ = 0;
  uint64_t sequence_next_ = 1;
  std::vector<Segment> segments_;  // by their place in the file
  std::deque<uint64_t> order_;     // those in use, oldest first
  std::deque<uint64_t> buffered_;  // those with memory
  std::vector<uint64_t> freed_;    // to be used again, perhaps still read
  std::optional<uint64_t> open_;   // what is appended to
  uint64_t bytes_appended_ = 0, bytes_written_ = 0;
};

// The first block of a segment.
void write_segment_head(std::byte* block, uint64_t fingerprint, uint64_t incarnation, uint64_t sequence);
struct SegmentHead {
  uint64_t incarnation, sequence;
};
std::optional<SegmentHead> read_segment_head(const std::byte* block, uint64_t fingerprint);

// A version that is not what was written, as its own header names it; or all bytes from one on up to another.
struct LogDamage {
  uint32_t table, slot;
  uint64_t at, end;  // end: 0 for a single version
};

// Checks and gives the versions in `bytes` of a segment, which begin behind its head. strides[t]: floats of a record of
// table t. What is damaged is named in `damaged`, and left out.
class LogScan {
 public:
  LogScan(std::span<const std::byte> segment, uint64_t segment_offset, size_t head_bytes,
          std::span<const size_t> strides)
      : segment_(segment), offset_(segment_offset), at_(head_bytes), strides_(strides) {}
  std::optional<LogEntry> next();
  const std::vector<LogDamage>& damaged() const { return damaged_; }

 private:
  std::span<const std::byte> segment_;
  uint64_t offset_;
  size_t at_;
  std::span<const size_t> strides_;
  std::vector<LogDamage> damaged_;
};

uint32_t entry_checksum(const LogHeader& header, const void* record, size_t bytes);

}  // namespace regrow
