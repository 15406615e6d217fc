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

  Frames(size_t stride, size_t count)
      : stride_(stride), arena_(stride * count * sizeof(float)), frames_(count), bits_(count / 64 + 1) {
    notes_.reserve(2 * count + notes_spare);
  }

  size_t stride() const { return stride_; }
  size_t count() const { return frames_.size(); }
  size_t free() const { return free_.size() + (frames_.size() - unused_); }
  size_t bytes() const { return arena_.bytes() + frames_.size() * bytes_beside; }
  float* base() const { return reinterpret_cast<float*>(arena_.data()); }
  float* record(uint32_t frame) const { return base() + frame * stride_; }
  Frame& at(uint32_t frame) { return frames_[frame]; }
  void prefetch(uint32_t frame) const { __builtin_prefetch(&frames_[frame], 1); }
  uint64_t* bits() { return bits_.data(); }  // kernels mark what they change; nobody reads it

  uint32_t take(uint16_t table, uint32_t slot) {
    const uint32_t frame = free_.empty() ? static_cast<uint32_t>(unused_++) : free_.back();
    if (!free_.empty()) free_.pop_back();
    frames_[frame] = {slot, table, 0, 0, 0};
    return frame;
  }
  void give_back(uint32_t frame) {
    frames_[frame] = {};
    free_.push_back(frame);
  }
  void use(uint32_t frame, uint32_t stamp) {
    if (frames_[frame].stamp == stamp) return;
    frames_[frame].stamp = stamp;
    note(frame);
  }
  void note(uint32_t frame) {
    if (notes_.size() >= 2 * frames_.size() + notes_spare) forget_old_notes();
    notes_.push_back({frame, frames_[frame].stamp});
  }
  // The frame that was not used for longest, or nothing. Its note is gone: who does not give it back notes it again.
  std::optional<uint32_t> oldest() {
    while (first_ < notes_.size()) {
      const Note note = notes_[first_++];
      if (frames_[note.frame].stamp == note.stamp && note.stamp) return note.frame;
    }
    return {};
  }
  size_t notes() const { return notes_.size() - first_; }

 private:
  static constexpr size_t notes_spare = 64;
  struct Note {
    uint32_t frame;
    uint32_t stamp;
  };
  // A frame has at most one note that counts, so at least half of the queue goes.
  void forget_old_notes() {
    size_t kept = 0;
    for (size_t at = first_; at < notes_.size(); ++at) {
      const Note note = notes_[at];
      if (note.stamp && frames_[note.frame].stamp == note.stamp) notes_[kept++] = note;
    }
    notes_.resize(kept);
    first_ = 0;
  }

  size_t stride_;
  Arena arena_;
  std::vector<Frame> frames_;
  std::vector<uint64_t> bits_;
  std::vector<uint32_t> free_;
  size_t unused_ = 0;  // frames from here on were never taken: their memory was never touched
  std::vector<Note> notes_;
  size_t first_ = 0;
};

}  // namespace regrow
