// Memory for rows of one size, a frame each, and who leaves first.
//
// Frames are in one of two queues, by a note at its end. A note counts only if the frame was not noted since, so noting
// is one write at the end of an array, and a victim is found at its beginning. In `old` are rows in the order of their
// last use. In `young` are rows in the order in which they came, and they move to `old` when they are used after
// `patience` calls: by then their own pull and push are over, so it is somebody else who wants them. Young ones that
// were not wanted so long leave first. Most rows of a skewed stream are used once: in one queue they would push out
// what is used again, as each has to go all the way through it.
//
// That asks for a cache in which rows stay for much longer than `patience`. Where old ones leave sooner, all are old
// from the start, and it is the order of the last use.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "regrow/arena.hpp"

namespace regrow {

struct Frame {
  uint32_t slot;
  uint16_t table;
  uint16_t pins;         // tickets that hold it
  uint32_t stamp;        // of its last note, and which queue has it; 0: the frame is free
  uint32_t dirty_epoch;  // in which it changed since it was last written; 0: it is as it was written
};

class Frames {
 public:
  // Bytes a frame takes beside its record: itself, its notes in the queue, an entry of a map, a bit.
  static constexpr size_t bytes_beside = sizeof(Frame) + 2 * 8 + 13;

  enum class Queue { aged, old, young };                  // aged: the young ones that leave first
  static constexpr uint32_t stamp_mask = (1u << 31) - 1;  // of calls

  // `is_whole`: there is one for every row, each has its own, and who was used last does not matter. `patience`: calls
  // within which a row is pulled and pushed by whoever it came for. 0: the order is that of the last use.
  Frames(size_t stride, size_t count, bool is_whole, uint32_t patience)
      : stride_(stride),
        is_whole_(is_whole),
        patience_asked_(patience),
        arena_(stride * count * sizeof(float)),
        frames_(count),
        bits_(is_whole ? 0 : count / 64 + 1) {
    if (!is_whole) old_.all.reserve(2 * count + notes_spare);
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
  // Whether rows that come are on probation: only then does it matter which of them were here before.
  bool is_patient() const { return patience_ > 0; }
  // A row came to a frame, in the call `now`. `is_known`: it was here lately, and left too soon.
  void enter(uint32_t frame, uint32_t now, bool is_known) {
    if (!is_whole_) note(frame, now, is_patient() && !is_known ? 0 : old_bit);
  }
  void use(uint32_t frame, uint32_t now) {
    if (is_whole_) return;
    const uint32_t stamp = frames_[frame].stamp;
    // The order of those that stay long need not be exact: most uses of most rows change nothing.
    const uint32_t calls = stamp & old_bit ? patience_ / 2 : patience_;
    if (calls_since(stamp, now) > calls) note(frame, now, old_bit);
  }
  // It could not leave: it is behind the others again.
  void stay(uint32_t frame, uint32_t now) { note(frame, now, frames_[frame].stamp & old_bit); }
  bool is_young(uint32_t frame) const { return !(frames_[frame].stamp & old_bit); }
  // The first frame of a queue, or nothing. Its note is gone: who does not give it back lets it stay. `soon` is told of
  // frames that will come next, so that it can prefetch what it takes to let go of them.
  template <typename Soon>
  std::optional<uint32_t> oldest(Queue queue, uint32_t now, Soon&& soon) {
    Notes& notes = queue == Queue::old ? old_ : young_;
    while (notes.first < notes.all.size()) {
      if (notes.first + 2 * notes_ahead < notes.all.size()) prefetch(notes.all[notes.first + 2 * notes_ahead].frame);
      if (notes.first + notes_ahead < notes.all.size() && counts(notes.all[notes.first + notes_ahead]))
        soon(notes.all[notes.first + notes_ahead].frame);
      const Note note = notes.all[notes.first];
      if (counts(note)) {
        const uint32_t calls = calls_since(note.stamp, now);
        if (queue == Queue::aged && calls <= patience_) return {};
        if (queue == Queue::old) patience_ = calls / stay_share >= patience_asked_ ? patience_asked_ : 0;
        ++notes.first;
        return note.frame;
      }
      ++notes.first;
    }
    return {};
  }
  size_t notes(Queue queue) const {
    const Notes& notes = queue == Queue::old ? old_ : young_;
    return notes.all.size() - notes.first;
  }
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
  static constexpr uint32_t old_bit = 1u << 31;
  // Rows have to stay for so many times `patience`. Too few: young rows take much of the cache. Too many: large caches
  // are treated as small ones.
  static constexpr uint32_t stay_share = 4;
  struct Note {
    uint32_t frame;
    uint32_t stamp;
  };
  struct Notes {
    std::vector<Note> all;
    size_t first = 0;
  };
  static uint32_t calls_since(uint32_t stamp, uint32_t now) { return (now - stamp) & stamp_mask; }
  void note(uint32_t frame, uint32_t now, uint32_t queue) {
    if (old_.all.size() + young_.all.size() >= 2 * frames_.size() + notes_spare) {
      forget_old_notes(old_);
      forget_old_notes(young_);
    }
    frames_[frame].stamp = now | queue;
    (queue ? old_ : young_).all.push_back({frame, now | queue});
  }
  bool counts(const Note& note) const { return frames_[note.frame].stamp == note.stamp; }
  // A frame has at most one note that counts, so at least half of both queues goes.
  void forget_old_notes(Notes& notes) {
    size_t kept = 0;
    for (size_t at = notes.first; at < notes.all.size(); ++at) {
      if (at + notes_ahead < notes.all.size()) prefetch(notes.all[at + notes_ahead].frame);
      const Note note = notes.all[at];
      if (counts(note)) notes.all[kept++] = note;
    }
    notes.all.resize(kept);
    notes.first = 0;
  }

  size_t stride_;
  bool is_whole_;
  uint32_t patience_asked_;
  uint32_t patience_ = 0;  // until old ones are seen to stay for long
  Arena arena_;
  std::vector<Frame> frames_;
  std::vector<uint64_t> bits_;
  std::vector<uint32_t> free_;
  size_t unused_ = 0;  // frames from here on were never taken: their memory was never touched
  Notes old_, young_;
};

}  // namespace regrow
