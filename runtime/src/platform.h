// Everything that the runtime asks of the operating system. Another system needs another
// platform_*.cc and nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace atsc::platform {

// A range of memory from the operating system, page-aligned and zero at first.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  // Memory whose untouched pages cost nothing. `huge` asks for large pages.
  static Mapping anonymous(size_t bytes, bool huge, const char* what);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  friend class File;
  Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// An open file. All errors are Failures that name the path.
class File {
 public:
  static File open_to_read(const std::string& path);
  static File create(const std::string& path);  // truncates what is there
  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;

  uint64_t bytes() const;
  void read_at(uint64_t offset, void* target, size_t bytes) const;
  void append(const void* source, size_t bytes) const;
  void flush_to_disk() const;
  Mapping map() const;  // the whole file, read-only; reading ahead begins at once

 private:
  File(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}

  int descriptor_;
  std::string path_;
};

void rename_over(const std::string& from, const std::string& to);
void remove_quietly(const std::string& path);

// Sleep while `word` holds `expected`; may also return for no reason.
void wait_on(std::atomic<uint32_t>& word, uint32_t expected);
void wake_all(std::atomic<uint32_t>& word);

int64_t now_ns();
uint64_t random_seed();

struct CpuSet {
  std::vector<int> cpus;  // logical CPUs that this process may use; performance cores alone
  int num_cores;          // physical cores among them
  bool is_subset;         // slower cores were left out
  int limit;              // CPUs' worth of time that control groups grant, at least 1
};
CpuSet usable_cpus();

// Bytes that this process can still take without making the machine swap, within its control groups.
uint64_t available_memory();

// For a thread of our own: names it, leaves signals to other threads, and keeps it on some CPUs
// unless `cpus` is empty.
void set_up_thread(const char* name, const std::vector<int>& cpus);

}  // namespace atsc::platform
