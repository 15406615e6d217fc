#include "regrow/tier_log.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "regrow/crc32c.hpp"

namespace regrow {
namespace {

constexpr uint64_t segment_magic = 0x31474553574f5247u;

void check_order(bool fine, const char* text) {
  if (!fine) throw std::logic_error(std::string("the log: ") + text);
}

}  // namespace

uint32_t entry_checksum(const LogHeader& header, const void* record, size_t bytes) {
  const auto* head = reinterpret_cast<const uint8_t*>(&header) + sizeof header.crc;
  const uint32_t crc = crc32c({head, sizeof header - sizeof header.crc});
  return crc32c({static_cast<const uint8_t*>(record), bytes}, crc);
}

void write_segment_head(std::byte* block, uint64_t fingerprint, uint64_t incarnation, uint64_t sequence) {
  uint64_t words[5] = {0, segment_magic, fingerprint, incarnation, sequence};
  words[0] = crc32c({reinterpret_cast<const uint8_t*>(words + 1), sizeof words - sizeof words[0]});
  std::memcpy(block, words, sizeof words);
}

std::optional<SegmentHead> read_segment_head(const std::byte* block, uint64_t fingerprint) {
  uint64_t words[5];
  std::memcpy(words, block, sizeof words);
  const uint32_t crc = crc32c({reinterpret_cast<const uint8_t*>(words + 1), sizeof words - sizeof words[0]});
  if (words[0] != crc || words[1] != segment_magic || words[2] != fingerprint) return {};
  return SegmentHead{words[3], words[4]};
}

std::optional<LogEntry> LogScan::next() {
  while (at_ + sizeof(LogHeader) <= segment_.size()) {
    LogEntry entry{};
    std::memcpy(&entry.header, segment_.data() + at_, sizeof(LogHeader));
    const LogHeader& header = entry.header;
    const size_t place = at_;
    const bool pads = header.table == padding_table;
    if (!pads && header.table >= strides_.size()) break;
    const size_t record_bytes = pads ? 0 : strides_[header.table] * sizeof(float);
    const size_t bytes = pads ? header.slot : sizeof header + record_bytes;
    if (bytes < sizeof header || bytes % place_bytes || bytes > segment_.size() - at_) break;
    entry.record = reinterpret_cast<const float*>(segment_.data() + at_ + sizeof header);
    entry.place = static_cast<uint32_t>((offset_ + place) / place_bytes);
    const bool fine = header.crc == entry_checksum(header, entry.record, record_bytes);
    if (!fine && pads) break;
    at_ += bytes;
    if (fine && !pads) return entry;
    if (!fine) damaged_.push_back({header.table, header.slot, offset_ + place, 0});
  }
  if (at_ < segment_.size()) {
    damaged_.push_back({0, 0, offset_ + at_, offset_ + segment_.size()});
    at_ = segment_.size();
  }
  return {};
}

void TierLog::begin(uint64_t incarnation, LogPosition end) {
  incarnation_ = incarnation;
  sequence_next_ = end.sequence + 1;
  std::sort(order_.begin(), order_.end(),
            [this](uint64_t a, uint64_t b) { return segments_[a].sequence < segments_[b].sequence; });
  for (uint64_t index = segments_.size(); index-- > 0;)
    if (!segments_[index].sequence) freed_.push_back(index);
}

void TierLog::adopt(uint64_t index, uint64_t sequence, uint64_t bytes, uint32_t epoch_max) {
  if (segments_.size() <= index) segments_.resize(index + 1);
  Segment& segment = segments_[index];
  segment.sequence = sequence;
  segment.bytes = segment.sent = bytes;
  segment.epoch_max = epoch_max;
  order_.push_back(index);
}

bool TierLog::has_room(size_t record_bytes) const {
  if (open_ && segments_[*open_].bytes + sizeof(LogHeader) + record_bytes <= settings_.segment_bytes) return true;
  return segments_free() > 0;
}

uint64_t TierLog::segments_free() const {
  const auto idle =
      std::count_if(freed_.begin(), freed_.end(), [this](uint64_t index) { return !segments_[index].readers; });
  return static_cast<uint64_t>(idle) +
         (settings_.segments_max - std::min<uint64_t>(settings_.segments_max, segments_.size()));
}

bool TierLog::take_segment() {
  const auto idle =
      std::find_if(freed_.rbegin(), freed_.rend(), [this](uint64_t index) { return !segments_[index].readers; });
  uint64_t index = segments_.size();
  if (idle != freed_.rend()) {
    index = *idle;
    freed_.erase(std::next(idle).base());
  } else if (segments_.size() < settings_.segments_max) {
    segments_.emplace_back();
  } else {
    return false;
  }
  Segment& segment = segments_[index];
  check_order(segment.sequence == 0, "a segment in use is written over");
  segment = {};
  segment.sequence = sequence_next_++;
  segment.memory = AlignedBytes(settings_.segment_bytes);
  std::memset(segment.memory.data(), 0, settings_.block_bytes);
  write_segment_head(segment.memory.data(), settings_.fingerprint, incarnation_, segment.sequence);
  segment.bytes = settings_.block_bytes;
  order_.push_back(index);
  buffered_.push_back(index);
  open_ = index;
  return true;
}

void TierLog::pad(Segment& segment, uint64_t bytes) {
  if (!bytes) return;
  std::byte* target = segment.memory.data() + segment.bytes;
  std::memset(target, 0, bytes);
  LogHeader header{0, static_cast<uint32_t>(bytes), 0, padding_table, static_cast<uint16_t>(incarnation_)};
  header.crc = entry_checksum(header, nullptr, 0);
  std::memcpy(target, &header, sizeof header);
  segment.bytes += bytes;
}

void TierLog::send(Segment& segment) {
  if (segment.sent == segment.bytes) return;
  const uint64_t index = static_cast<uint64_t>(&segment - segments_.data());
  IoStep step{IoStep::Kind::write};
  step.pieces.push_back({DiskFile::log, index * settings_.segment_bytes + segment.sent,
                         segment.memory.data() + segment.sent, segment.bytes - segment.sent});
  bytes_written_ += segment.bytes - segment.sent;
  segment.sent = segment.bytes;
  std::vector<IoStep> steps;
  steps.push_back(std::move(step));
  segment.last_write = lanes_.submit(Lane::writes, std::move(steps));
}

uint32_t TierLog::append(uint16_t table, uint32_t slot, uint32_t epoch, std::span<const float> record) {
  const size_t bytes = sizeof(LogHeader) + record.size_bytes();
  if (open_ && segments_[*open_].bytes + bytes > settings_.segment_bytes) {
    Segment& full = segments_[*open_];
    pad(full, settings_.segment_bytes - full.bytes);
    send(full);
    open_.reset();
  }
  if (!open_ && !take_segment()) throw StoreFull("the log has no room for another segment");
  Segment& segment = segments_[*open_];
  std::byte* target = segment.memory.data() + segment.bytes;
  LogHeader header{0, slot, epoch, table, static_cast<uint16_t>(incarnation_)};
  std::memcpy(target + sizeof header, record.data(), record.size_bytes());
  header.crc = entry_checksum(header, target + sizeof header, record.size_bytes());
  std::memcpy(target, &header, sizeof header);
  const uint64_t offset = *open_ * settings_.segment_bytes + segment.bytes;
  segment.bytes += bytes;
  segment.epoch_max = std::max(segment.epoch_max, epoch);
  bytes_appended_ += bytes;
  if (segment.bytes - segment.sent >= settings_.write_bytes) flush();
  return static_cast<uint32_t>(offset / place_bytes);
}

void TierLog::flush() {
  if (!open_) return;
  Segment& segment = segments_[*open_];
  if (segment.sent == segment.bytes) return;
  pad(segment, (settings_.block_bytes - segment.bytes % settings_.block_bytes) % settings_.block_bytes);
  send(segment);
}

LogPosition TierLog::end() const {
  if (order_.empty()) return {sequence_next_ - 1, 0};
  const Segment& last = segments_[order_.back()];
  return {last.sequence, last.bytes};
}

void TierLog::settle() {
  while (!buffered_.empty()) {
    const uint64_t index = buffered_.front();
    Segment& segment = segments_[index];
    if (open_ == index || segment.sent < segment.bytes || !lanes_.is_done(Lane::writes, segment.last_write)) return;
    segment.memory = {};
    buffered_.pop_front();
  }
}

const std::byte* TierLog::in_memory(uint32_t place) const {
  const Segment& segment = segments_[segment_of(place)];
  return segment.memory ? segment.memory.data() + offset_of(place) % settings_.segment_bytes : nullptr;
}

TierLog::Oldest TierLog::oldest(size_t number) const {
  const uint64_t index = order_[number];
  const Segment& segment = segments_[index];
  return {index, segment.sequence, segment.bytes, segment.epoch_max, !segment.memory};
}

void TierLog::free_oldest(size_t count) {
  for (; count; --count) {
    Segment& segment = segments_[order_.front()];
    check_order(!segment.memory, "a segment is freed before it was written");
    segment.sequence = 0;
    freed_.push_back(order_.front());
    order_.pop_front();
  }
}

uint64_t TierLog::bytes_unwritten() const {
  uint64_t bytes = 0;
  for (const uint64_t index : buffered_) bytes += segments_[index].bytes;
  return bytes;
}

}  // namespace regrow
