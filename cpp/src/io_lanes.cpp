#include "regrow/io_lanes.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <utility>

namespace regrow {

IoLanes::IoLanes(Disk& disk, bool threads)
    : disk_(disk), threads_(threads), event_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (event_fd_ < 0) throw DiskError(errno, "the system refused an event descriptor");
  for (State& lane : lanes_)
    if (threads_) lane.thread = std::thread([this, &lane] { serve(lane); });
}

IoLanes::~IoLanes() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (State& lane : lanes_) lane.bell.notify_all();
  for (State& lane : lanes_)
    if (lane.thread.joinable()) lane.thread.join();
  close(event_fd_);
}

uint64_t IoLanes::submit(Lane lane, std::vector<IoStep> steps) {
  State& state = at(lane);
  {
    std::lock_guard lock(mutex_);
    state.jobs.push_back({++state.last, std::move(steps)});
  }
  state.bell.notify_one();
  return state.last;
}

void IoLanes::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);  // full is as good as rung
}

void IoLanes::clear_fd() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_fd_, &count, sizeof count);
}

// The steps of a job are idempotent: one that failed half way is done again from its beginning.
bool IoLanes::carry_out(State& lane) {
  try {
    for (const IoStep& step : lane.jobs.front().steps) {
      if (step.kind == IoStep::Kind::read) disk_.read(step.pieces);
      if (step.kind == IoStep::Kind::write) disk_.write(step.pieces);
      if (step.kind == IoStep::Kind::sync) disk_.sync(step.file);
    }
    return true;
  } catch (const DiskError& error) {
    lane.text = error.what();
    lane.failed.store(error.code() ? error.code() : EIO, std::memory_order_release);
    return false;
  }
}

void IoLanes::serve(State& lane) {
  std::unique_lock lock(mutex_);
  for (;;) {
    lane.bell.wait(lock, [&] { return stopping_ || (!lane.jobs.empty() && !lane.failed.load()); });
    if (stopping_) return;
    lock.unlock();  // deques do not move what they hold, and only this thread takes from the front
    const bool fine = carry_out(lane);
    lock.lock();
    if (fine) {
      lane.done.store(lane.jobs.front().id, std::memory_order_release);
      lane.jobs.pop_front();
    }
    news_.notify_all();
    ring();
  }
}

std::string IoLanes::failure_text(Lane lane) {
  std::lock_guard lock(mutex_);
  return at(lane).text;
}

void IoLanes::retry(Lane lane) {
  {
    std::lock_guard lock(mutex_);
    at(lane).failed.store(0);
  }
  at(lane).bell.notify_one();
}

void IoLanes::skip(Lane lane) {
  {
    std::lock_guard lock(mutex_);
    State& state = at(lane);
    if (!state.failed.load()) return;
    state.done.store(state.jobs.front().id, std::memory_order_release);
    state.jobs.pop_front();
    state.failed.store(0);
  }
  at(lane).bell.notify_one();
}

void IoLanes::wait(Lane lane, uint64_t id) {
  State& state = at(lane);
  if (!threads_) {
    while (!is_done(lane, id) && !state.failed.load()) pump(lane, 1);
    return;
  }
  std::unique_lock lock(mutex_);
  news_.wait(lock, [&] { return state.done.load() >= id || state.failed.load(); });
}

void IoLanes::pump(Lane lane, size_t jobs) {
  State& state = at(lane);
  if (threads_) throw std::logic_error("lanes with threads are not pumped");
  for (; jobs && !state.jobs.empty() && !state.failed.load(); --jobs) {
    if (!carry_out(state)) return;
    state.done.store(state.jobs.front().id, std::memory_order_release);
    state.jobs.pop_front();
  }
}

}  // namespace regrow
