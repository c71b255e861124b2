// platform.h on Linux (and WSL2).
#include "platform.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "failure.h"

namespace atsc::platform {
namespace {

[[noreturn]] void fail_with_errno(const char* doing, const std::string& what) {
  const int error = errno;
  fail(ATSC_IO_ERROR, "cannot %s %s: %s", doing, what.c_str(), strerror(error));
}

// The first line of a small system file, or "".
std::string read_line(const std::string& path) {
  FILE* file = fopen(path.c_str(), "re");
  if (file == nullptr) return "";
  char line[4096];
  const char* got = fgets(line, sizeof line, file);
  fclose(file);
  if (got == nullptr) return "";
  std::string text(line);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

// "0-3,8" as numbers.
std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  while (*at >= '0' && *at <= '9') {
    char* end = nullptr;
    const long first = strtol(at, &end, 10);
    const long last = *end == '-' ? strtol(end + 1, &end, 10) : first;
    for (long cpu = first; cpu <= last && cpu < 65536; ++cpu) cpus.push_back(static_cast<int>(cpu));
    at = *end == ',' ? end + 1 : end;
  }
  return cpus;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  for (int count = 1024; count <= 65536; count *= 4) {  // sched_getaffinity: EINVAL if too small
    cpu_set_t* set = CPU_ALLOC(count);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(bytes, set);
    const bool got = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; got && cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (got) break;
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

int count_cores(const std::vector<int>& cpus) {
  std::set<std::string> cores;
  for (const int cpu : cpus) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    const std::string siblings = read_line(folder + "thread_siblings_list");
    cores.insert(siblings.empty() ? "cpu" + std::to_string(cpu) : siblings);
  }
  return static_cast<int>(cores.size());
}

// CPUs' worth of time of one control group folder, or 0 if it sets no limit.
double group_limit(const std::string& folder) {
  const std::string v2 = read_line(folder + "/cpu.max");
  double quota = 0, period = 0;
  if (sscanf(v2.c_str(), "%lf %lf", &quota, &period) == 2 && period > 0) return quota / period;
  const std::string v1 = read_line(folder + "/cpu.cfs_quota_us");
  const std::string v1_period = read_line(folder + "/cpu.cfs_period_us");
  quota = atof(v1.c_str());
  period = atof(v1_period.c_str());
  return quota > 0 && period > 0 ? quota / period : 0;
}

// Calls use(folder) for the control groups of this process, and those above them, that have a
// controller.
template <class Use>
void for_control_groups(const std::string& controller, Use&& use) {
  FILE* file = fopen("/proc/self/cgroup", "re");
  if (file == nullptr) return;
  char line[4096];
  while (fgets(line, sizeof line, file) != nullptr) {
    std::string text(line);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    const size_t first = text.find(':'), second = text.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + text.substr(first + 1, second - first - 1) + ",";
    std::string root = "/sys/fs/cgroup";
    if (controllers != ",,") {
      if (controllers.find("," + controller + ",") == std::string::npos) continue;
      root += "/" + controller;
    }
    std::string path = text.substr(second + 1);
    for (;;) {
      use(root + path);
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/'));
    }
  }
  fclose(file);
}

// The least limit of this process's control groups and those above them.
int control_group_limit(int num_cpus) {
  double least = num_cpus;
  for_control_groups("cpu", [&](const std::string& folder) {
    const double limit = group_limit(folder);
    if (limit > 0) least = std::min(least, limit);
  });
  return std::max(1, static_cast<int>(least));
}

// The number after a word in a file of lines "word number"; 0: there is none.
uint64_t number_after(const std::string& word, const std::string& path) {
  FILE* file = fopen(path.c_str(), "re");
  if (file == nullptr) return 0;
  unsigned long long found = 0;
  char line[256], first[128];
  while (found == 0 && fgets(line, sizeof line, file) != nullptr) {
    unsigned long long number = 0;
    if (sscanf(line, "%127s %llu", first, &number) == 2 && word == first) found = number;
  }
  fclose(file);
  return found;
}

// What one control group folder leaves, counting files that need not stay in memory; no limit: all.
uint64_t group_memory_left(const std::string& folder) {
  const auto left = [&](const char* limit, const char* used, const char* inactive) {
    const uint64_t most = strtoull(read_line(folder + limit).c_str(), nullptr, 10);
    if (most == 0) return ~0ull;  // "max", or another version of control groups
    const uint64_t taken = strtoull(read_line(folder + used).c_str(), nullptr, 10);
    const uint64_t files = number_after(inactive, folder + "/memory.stat");
    const uint64_t needed = taken - std::min(taken, files);
    return static_cast<unsigned long long>(most - std::min(most, needed));
  };
  return std::min(left("/memory.max", "/memory.current", "inactive_file"),
                  left("/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"));
}

}  // namespace

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping Mapping::anonymous(size_t bytes, bool huge, const char* what) {
  if (bytes == 0) return {};
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    fail(ATSC_DEVICE_ERROR, "cannot get %.1f MiB of memory for %s: %s",
         static_cast<double>(bytes) / (1 << 20), what, strerror(errno));
  }
  if (huge) madvise(data, bytes, MADV_HUGEPAGE);  // a wish: the system may not know it
  return {static_cast<std::byte*>(data), bytes};
}

File File::open_to_read(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail_with_errno("open", path);
  return {descriptor, path};
}

File File::create(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) fail_with_errno("write", path);
  return {descriptor, path};
}

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

uint64_t File::bytes() const {
  struct stat status;
  if (fstat(descriptor_, &status) != 0) fail_with_errno("look at", path_);
  return static_cast<uint64_t>(status.st_size);
}

void File::read_at(uint64_t offset, void* target, size_t bytes) const {
  auto* at = static_cast<char*>(target);
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, at, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_with_errno("read", path_);
    if (got == 0) fail(ATSC_IO_ERROR, "%s ends too early: the file is damaged", path_.c_str());
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

void File::append(const void* source, size_t bytes) const {
  const auto* at = static_cast<const char*>(source);
  while (bytes > 0) {
    const ssize_t put = write(descriptor_, at, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_with_errno("write", path_);
    at += put;
    bytes -= static_cast<size_t>(put);
  }
}

void File::flush_to_disk() const {
  if (fsync(descriptor_) != 0) fail_with_errno("write", path_);
}

Mapping File::map() const {
  const uint64_t size = bytes();
  if (size == 0) return {};
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) fail_with_errno("map", path_);
  madvise(data, size, MADV_WILLNEED);
  return {static_cast<std::byte*>(data), size};
}

void rename_over(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_with_errno("write", to);
}

void remove_quietly(const std::string& path) { ::unlink(path.c_str()); }

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

void wait_on(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

uint64_t random_seed() {
  uint64_t seed = 0;
  if (getrandom(&seed, sizeof seed, 0) != sizeof seed) seed = static_cast<uint64_t>(now_ns());
  return seed;
}

CpuSet usable_cpus() {
  std::vector<int> cpus = allowed_cpus();
  std::vector<int> fast;  // hybrid CPUs list their performance cores here
  for (const int cpu : parse_cpu_list(read_line("/sys/devices/cpu_core/cpus"))) {
    if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) fast.push_back(cpu);
  }
  const bool is_subset = !fast.empty() && fast.size() < cpus.size();
  if (is_subset) cpus = fast;
  const int num_cores = count_cores(cpus);
  const int limit = control_group_limit(static_cast<int>(cpus.size()));
  return {std::move(cpus), num_cores, is_subset, limit};
}

uint64_t available_memory() {
  constexpr uint64_t kKib = 1024;
  const uint64_t of_machine = number_after("MemAvailable:", "/proc/meminfo") * kKib;
  uint64_t least = of_machine > 0 ? of_machine : ~0ull;
  for_control_groups("memory", [&](const std::string& folder) {
    least = std::min(least, group_memory_left(folder));
  });
  return least;
}

void set_up_thread(const char* name, const std::vector<int>& cpus) {
  prctl(PR_SET_NAME, name);
  sigset_t all;  // signals are the application's: its own threads take them
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  if (cpus.empty()) return;
  const int count = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(count);
  if (set == nullptr) return;
  CPU_ZERO_S(CPU_ALLOC_SIZE(count), set);
  for (const int cpu : cpus) CPU_SET_S(cpu, CPU_ALLOC_SIZE(count), set);
  sched_setaffinity(0, CPU_ALLOC_SIZE(count), set);  // a wish: the system may have changed its mind
  CPU_FREE(set);
}

}  // namespace atsc::platform
