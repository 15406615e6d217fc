// The files of a directory as a Disk. Many reads at a time go to the kernel by one call of io_uring, where there is
// one; else a few threads share them. Reads and writes past the page cache (O_DIRECT) need whole blocks, which all of
// them are anyway. Files that are in memory are mapped, and what the store wants of them is not even copied here.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "regrow/disk.hpp"

namespace regrow {
namespace {

constexpr unsigned ring_entries = 256;
constexpr size_t threads_most = 64;

// Of Linux 6.1; headers may be older. One thread hands over and waits, and what completions leave to be done is done
// while it waits: nobody is interrupted for it.
constexpr unsigned setup_single_issuer = 1u << 12, setup_defer_taskrun = 1u << 13;

using FileDescriptors = std::array<int, disk_file_count>;

[[noreturn]] void fail(int code, const std::string& what) { throw DiskError(code, what + ": " + std::strerror(code)); }

// One queue of the kernel, for one thread: a batch is handed over, and all of it awaited. Files are made known to the
// kernel once, and so is memory for short reads: to look up either for each read took a quarter of its time.
class Ring {
 public:
  Ring(const FileDescriptors& fds, size_t block_bytes) : fds_(fds), short_bytes_(std::max<size_t>(1024, block_bytes)) {
    io_uring_params params{};
    for (const unsigned flags : {setup_single_issuer | setup_defer_taskrun, 0u}) {
      params = {};
      params.flags = flags;
      fd_ = static_cast<int>(syscall(SYS_io_uring_setup, ring_entries, &params));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
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
    make_known();
  }
  Ring(const Ring&) = delete;
  ~Ring() {
    if (sqes_) munmap(sqes_, sqe_bytes_);
    if (cq_) munmap(cq_, cq_bytes_);
    if (sq_) munmap(sq_, sq_bytes_);
    close(fd_);
  }

  // results[i]: bytes of piece i, or minus the error.
  void run(bool writes, std::span<const Piece> pieces, int* results) {
    for (size_t first = 0; first < pieces.size(); first += ring_entries) {
      const std::span<const Piece> batch = pieces.subspan(first, std::min<size_t>(ring_entries, pieces.size() - first));
      const uint32_t tail = *sq_tail_;
      for (size_t i = 0; i < batch.size(); ++i) {
        const uint32_t entry = (tail + static_cast<uint32_t>(i)) & sq_mask_;
        fill(sqes_[entry], writes, batch[i], i);
        sq_array_[entry] = entry;
      }
      __atomic_store_n(sq_tail_, tail + static_cast<uint32_t>(batch.size()), __ATOMIC_RELEASE);
      submit_and_wait(batch.size(), results + first);
      for (size_t i = 0; i < batch.size(); ++i)
        if (const int bytes = results[first + i]; !writes && bytes > 0 && is_short(batch[i]))
          std::memcpy(batch[i].data, short_reads_.data() + i * short_bytes_, static_cast<size_t>(bytes));
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
  // The kernel may refuse either: memory that is known stays in memory, and a user may have a bound for that.
  void make_known() {
    knows_files_ = !syscall(SYS_io_uring_register, fd_, IORING_REGISTER_FILES, fds_.data(), fds_.size());
    AlignedBytes memory(ring_entries * short_bytes_);
    const iovec all{memory.data(), memory.size()};
    if (!syscall(SYS_io_uring_register, fd_, IORING_REGISTER_BUFFERS, &all, 1)) short_reads_ = std::move(memory);
  }
  bool is_short(const Piece& piece) const { return short_reads_ && piece.bytes <= short_bytes_; }
  void fill(io_uring_sqe& sqe, bool writes, const Piece& piece, size_t number) const {
    const bool is_known = !writes && is_short(piece);
    const std::byte* data = is_known ? short_reads_.data() + number * short_bytes_ : piece.data;
    const auto file = static_cast<size_t>(piece.file);
    std::memset(&sqe, 0, sizeof sqe);
    sqe.opcode = writes ? IORING_OP_WRITE : is_known ? IORING_OP_READ_FIXED : IORING_OP_READ;
    sqe.flags = knows_files_ ? IOSQE_FIXED_FILE : 0;
    sqe.fd = knows_files_ ? static_cast<int>(file) : fds_[file];
    sqe.addr = reinterpret_cast<uint64_t>(data);
    sqe.len = static_cast<uint32_t>(piece.bytes);
    sqe.off = piece.offset;
    sqe.user_data = number;
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

  FileDescriptors fds_;
  size_t short_bytes_;
  AlignedBytes short_reads_;  // one for each entry; none if the kernel did not want it
  bool knows_files_ = false;
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
    Ring({-1, -1, -1}, sector_bytes);
    return true;
  } catch (const DiskError&) {
    return false;
  }
}

// A file where it is in memory, as far as it is long. For one thread.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  ~Mapping() {
    if (data_) munmap(data_, bytes_);
  }
  const std::byte* view(int fd, uint64_t offset, size_t bytes) {
    if (offset + bytes > bytes_ && !grow(fd, offset + bytes)) return nullptr;
    return data_ + offset;
  }

 private:
  bool grow(int fd, uint64_t bytes_least) {
    struct stat found{};
    if (fstat(fd, &found) || static_cast<uint64_t>(found.st_size) < bytes_least) return false;
    const auto bytes = static_cast<size_t>(found.st_size);
    void* got =
        data_ ? mremap(data_, bytes_, bytes, MREMAP_MAYMOVE) : mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (got == MAP_FAILED) return false;  // then it is read
    data_ = static_cast<std::byte*>(got);
    bytes_ = bytes;
    return true;
  }

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

enum class Way { ring_direct, threads_direct, mapped, threads };

bool is_direct(Way way) { return way == Way::ring_direct || way == Way::threads_direct; }

// Of the calling thread, and never given to another.
uint64_t thread_number() {
  static std::atomic<uint64_t> next{0};
  thread_local const uint64_t own = ++next;
  return own;
}

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
      const bool direct = is_direct(way) && static_cast<DiskFile>(file) != DiskFile::state;
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
  bool is_mapped() const override { return way_ == Way::mapped; }
  const std::byte* view(DiskFile file, uint64_t offset, size_t bytes) override {
    const auto index = static_cast<size_t>(file);
    return is_mapped() ? mappings_[index].view(fds_[index], offset, bytes) : nullptr;
  }

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
    if (pieces.size() < 3 || way_ == Way::mapped) {  // memory is not faster for being asked for several things
      for (const Piece& piece : pieces) finish(writes, piece, move_some(writes, piece, 0));
      return;
    }
    std::vector<int> results(pieces.size());
    if (way_ == Way::ring_direct)
      own_ring().run(writes, pieces, results.data());
    else
      share(writes, pieces, results);
    for (size_t i = 0; i < pieces.size(); ++i) finish(writes, pieces[i], results[i]);
  }

  Ring& own_ring() {
    std::lock_guard lock(mutex_);
    std::unique_ptr<Ring>& ring = rings_[thread_number()];
    if (!ring) ring = std::make_unique<Ring>(fds_, block_bytes_);
    return *ring;
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
  FileDescriptors fds_;
  std::array<Mapping, disk_file_count> mappings_;
  std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Ring>> rings_;  // by thread: few ever read or write
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

// Whether files of the directory are nowhere but in memory.
bool is_in_memory(const std::string& directory) {
  struct statfs found{};
  if (statfs(directory.c_str(), &found)) return false;
  return found.f_type == TMPFS_MAGIC || found.f_type == RAMFS_MAGIC;
}

}  // namespace

std::unique_ptr<Disk> open_files(const std::string& directory, const std::string& io, int threads, bool wipe) {
  if (io != "auto" && io != "direct" && io != "mmap" && io != "threads")
    throw std::invalid_argument("io must be auto, direct, mmap or threads, not " + io);
  const auto make = [&](Way way, size_t block, const std::string& why) {
    return std::make_unique<FileDisk>(directory, way, block, threads, wipe, why);
  };
  if (io == "threads") return make(Way::threads, sector_bytes, "threads, as asked for");
  if (io == "mmap") return make(Way::mapped, sector_bytes, "mmap, as asked for");
  if (io == "auto" && is_in_memory(directory)) return make(Way::mapped, sector_bytes, "mmap: the files are in memory");
  const size_t block = probe_direct(directory);
  if (!block) return make(Way::threads, sector_bytes, "threads: the file system has no O_DIRECT");
  const bool rings = has_ring();
  return make(rings ? Way::ring_direct : Way::threads_direct, block,
              std::string("direct (") + (rings ? "io_uring" : "threads: there is no io_uring") + "), blocks of " +
                  std::to_string(block) + " bytes" +
                  (io == "direct" ? ", as asked for" : ", past the page cache: the files are on a disk"));
}

}  // namespace regrow
