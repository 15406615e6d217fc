#include "regrow/tier_state.hpp"

#include <cstring>

#include "regrow/crc32c.hpp"

namespace regrow {
namespace {

constexpr uint64_t magic = 0x3153525749455254u;  // also the version of the format: another one has another number
constexpr size_t head_words = 10;
constexpr size_t incarnation_words = 4;
constexpr size_t spared_incarnations = (state_copy_bytes / sizeof(uint64_t) - head_words) / incarnation_words;

uint32_t checksum(std::span<const uint64_t> words) {
  return crc32c({reinterpret_cast<const uint8_t*>(words.data() + 1), (words.size() - 1) * sizeof(uint64_t)});
}

std::optional<FoundState> decode(std::span<const uint64_t> words) {
  if (words[1] != magic || words[9] > spared_incarnations) return {};
  const size_t used = head_words + words[9] * incarnation_words;
  if (words[0] != checksum(words.first(used))) return {};
  FoundState found{{}, words[2]};
  TierState& state = found.state;
  state.fingerprint = words[3];
  state.segment_bytes = words[4];
  state.page_bytes = words[5];
  state.committed = words[6];
  state.complete = words[7];
  state.tail = words[8];
  for (size_t at = head_words; at < used; at += incarnation_words)
    state.incarnations.push_back({words[at], words[at + 1], {words[at + 2], words[at + 3]}});
  return found;
}

}  // namespace

AlignedBytes encode_state(const TierState& state, uint64_t version) {
  if (state.incarnations.size() > spared_incarnations)
    throw StoreFull("the state has no room for " + std::to_string(state.incarnations.size()) + " incarnations");
  std::vector<uint64_t> words{0,
                              magic,
                              version,
                              state.fingerprint,
                              state.segment_bytes,
                              state.page_bytes,
                              state.committed,
                              state.complete,
                              state.tail,
                              state.incarnations.size()};
  for (const Incarnation& each : state.incarnations)
    words.insert(words.end(), {each.number, each.epoch_end, each.log_end.sequence, each.log_end.offset});
  words[0] = checksum(words);
  AlignedBytes bytes((words.size() * sizeof(uint64_t) + 4095) / 4096 * 4096);
  std::memset(bytes.data(), 0, bytes.size());
  std::memcpy(bytes.data(), words.data(), words.size() * sizeof(uint64_t));
  return bytes;
}

std::optional<FoundState> read_state(Disk& disk) {
  AlignedBytes bytes(2 * state_copy_bytes);
  const Piece all{DiskFile::state, 0, bytes.data(), bytes.size()};
  disk.read({&all, 1});
  std::optional<FoundState> newest;
  bool is_blank = true;
  for (size_t copy = 0; copy < 2; ++copy) {
    const std::byte* data = bytes.data() + copy * state_copy_bytes;
    std::vector<uint64_t> words(state_copy_bytes / sizeof(uint64_t));
    std::memcpy(words.data(), data, state_copy_bytes);
    for (size_t at = 0; at < head_words; ++at) is_blank &= words[at] == 0;
    const std::optional<FoundState> found = decode(words);
    if (found && (!newest || found->version > newest->version)) newest = found;
  }
  if (!newest && !is_blank) throw StoreDamaged("both copies of the state are damaged, or of another format");
  return newest;
}

}  // namespace regrow
