// The background of a tiered store: two lanes of jobs, each done in order by one thread, so that reads somebody waits
// for do not stand behind a sync. A lane moves bytes and decides nothing. The order of jobs in the write lane is what
// the store's promises about crashes are made of.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "regrow/disk.hpp"

namespace regrow {

// One step of a job: pieces to read or write, all at once, or a file to sync.
struct IoStep {
  enum class Kind { read, write, sync } kind;
  std::vector<Piece> pieces = {};
  DiskFile file = DiskFile::log;
};

enum class Lane : int { reads, writes };

class IoLanes {
 public:
  // Without threads, jobs are done inside pump() and wait(): then a test decides when.
  IoLanes(Disk& disk, bool threads);
  IoLanes(const IoLanes&) = delete;
  ~IoLanes();  // ends with the job under way; what has not begun is left undone

  // The memory of its pieces must stay until the job is done or the lanes are gone. Ids of a lane rise.
  uint64_t submit(Lane lane, std::vector<IoStep> steps);
  bool is_done(Lane lane, uint64_t id) const { return at(lane).done.load(std::memory_order_acquire) >= id; }
  uint64_t done(Lane lane) const { return at(lane).done.load(std::memory_order_acquire); }
  bool is_idle(Lane lane) const { return is_done(lane, at(lane).last); }
  // A lane whose job failed waits in front of it. 0: it does not; else the code of the system, and the text.
  int failure(Lane lane) const { return at(lane).failed.load(std::memory_order_acquire); }
  std::string failure_text(Lane lane);
  void retry(Lane lane);                // the job that failed, once more
  void skip(Lane lane);                 // counts it as done, with failed bytes; for reads
  void wait(Lane lane, uint64_t id);    // until it is done or the lane fails
  void pump(Lane lane, size_t jobs);    // without threads: does up to so many jobs
  int fd() const { return event_fd_; }  // readable when some job was done since clear_fd()
  void clear_fd();
  void ring();  // makes it readable
  bool has_threads() const { return threads_; }

 private:
  struct Job {
    uint64_t id;
    std::vector<IoStep> steps;
  };
  struct State {
    std::deque<Job> jobs;
    uint64_t last = 0;
    std::atomic<uint64_t> done{0};
    std::atomic<int> failed{0};
    std::string text;
    std::condition_variable bell;  // of this lane alone: the other has nothing to wake for
    std::thread thread;
  };

  State& at(Lane lane) { return lanes_[static_cast<size_t>(lane)]; }
  const State& at(Lane lane) const { return lanes_[static_cast<size_t>(lane)]; }
  void serve(State& lane);
  bool carry_out(State& lane);  // the first job; false if it failed

  Disk& disk_;
  bool threads_;
  bool stopping_ = false;
  int event_fd_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::array<State, 2> lanes_;
};

}  // namespace regrow
