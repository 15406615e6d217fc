// How a job is shared: the caller opens a door, rings a bell and starts on the tasks. Workers who come while
// the door is open count themselves in, take tasks, count themselves out. The caller shuts the door when no
// task is left and waits for those inside. A worker that comes late finds the door shut, and one that never
// comes (after a fork there are none) is never waited for.
#include "regrow/thread_pool.hpp"

#include <stdexcept>
#include <string>

namespace regrow {
namespace {

constexpr uint64_t door_open = uint64_t{1} << 31;
constexpr uint64_t door_inside = door_open - 1;
// Before it sleeps a worker looks for the next job for some tens of microseconds: the loops of one training
// step follow each other closely, and waking a sleeper costs more than a short loop does.
constexpr int looks_before_sleep = 1000;
constexpr int looks_before_yield = 4000;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  // Never destroyed: its threads may still be asleep when static objects are torn down.
  static ThreadPool* pool = new ThreadPool;
  return *pool;
}

void ThreadPool::resize(int threads) {
  if (threads < 1 || threads > threads_max)
    throw std::invalid_argument("threads must be between 1 and " + std::to_string(threads_max) + ", not " +
                                std::to_string(threads));
  std::lock_guard lock(mutex_);
  stop_all();
  for (int lane = 1; lane < threads; ++lane) threads_.emplace_back([this, lane] { serve(static_cast<size_t>(lane)); });
  size_ = threads;
}

void ThreadPool::stop_all() {
  stopping_ = true;
  bell_.fetch_add(1);
  bell_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  stopping_ = false;
  size_ = 1;
}

void ThreadPool::Job::work(size_t lane) {
  for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) call(body, task, lane);
}

void ThreadPool::run(Job& job) {
  job_ = &job;
  const uint64_t epoch = (door_.load(std::memory_order_relaxed) >> 32) + 1;
  door_.store(epoch << 32 | door_open, std::memory_order_release);
  bell_.fetch_add(1, std::memory_order_release);
  bell_.notify_all();
  job.work(0);
  door_.fetch_and(~door_open, std::memory_order_relaxed);
  for (int looks = 0; door_.load(std::memory_order_acquire) & door_inside; ++looks) {
    if (looks < looks_before_yield)
      pause_briefly();
    else
      std::this_thread::yield();
  }
  job_ = nullptr;
}

void ThreadPool::serve(size_t lane) {
  uint32_t heard = 0;
  for (;;) {
    uint32_t bell = bell_.load(std::memory_order_acquire);
    for (int looks = 0; bell == heard && looks < looks_before_sleep; ++looks) {
      pause_briefly();
      bell = bell_.load(std::memory_order_acquire);
    }
    if (bell == heard) {
      bell_.wait(heard, std::memory_order_acquire);
      continue;
    }
    heard = bell;
    if (stopping_) return;
    uint64_t door = door_.load(std::memory_order_acquire);
    while (door & door_open) {
      if (door_.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel)) {
        job_->work(lane);
        door_.fetch_sub(1, std::memory_order_release);
        break;
      }
    }
  }
}

}  // namespace regrow
