// Memory for rows of one size, a frame each, and who was used last. The order is that of the last use: each use is
// noted at the end of a queue, and a note counts only if the frame was not used since. So a use is one write at the end
// of an array, and a victim is found at its beginning.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "regrow/arena.hpp"

namespace regrow {

struct Frame {
  uint32_t slot;
  uint16_t table;
  uint16_t pins;         // tickets that hold it
  uint32_t stamp;        // of its last use; 0: the frame is free
  uint32_t dirty_epoch;  // in which it changed since it was last written; 0: it is as it was written
};

class Frames {
 public:
  // Bytes a frame takes beside its record: itself, its notes in the queue, an entry of a map, a bit.
  static constexpr size_t bytes_beside = sizeof(Frame) + 2 * 8 + 13;

  // `is_whole`: there is one for every row, each has its own, and who was used last does not matter.
  Frames(size_t stride, size_t count, bool is_whole)
      : stride_(stride),
        is_whole_(is_whole),
        arena_(stride * count * sizeof(float)),
        frames_(count),
        bits_(is_whole ? 0 : count / 64 + 1) {
    if (!is_whole) notes_.reserve(2 * count + notes_spare);
  }

  size_t stride() const { return stride_; }
  size_t count() const { return frames_.size(); }
  size_t free() const { return free_.size() + (frames_.size() - unused_); }
  bool is_whole() const { return is_whole_; }
  size_t bytes() const { return arena_.bytes() + frames_.size() * bytes_beside; }
  float* base() const { return reinterpret_cast<float*>(arena_.data()); }
  float* record(uint32_t frame) const { return base() + frame * stride_; }
  Frame& at(uint32_t frame) { return frames_[frame]; }
  void prefetch(uint32_t frame) const { __builtin_prefetch(&frames_[frame], 1); }
  uint64_t* bits() { return bits_.data(); }  // kernels mark what they change; nobody reads it. None if it is whole

  uint32_t take(uint16_t table, uint32_t slot) {
    const uint32_t frame = free_.empty() ? static_cast<uint32_t>(unused_++) : free_.back();
    if (!free_.empty()) free_.pop_back();
    frames_[frame] = {slot, table, 0, 0, 0};
    return frame;
  }
  void take_own(uint32_t frame, uint16_t table, uint32_t slot) {
    ++unused_;  // only counted: which ones are free, their rows know
    frames_[frame] = {slot, table, 0, 0, 0};
  }
  void give_back(uint32_t frame) {
    frames_[frame] = {};
    if (is_whole_)
      --unused_;
    else
      free_.push_back(frame);
  }
  void use(uint32_t frame, uint32_t stamp) {
    if (is_whole_ || frames_[frame].stamp == stamp) return;
    frames_[frame].stamp = stamp;
    note(frame);
  }
  void note(uint32_t frame) {
    if (notes_.size() >= 2 * frames_.size() + notes_spare) forget_old_notes();
    notes_.push_back({frame, frames_[frame].stamp});
  }
  // The frame that was not used for longest, or nothing. Its note is gone: who does not give it back notes it again.
  // `soon` is told of frames that will come next, so that it can prefetch what it takes to let go of them.
  template <typename Soon>
  std::optional<uint32_t> oldest(Soon&& soon) {
    while (first_ < notes_.size()) {
      if (first_ + 2 * notes_ahead < notes_.size()) prefetch(notes_[first_ + 2 * notes_ahead].frame);
      if (first_ + notes_ahead < notes_.size() && counts(notes_[first_ + notes_ahead]))
        soon(notes_[first_ + notes_ahead].frame);
      const Note note = notes_[first_++];
      if (counts(note)) return note.frame;
    }
    return {};
  }
  size_t notes() const { return notes_.size() - first_; }
  void prefetch_record(uint32_t frame) const {
    const auto* line = reinterpret_cast<const char*>(record(frame));
    for (size_t at = 0; at < stride_ * sizeof(float) && at < prefetch_bytes_max; at += 64)
      __builtin_prefetch(line + at, 1);
  }
  // The record of a frame that take() will give out after so many others.
  void prefetch_free(size_t ahead) const {
    if (ahead < free_.size()) prefetch_record(free_[free_.size() - 1 - ahead]);
  }

 private:
  static constexpr size_t prefetch_bytes_max = 256;
  static constexpr size_t notes_ahead = 24;  // most of them do not count any more
  static constexpr size_t notes_spare = 64;
  struct Note {
    uint32_t frame;
    uint32_t stamp;
  };
  bool counts(const Note& note) const { return note.stamp && frames_[note.frame].stamp == note.stamp; }
  // A frame has at most one note that counts, so at least half of the queue goes.
  void forget_old_notes() {
    size_t kept = 0;
    for (size_t at = first_; at < notes_.size(); ++at) {
      if (at + notes_ahead < notes_.size()) prefetch(notes_[at + notes_ahead].frame);
      const Note note = notes_[at];
      if (counts(note)) notes_[kept++] = note;
    }
    notes_.resize(kept);
    first_ = 0;
  }

  size_t stride_;
  bool is_whole_;
  Arena arena_;
  std::vector<Frame> frames_;
  std::vector<uint64_t> bits_;
  std::vector<uint32_t> free_;
  size_t unused_ = 0;  // frames from here on were never taken: their memory was never touched
  std::vector<Note> notes_;
  size_t first_ = 0;
};

}  // namespace regrow
