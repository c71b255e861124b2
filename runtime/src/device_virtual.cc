#include "device_virtual.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "failure.h"
#include "virtual_memory.h"

namespace atsc {
namespace {

using platform::now_ns;

constexpr int64_t kClockAhead = 7'000'000'000'000;  // so that a forgotten clock_offset_ns shows
constexpr uint64_t kCopyChunk = 1 << 18;            // after which a new link rate counts
constexpr double kUnpinnedShare = 0.5;              // of the link's rate
constexpr double kLateSpinning = 0.6;               // of the time to come back, after a wait that spins

void sleep_until(int64_t end_ns) {
  constexpr int64_t kSlack = 100'000;  // that the system oversleeps
  for (int64_t left; (left = end_ns - now_ns()) > 0;) {
    if (left > kSlack) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(left - kSlack));
    } else {
      std::this_thread::yield();
    }
  }
}

// One direction between host and device.
struct Link {
  std::mutex busy;  // one copy at a time
  std::atomic<double> bytes_per_s{0};

  int64_t time_of(uint64_t bytes, double share) const {
    const double rate = bytes_per_s.load(std::memory_order_relaxed) * share;
    return rate > 0 ? static_cast<int64_t>(static_cast<double>(bytes) / rate * 1e9) : 0;
  }

  void copy(std::byte* target, const std::byte* source, uint64_t bytes, double share) {
    const std::lock_guard lock(busy);
    int64_t end = now_ns();
    for (uint64_t done = 0; done < bytes; done += kCopyChunk) {
      const uint64_t part = std::min(kCopyChunk, bytes - done);
      std::memcpy(target + done, source + done, part);
      end += time_of(part, share);
      sleep_until(end);
    }
  }
};

bool has_prefix(const char* name, const std::string& prefix) {
  return std::strncmp(name, prefix.c_str(), prefix.size()) == 0;
}

class VirtualExecutable;

class VirtualGpu final : public VirtualDevice {
 public:
  explicit VirtualGpu(const VirtualOptions& options);
  ~VirtualGpu() override;

  void upload(DeviceAddress target, const void* source, uint64_t bytes) override;
  void download(void* target, DeviceAddress source, uint64_t bytes) override;
  void fill(DeviceAddress target, uint8_t byte, uint64_t bytes) override;
  void load_modules(std::span<const ModuleEntry>,
                    const std::function<std::string(const char*)>&) override {}
  KernelHandle kernel_of(const NodeEntry& node, bool few_rows) override;
  uint64_t scratch_bytes(KernelHandle kernel, const LaunchShape& shape) override;
  std::unique_ptr<Executable> build(const CommandList& list, BuildMode mode) override;
  int64_t clock_offset_ns() override { return -kClockAhead; }
  void check_host_args(const char* node, const KernelArgs& args) const override;

  void set_link_rate(double to_device, double to_host) override {
    to_device_.bytes_per_s = to_device;
    to_host_.bytes_per_s = to_host;
  }
  void set_kernel_ns(const std::string& prefix, int64_t ns) override;
  void set_slowdown(double factor) override { slowdown_ = std::max(factor, 1.0); }
  void set_host_slowdown(double factor) override { host_slowdown_ = std::max(factor, 1.0); }
  void set_wake_ns(int64_t ns) override { wake_ns_ = ns; }
  void slow_down_host(int64_t begin_ns) const override {
    const double factor = host_slowdown_.load(std::memory_order_relaxed);
    if (factor <= 1) return;
    const auto taken_ns = static_cast<double>(now_ns() - begin_ns);
    sleep_until(begin_ns + static_cast<int64_t>(taken_ns * factor));
  }
  void fail_kernel(const std::string& prefix) override;
  void fail_upload(int after) override { uploads_to_failure_ = after; }

 private:
  friend class VirtualExecutable;

  DeviceAddress allocate_raw(uint64_t bytes) override { return memory_.allocate(bytes); }
  void free_raw(DeviceAddress address, uint64_t) noexcept override { memory_.free(address); }
  DeviceAddress pin_raw(void* memory, uint64_t bytes) override {
    return memory_.map(memory, bytes, options_.pinnable_bytes);
  }
  void unpin_raw(void* memory, uint64_t) noexcept override { memory_.unmap(memory); }

  void serve(Branch branch);
  bool launch(const Command& command);  // false: it faulted
  KernelArgs host_args(const Command& command) const;
  void copy(const Command& command);
  void transfer(const Command& command);
  void lengthen(const char* kernel, int64_t begin);
  bool takes_fault(const char* kernel);
  void fault(const std::string& text);

  const VirtualOptions options_;
  VirtualMemory memory_;
  Link to_device_, to_host_;
  std::atomic<double> slowdown_{1}, host_slowdown_{1};
  std::atomic<int64_t> wake_ns_{0};
  std::atomic<int> uploads_to_failure_{-1};  // below 0: none fails

  std::mutex scripts_mutex_;
  std::map<std::string, int64_t> kernel_ns_;
  std::vector<std::string> faults_;

  // What the branches share: one round, points that were passed, a fault.
  std::mutex mutex_;
  std::condition_variable begun_;    // a round, or the end of the device
  std::condition_variable changed_;  // a flag, a point, a fault
  VirtualExecutable* round_ = nullptr;
  uint64_t round_number_ = 0;
  bool quit_ = false;
  std::string fault_;
  std::vector<std::thread> threads_;
};

class VirtualExecutable final : public Executable {
 public:
  VirtualExecutable(VirtualGpu& device, const CommandList& list, BuildMode mode)
      : Executable(device, list),
        gpu_(device),
        is_graph_(mode == BuildMode::kGraph),
        device_bytes_(is_graph_ ? device.options_.graph_bytes : 0),
        points_(static_cast<size_t>(list.num_points())) {
    for (const Command& command : list.commands()) {
      const Branch branch = mode == BuildMode::kSynchronous ? Branch::kCompute : command.branch;
      branches_[static_cast<int>(branch)].push_back(command);
    }
    gpu_.charge(VirtualGpu::Use::kExecutables, device_bytes_, "rounds");
  }
  ~VirtualExecutable() override {
    finish();
    gpu_.refund(VirtualGpu::Use::kExecutables, device_bytes_);
  }

  bool is_graph() const override { return is_graph_; }
  uint64_t device_bytes() const override { return device_bytes_; }

  bool done() override {
    const std::lock_guard lock(gpu_.mutex_);
    if (!gpu_.fault_.empty() && running_ == 0) {
      fail(ATSC_DEVICE_ERROR, "%s", gpu_.fault_.c_str());
    }
    return running_ == 0;
  }

  bool uses(Branch branch) const { return !branches_[static_cast<int>(branch)].empty(); }

  // All commands of one branch, on its thread.
  void execute(Branch branch) {
    for (const Command& command : branches_[static_cast<int>(branch)]) {
      if (!execute(command)) return;
    }
  }

  // With the device's mutex held.
  void branch_is_over() {
    if (--running_ == 0) gpu_.round_ = nullptr;
  }

 private:
  void start() override {
    {
      const std::lock_guard lock(gpu_.mutex_);
      if (!gpu_.fault_.empty()) fail(ATSC_DEVICE_ERROR, "%s", gpu_.fault_.c_str());
      if (gpu_.round_ != nullptr) {
        fail(ATSC_INTERNAL_ERROR, "a device round was started before another was over");
      }
      points_.assign(points_.size(), 0);
      running_ = static_cast<int>(
          std::ranges::count_if(branches_, [](const auto& branch) { return !branch.empty(); }));
      if (running_ == 0) return;
      gpu_.round_ = this;
      ++gpu_.round_number_;
    }
    gpu_.begun_.notify_all();
  }

  void flags_changed() override {
    { const std::lock_guard lock(gpu_.mutex_); }
    gpu_.changed_.notify_all();
  }

  // False: the device has faulted.
  bool execute(const Command& command) {
    switch (command.kind) {
      case Command::Kind::kLaunch: return is_released() || gpu_.launch(command);
      case Command::Kind::kCopyToDevice:
      case Command::Kind::kCopyToHost: gpu_.copy(command); return true;
      case Command::Kind::kTransfer:
        put_stamp(command.stamp);
        transfer(command);
        return true;
      case Command::Kind::kSend:
        transfer(command);
        put_stamp(command.stamp);
        flags()[command.flag].value.store(command.value, std::memory_order_release);
        return true;
      case Command::Kind::kStamp:
        // Of the point before it, however late its own thread is.
        put_stamp(command.stamp, command.branch == Branch::kStamps
                                     ? reached_ns_[static_cast<int>(Branch::kStamps)]
                                     : now_ns());
        return true;
      case Command::Kind::kWaitFlag: {
        const std::atomic<uint32_t>& flag = flags()[command.flag].value;
        const auto is_raised = [&] {
          return static_cast<int32_t>(flag.load(std::memory_order_acquire) - command.value) >= 0;
        };
        return wait_until(command.branch, is_raised, command.spins ? kLateSpinning : 1);
      }
      case Command::Kind::kWaitPoint:
        return wait_until(command.branch, [&] {
          int64_t& reached_ns = reached_ns_[static_cast<int>(command.branch)];
          reached_ns = points_[static_cast<size_t>(command.point)];
          return reached_ns > 0;
        });
      case Command::Kind::kRecord: {
        {
          const std::lock_guard lock(gpu_.mutex_);
          points_[static_cast<size_t>(command.point)] = now_ns();
        }
        gpu_.changed_.notify_all();
        return true;
      }
    }
    return true;
  }

  // After a release it would race with the host, as on a GPU, where nobody looks at the result;
  // here ThreadSanitizer does. Kernels are left out as well then: the numbers of the round that they
  // would read may not have crossed.
  void transfer(const Command& command) {
    if (!is_released()) gpu_.transfer(command);
  }

  template <class Condition>
  bool wait_until(Branch branch, Condition condition, double late = 1) {
    std::unique_lock lock(gpu_.mutex_);
    const bool waits = branch == Branch::kCompute && !condition();
    gpu_.changed_.wait(lock, [&] { return condition() || !gpu_.fault_.empty(); });
    if (!gpu_.fault_.empty()) return false;
    lock.unlock();
    const auto wake_ns = static_cast<double>(gpu_.wake_ns_.load(std::memory_order_relaxed));
    if (waits) sleep_until(now_ns() + static_cast<int64_t>(wake_ns * late));
    return true;
  }

  void put_stamp(int stamp, int64_t ns = now_ns()) {
    if (stamp != kNoStamp) stamps()[stamp] = ns + kClockAhead;
  }

  VirtualGpu& gpu_;
  const bool is_graph_;
  const uint64_t device_bytes_;
  std::vector<Command> branches_[kNumBranches];
  std::vector<int64_t> points_;  // when they were passed; 0: not yet
  int64_t reached_ns_[kNumBranches] = {};  // the latest point that a branch waited for
  int running_ = 0;  // branches
};

VirtualGpu::VirtualGpu(const VirtualOptions& options)
    : VirtualDevice(options.budget_bytes), options_(options), memory_(options.budget_bytes) {
  info_.name = "the virtual device";
  info_.num_sms = 1;
  info_.total_bytes = options.budget_bytes;
  info_.has_graphs = options.has_graphs;
  info_.has_stream_waits = options.has_graphs;
  charge(Use::kContext, options.context_bytes, "the driver's own data");
  info_.free_bytes = options.budget_bytes - options.context_bytes;
  set_link_rate(options.link_bytes_per_s, options.link_bytes_per_s);
  for (int branch = 0; branch < kNumBranches; ++branch) {
    threads_.emplace_back([this, branch] { serve(static_cast<Branch>(branch)); });
  }
}

VirtualGpu::~VirtualGpu() {
  {
    const std::lock_guard lock(mutex_);
    quit_ = true;
  }
  begun_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  drop_spare_controls();
}

void VirtualGpu::serve(Branch branch) {
  platform::set_up_thread("atsc virtual", {});
  uint64_t served = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    begun_.wait(lock, [&] {
      return quit_ || (round_number_ != served && round_ != nullptr && round_->uses(branch));
    });
    if (quit_) return;
    served = round_number_;
    VirtualExecutable* const round = round_;
    lock.unlock();
    round->execute(branch);
    lock.lock();
    round->branch_is_over();
  }
}

KernelArgs VirtualGpu::host_args(const Command& command) const {
  const DeviceArgs& from = command.args;
  const char* name = command.kernel.name;
  const auto host = [&](const void* pointer, OperandName operand) -> std::byte* {
    if (pointer == nullptr) return nullptr;
    return memory_.at(reinterpret_cast<DeviceAddress>(pointer), 1, name, operand);
  };
  KernelArgs args{};
  for (int slot = 0; slot < kMaxInputs; ++slot) args.in[slot] = host(from.in[slot], {"in", slot});
  for (int slot = 0; slot < kMaxOutputs; ++slot) {
    args.out[slot] = host(from.out[slot], {"out", slot});
  }
  const auto* params =
      reinterpret_cast<const RoundParams*>(memory_.at(reinterpret_cast<DeviceAddress>(from.round),
                                                      sizeof(RoundParams), name, "round"));
  args.rows = params->rows[from.rows_of];
  args.position = params->position;
  if (args.rows > command.shape.rows || args.rows < 0) {
    fail(ATSC_INTERNAL_ERROR, "kernel %s was launched for %lld rows, but its round has %lld", name,
         static_cast<long long>(command.shape.rows), static_cast<long long>(args.rows));
  }
  args.logit_rows = reinterpret_cast<const int32_t*>(host(from.logit_rows, "logit_rows"));
  args.k_cache = host(from.k_cache, "k_cache");
  args.v_cache = host(from.v_cache, "v_cache");
  args.kv_capacity = from.kv_capacity;
  args.scratch = host(from.scratch, "scratch");
  args.num_threads = 1;
  return args;
}

bool VirtualGpu::launch(const Command& command) {
  const int64_t begin = now_ns();
  const auto* kernel = static_cast<const CpuKernel*>(command.kernel.entry);
  if (takes_fault(kernel->name)) {
    fault(std::string("the virtual device reports a fault in kernel ") + kernel->name);
    return false;
  }
  KernelArgs args;
  try {
    args = host_args(command);
  } catch (const Failure& failure) {
    fault(failure.what());
    return false;
  }
  const int64_t domain = kernel->domain(args);
  if (domain > 0) kernel->run(args, 0, domain);
  lengthen(kernel->name, begin);
  return true;
}

// Waits until a launch has taken the time that it should.
void VirtualGpu::lengthen(const char* kernel, int64_t begin) {
  int64_t least = 0;
  {
    const std::lock_guard lock(scripts_mutex_);
    for (const auto& [prefix, ns] : kernel_ns_) {
      if (has_prefix(kernel, prefix)) least = std::max(least, ns);
    }
  }
  const double factor = slowdown_.load(std::memory_order_relaxed);
  if (least == 0 && factor <= 1) return;
  const int64_t taken = std::max(least, now_ns() - begin);
  sleep_until(begin + static_cast<int64_t>(static_cast<double>(taken) * factor));
}

bool VirtualGpu::takes_fault(const char* kernel) {
  const std::lock_guard scripts(scripts_mutex_);
  const auto found = std::ranges::find_if(
      faults_, [&](const std::string& prefix) { return has_prefix(kernel, prefix); });
  if (found == faults_.end()) return false;
  faults_.erase(found);
  return true;
}

void VirtualGpu::fault(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    fault_ = text;
  }
  changed_.notify_all();
}

void VirtualGpu::copy(const Command& command) {
  VirtualMemory::check_host_pointer(command.host, "copy", "host");
  auto* host = static_cast<std::byte*>(command.host);
  const bool to_device = command.kind == Command::Kind::kCopyToDevice;
  const DeviceAddress address = to_device ? command.target : command.source;
  std::byte* memory = memory_.at(address, command.bytes, "copy", to_device ? "target" : "source");
  for (const Piece& piece : pieces_of(host, command.bytes)) {
    std::byte *here = host + piece.offset, *there = memory + piece.offset;
    Link& link = to_device ? to_device_ : to_host_;
    link.copy(to_device ? there : here, to_device ? here : there, piece.bytes,
              piece.pinned ? 1 : kUnpinnedShare);
  }
}

void VirtualGpu::transfer(const Command& command) {
  if (command.bytes == 0) return;
  const int64_t begin = now_ns();
  std::byte* target = memory_.at(command.target, command.bytes, "transfer", "target");
  const std::byte* source = memory_.at(command.source, command.bytes, "transfer", "source");
  std::memcpy(target, source, command.bytes);
  const Link& link = VirtualMemory::is_mapped(command.target) ? to_host_ : to_device_;
  sleep_until(begin + link.time_of(command.bytes, 1));
}

void VirtualGpu::upload(DeviceAddress target, const void* source, uint64_t bytes) {
  if (bytes == 0) return;
  if (uploads_to_failure_ >= 0 && uploads_to_failure_-- == 0) {
    fail(ATSC_DEVICE_ERROR, "the virtual device: copying to it failed, as it was told");
  }
  Command command{.kind = Command::Kind::kCopyToDevice, .branch = Branch::kCompute};
  command.target = target;
  command.host = const_cast<void*>(source);
  command.bytes = bytes;
  copy(command);
}

void VirtualGpu::download(void* target, DeviceAddress source, uint64_t bytes) {
  if (bytes == 0) return;
  Command command{.kind = Command::Kind::kCopyToHost, .branch = Branch::kCompute};
  command.source = source;
  command.host = target;
  command.bytes = bytes;
  copy(command);
}

void VirtualGpu::fill(DeviceAddress target, uint8_t byte, uint64_t bytes) {
  if (bytes != 0) std::memset(memory_.at(target, bytes, "fill", "target"), byte, bytes);
}

KernelHandle VirtualGpu::kernel_of(const NodeEntry& node, bool few_rows) {
  const int level = highest_level(node, few_rows, options_.isa_levels);
  if (level < 0) return {};
  const CpuKernel* kernel = (few_rows ? node.few_rows : node.many_rows)[level];
  return {kernel->name, kernel};
}

uint64_t VirtualGpu::scratch_bytes(KernelHandle kernel, const LaunchShape& shape) {
  const auto* cpu = static_cast<const CpuKernel*>(kernel.entry);
  return cpu->scratch_bytes ? cpu->scratch_bytes(shape.rows, shape.kv_capacity, 1) : 0;
}

std::unique_ptr<Executable> VirtualGpu::build(const CommandList& list, BuildMode mode) {
  return std::make_unique<VirtualExecutable>(*this, list, mode_of(list, mode));
}

void VirtualGpu::check_host_args(const char* node, const KernelArgs& args) const {
  for (int slot = 0; slot < kMaxInputs; ++slot) {
    VirtualMemory::check_host_pointer(args.in[slot], node, {"in", slot});
  }
  for (int slot = 0; slot < kMaxOutputs; ++slot) {
    VirtualMemory::check_host_pointer(args.out[slot], node, {"out", slot});
  }
  VirtualMemory::check_host_pointer(args.k_cache, node, "k_cache");
  VirtualMemory::check_host_pointer(args.v_cache, node, "v_cache");
  VirtualMemory::check_host_pointer(args.scratch, node, "scratch");
}

void VirtualGpu::set_kernel_ns(const std::string& prefix, int64_t ns) {
  const std::lock_guard lock(scripts_mutex_);
  if (ns > 0) {
    kernel_ns_[prefix] = ns;
  } else {
    kernel_ns_.erase(prefix);
  }
}

void VirtualGpu::fail_kernel(const std::string& prefix) {
  const std::lock_guard lock(scripts_mutex_);
  faults_.push_back(prefix);
}

}  // namespace

std::unique_ptr<VirtualDevice> open_virtual_device(const VirtualOptions& options) {
  return std::make_unique<VirtualGpu>(options);
}

}  // namespace atsc
