// The threads of this process that share the loops over rows. One pool for all; a caller that finds it busy
// does its loop alone, so calls from several Python threads never wait for each other here.
// Results never depend on the number of threads: tasks write disjoint rows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace regrow {

inline constexpr int threads_max = 256;

class ThreadPool {
 public:
  static ThreadPool& shared();  // lives until the process ends

  int size() const { return size_.load(std::memory_order_relaxed); }
  void resize(int threads);  // throws std::invalid_argument

  // Calls body(task, lane) for every task below `tasks`, in any order. Lanes are below threads_max and no two
  // threads share one at a time. The calling thread takes part; with one thread nothing else is involved.
  // body must not throw.
  template <typename Body>
  void parallel_for(size_t tasks, Body&& body) {
    if (tasks <= 1 || size() == 1 || !mutex_.try_lock()) {
      for (size_t task = 0; task < tasks; ++task) body(task, size_t{0});
      return;
    }
    std::lock_guard lock(mutex_, std::adopt_lock);
    using Plain = std::remove_reference_t<Body>;
    Job job;
    job.body = const_cast<void*>(static_cast<const void*>(&body));
    job.call = [](void* called, size_t task, size_t lane) { (*static_cast<Plain*>(called))(task, lane); };
    job.tasks = tasks;
    run(job);
  }

 private:
  struct Job {
    void* body;
    void (*call)(void* body, size_t task, size_t lane);
    size_t tasks;
    std::atomic<size_t> next{0};
    void work(size_t lane);
  };

  ThreadPool() = default;
  void run(Job& job);
  void serve(size_t lane);
  void stop_all();

  std::mutex mutex_;  // held while a job runs or the pool changes size
  std::atomic<int> size_{1};
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  std::atomic<uint32_t> bell_{0};  // rung for every job; sleepers wait on it
  std::atomic<uint64_t> door_{0};  // epoch << 32 | open << 31 | threads inside the job
  std::atomic<bool> stopping_{false};
};

}  // namespace regrow
