// What a tiered store must know before it looks at anything else: the small file `state`, which is there twice. Each
// copy has a checksum; one is written and synced before the other is touched, so a crash spoils at most one, and so
// does damage. See docs/tiered.md for the order of all writes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "regrow/disk.hpp"

namespace regrow {

// Rows on disk are not what was written.
class StoreDamaged : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The device has no room for what has to be written.
class StoreFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A place in the log as it grows: the segment by its number in the order of writing, and the bytes in it.
struct LogPosition {
  uint64_t sequence = 0;
  uint64_t offset = 0;
  auto operator<=>(const LogPosition&) const = default;
};

// A life of the store, from when it was built until it ended in whatever way. What it wrote counts up to the epoch at
// which it was left behind, and as far as the log is known to be durable.
struct Incarnation {
  uint64_t number = 1;
  uint64_t epoch_end = 0;
  LogPosition log_end;
};

struct TierState {
  uint64_t fingerprint = 0;  // of the job: another one's files are refused
  uint64_t segment_bytes = 0;
  uint64_t page_bytes = 0;
  uint64_t committed = 0;  // all servers have it
  uint64_t complete = 0;   // this one has it
  uint64_t tail = 1;       // the first segment that is in use
  // The last is the present one; its log_end is what is durable of it. Of older ones, those the log still has.
  std::vector<Incarnation> incarnations;
};

inline constexpr uint64_t state_copy_bytes = 1 << 16;
inline constexpr uint32_t incarnations_max = UINT16_MAX;  // entries of the log have 16 bits for it

AlignedBytes encode_state(const TierState& state, uint64_t version);
// The newer of the two copies, and its version; nothing if neither was ever written. StoreDamaged if both are spoiled.
struct FoundState {
  TierState state;
  uint64_t version;
};
std::optional<FoundState> read_state(Disk& disk);

}  // namespace regrow
