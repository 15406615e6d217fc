// The files of a directory as a Disk. Many reads at a time go to the kernel by one call of io_uring, where there is
// one; else a few threads share them. Reads and writes past the page cache (O_DIRECT) need whole blocks, which all of
// them are anyway.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "regrow/disk.hpp"

namespace regrow {
namespace {

constexpr unsigned ring_entries = 128;
constexpr size_t threads_most = 64;

[[noreturn]] void fail(int code, const std::string& what) { throw DiskError(code, what + ": " + std::strerror(code)); }

// One queue of the kernel, for one caller at a time: a batch is handed over, and all of it awaited.
class Ring {
 public:
  Ring() {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, ring_entries, &params));
    if (fd_ < 0) fail(errno, "io_uring is not there");
    sq_bytes_ = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    cq_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    sq_ = map(sq_bytes_, IORING_OFF_SQ_RING);
    cq_ = map(cq_bytes_, IORING_OFF_CQ_RING);
    sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqe_bytes_, IORING_OFF_SQES));
    sq_tail_ = at<uint32_t>(sq_, params.sq_off.tail);
    sq_mask_ = *at<uint32_t>(sq_, params.sq_off.ring_mask);
    sq_array_ = at<uint32_t>(sq_, params.sq_off.array);
    cq_head_ = at<uint32_t>(cq_, params.cq_off.head);
    cq_tail_ = at<uint32_t>(cq_, params.cq_off.tail);
    cq_mask_ = *at<uint32_t>(cq_, params.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(cq_, params.cq_off.cqes);
  }
  Ring(const Ring&) = delete;
  ~Ring() {
    if (sqes_) munmap(sqes_, sqe_bytes_);
    if (cq_) munmap(cq_, cq_bytes_);
    if (sq_) munmap(sq_, sq_bytes_);
    close(fd_);
  }

  // results[i]: bytes of piece i, or minus the error.
  void run(bool writes, std::span<const Piece> pieces, const std::array<int, disk_file_count>& fds, int* results) {
    for (size_t first = 0; first < pieces.size(); first += ring_entries) {
      const size_t count = std::min<size_t>(ring_entries, pieces.size() - first);
      uint32_t tail = *sq_tail_;
      for (size_t i = first; i < first + count; ++i, ++tail) {
        io_uring_sqe& sqe = sqes_[tail & sq_mask_];
        std::memset(&sqe, 0, sizeof sqe);
        sqe.opcode = writes ? IORING_OP_WRITE : IORING_OP_READ;
        sqe.fd = fds[static_cast<size_t>(pieces[i].file)];
        sqe.addr = reinterpret_cast<uint64_t>(pieces[i].data);
        sqe.len = static_cast<uint32_t>(pieces[i].bytes);
        sqe.off = pieces[i].offset;
        sqe.user_data = i;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
      }
      __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
      submit_and_wait(count, results);
    }
  }

 private:
  template <typename T>
  static T* at(std::byte* base, uint32_t offset) {
    return reinterpret_cast<T*>(base + offset);
  }
  std::byte* map(size_t bytes, off_t what) {
    void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    if (got == MAP_FAILED) fail(errno, "io_uring cannot be mapped");
    return static_cast<std::byte*>(got);
  }
  void submit_and_wait(size_t count, int* results) {
    size_t submitted = 0;
    for (size_t done = 0; done < count;) {
      const long got =
          syscall(SYS_io_uring_enter, fd_, count - submitted, count - done, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (got < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) fail(errno, "io_uring refused a batch");
      if (got > 0) submitted += static_cast<size_t>(got);
      uint32_t head = *cq_head_;
      for (; head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); ++head, ++done) {
        const io_uring_cqe& cqe = cqes_[head & cq_mask_];
        results[cqe.user_data] = cqe.res;
      }
      __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    }
  }

  int fd_ = -1;
  size_t sq_bytes_ = 0, cq_bytes_ = 0, sqe_bytes_ = 0;
  std::byte *sq_ = nullptr, *cq_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

bool has_ring() {
  try {
    Ring();
    return true;
  } catch (const DiskError&) {
    return false;
  }
}

enum class Way { ring_direct, threads_direct, threads };

class FileDisk : public Disk {
 public:
  FileDisk(const std::string& directory, Way way, size_t block_bytes, int threads, bool wipe, std::string description)
      : directory_(directory),
        way_(way),
        block_bytes_(block_bytes),
        threads_(static_cast<size_t>(std::clamp(threads, 1, static_cast<int>(threads_most)))),
        description_(std::move(description)) {
    fds_.fill(-1);
    for (size_t file = 0; file < disk_file_count; ++file) {
      // The state is small, and not always as long as a block of the device.
      const bool direct = way != Way::threads && static_cast<DiskFile>(file) != DiskFile::state;
      const std::string path = directory + "/" + disk_file_names[file];
      fds_[file] =
          open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (direct ? O_DIRECT : 0) | (wipe ? O_TRUNC : 0), 0644);
      if (fds_[file] < 0) {
        const int code = errno;
        close_all();
        fail(code, "cannot open " + path);
      }
    }
  }
  ~FileDisk() override { close_all(); }

  size_t block_bytes() const override { return block_bytes_; }
  void read(std::span<const Piece> pieces) override { move(false, pieces); }
  void write(std::span<const Piece> pieces) override { move(true, pieces); }
  void sync(DiskFile file) override {
    if (fdatasync(fds_[static_cast<size_t>(file)])) fail(errno, "cannot sync " + path(file));
  }
  uint64_t file_bytes() const override {
    uint64_t bytes = 0;
    for (const int fd : fds_) {
      struct stat found{};
      if (fstat(fd, &found) == 0) bytes += static_cast<uint64_t>(found.st_blocks) * 512;
    }
    return bytes;
  }
  std::string description() const override { return description_; }

 private:
  void close_all() {
    for (const int fd : fds_)
      if (fd >= 0) close(fd);
  }
  std::string path(DiskFile file) const { return directory_ + "/" + disk_file_names[static_cast<size_t>(file)]; }

  // What the system did at once of a piece, or minus the error.
  int move_some(bool writes, const Piece& piece, size_t from) const {
    const int fd = fds_[static_cast<size_t>(piece.file)];
    const auto offset = static_cast<off_t>(piece.offset + from);
    const ssize_t got = writes ? pwrite(fd, piece.data + from, piece.bytes - from, offset)
                               : pread(fd, piece.data + from, piece.bytes - from, offset);
    return got < 0 ? -errno : static_cast<int>(got);
  }

  // The rest of a piece. What lies behind the end of a file is zeros.
  void finish(bool writes, const Piece& piece, int result) const {
    size_t done = 0;
    for (;;) {
      if (result < 0 && result != -EINTR && result != -EAGAIN)
        fail(-result, std::string("cannot ") + (writes ? "write " : "read ") + path(piece.file) + " at byte " +
                          std::to_string(piece.offset + done));
      if (result > 0) done += static_cast<size_t>(result);
      if (done >= piece.bytes) return;
      const bool is_end = !writes && (result == 0 || done % block_bytes_);
      if (is_end) {
        std::memset(piece.data + done, 0, piece.bytes - done);
        return;
      }
      if (writes && result == 0) fail(EIO, "cannot write " + path(piece.file));
      result = move_some(writes, piece, done);
    }
  }

  void move(bool writes, std::span<const Piece> pieces) {
    if (pieces.size() < 3) {
      for (const Piece& piece : pieces) finish(writes, piece, move_some(writes, piece, 0));
      return;
    }
    std::vector<int> results(pieces.size());
    if (way_ == Way::ring_direct) {
      std::unique_ptr<Ring> ring = take_ring();
      ring->run(writes, pieces, fds_, results.data());
      std::lock_guard lock(mutex_);
      rings_.push_back(std::move(ring));
    } else {
      share(writes, pieces, results);
    }
    for (size_t i = 0; i < pieces.size(); ++i) finish(writes, pieces[i], results[i]);
  }

  std::unique_ptr<Ring> take_ring() {
    std::lock_guard lock(mutex_);
    if (rings_.empty()) return std::make_unique<Ring>();
    std::unique_ptr<Ring> ring = std::move(rings_.back());
    rings_.pop_back();
    return ring;
  }

  void share(bool writes, std::span<const Piece> pieces, std::vector<int>& results) const {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < pieces.size(); i = next++) results[i] = move_some(writes, pieces[i], 0);
    };
    std::vector<std::thread> helpers;
    const size_t count = std::min(threads_, pieces.size() / 8 + 1);
    for (size_t i = 1; i < count; ++i) helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers) helper.join();
  }

  std::string directory_;
  Way way_;
  size_t block_bytes_;
  size_t threads_;
  std::string description_;
  std::array<int, disk_file_count> fds_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Ring>> rings_;
};

// The smallest block that the file system reads and writes past the page cache; 0: it does not.
size_t probe_direct(const std::string& directory) {
  const std::string path = directory + "/probe";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0644);
  size_t found = 0;
  if (fd >= 0) {
    AlignedBytes bytes(8192);
    std::memset(bytes.data(), 0, bytes.size());
    const bool writes = pwrite(fd, bytes.data(), 8192, 0) == 8192;
    for (const size_t block : {size_t{4096}, size_t{512}})
      if (writes && pread(fd, bytes.data() + block, block, static_cast<off_t>(block)) == static_cast<ssize_t>(block))
        found = block;
    close(fd);
  }
  unlink(path.c_str());
  return found;
}

// Seconds that a batch of random reads takes in a file of the directory.
double measure(const std::string& directory, Way way, size_t block, int threads) {
  constexpr size_t pages = 1024, reads = 512;
  FileDisk disk(directory, way, block, threads, false, "");
  AlignedBytes bytes(pages * 4096);
  std::memset(bytes.data(), 1, bytes.size());
  const Piece all{DiskFile::log, 0, bytes.data(), bytes.size()};
  disk.write({&all, 1});
  disk.sync(DiskFile::log);
  std::vector<Piece> pieces;
  for (size_t i = 0; i < reads; ++i)
    pieces.push_back({DiskFile::log, i * 2654435761u % pages * 4096, bytes.data() + i * 4096, block});
  const auto begin = std::chrono::steady_clock::now();
  disk.read(pieces);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string rate(double seconds) { return std::to_string(static_cast<uint64_t>(512 / seconds)) + " reads/s"; }

}  // namespace

std::unique_ptr<Disk> open_files(const std::string& directory, const std::string& io, int threads, bool wipe) {
  if (io != "auto" && io != "direct" && io != "threads")
    throw std::invalid_argument("io must be auto, direct or threads, not " + io);
  const size_t block = io == "threads" ? 0 : probe_direct(directory);
  const auto make = [&](Way way, const std::string& why) {
    return std::make_unique<FileDisk>(directory, way, way == Way::threads ? sector_bytes : block, threads, wipe, why);
  };
  if (io == "threads") return make(Way::threads, "threads, as asked for");
  if (!block) return make(Way::threads, "threads: the file system has no O_DIRECT");
  const Way direct = has_ring() ? Way::ring_direct : Way::threads_direct;
  const std::string name = direct == Way::ring_direct ? "direct (io_uring)" : "direct (threads: there is no io_uring)";
  const std::string blocks = ", blocks of " + std::to_string(block) + " bytes";
  if (io == "direct") return make(direct, name + blocks + ", as asked for");
  if (!wipe) return make(direct, name + blocks + ": the files are there already, and nothing was measured");
  const double direct_seconds = measure(directory, direct, block, threads);
  const double threads_seconds = measure(directory, Way::threads, block, threads);
  // Reads through the page cache come from memory as long as it lasts: they are chosen only if those from the device
  // are so slow that memory is what is there, as with files in memory.
  const bool is_memory = direct_seconds > threads_seconds && direct_seconds < 512 * 2e-6;
  const std::string measured = " (" + rate(direct_seconds) + " direct, " + rate(threads_seconds) + " by threads)";
  if (is_memory) return make(Way::threads, "threads: the files are in memory" + measured);
  return make(direct, name + blocks + measured);
}

}  // namespace regrow
