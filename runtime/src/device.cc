// What all devices share: command lists, accounting, flags and waiting.
#include "device.h"

#include <algorithm>
#include <cstring>

#include "backoff.h"
#include "failure.h"

namespace atsc {
namespace {

constexpr uint32_t kReleased = kMaxFlagValue + 1;  // reaches every value, see has_reached
constexpr int64_t kPollNs = 1'000'000;             // how often a fault is asked for
constexpr uint64_t kPage = 4096;
constexpr uint64_t kControlBytes = 32 << 10;       // holds 3840 stamps

constexpr const char* kBranchNames[kNumBranches] = {"compute", "copy", "copy2", "stamps"};

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// As the device compares: cyclically.
bool has_reached(uint32_t flag, uint32_t value) { return static_cast<int32_t>(flag - value) >= 0; }

void check_flag(int flag, uint32_t value) {
  if (flag >= 0 && flag < kNumFlags && value >= 1 && value <= kMaxFlagValue) return;
  fail(ATSC_INTERNAL_ERROR, "flag %d = %u in a device round: expected flag 0 to %d, value 1 to %u",
       flag, value, kNumFlags - 1, kMaxFlagValue);
}

}  // namespace

DeviceRange::~DeviceRange() {
  if (device_ == nullptr) return;
  device_->free_raw(address_, bytes_);
  device_->refund(Device::Use::kRanges, bytes_);
}

HostRange::~HostRange() {
  if (device_ != nullptr) device_->unpin(host_, bytes_);
}

Command& CommandList::add(Command::Kind kind, Branch branch) {
  commands_.push_back({.kind = kind, .branch = branch});
  return commands_.back();
}

void CommandList::launch(Branch branch, KernelHandle kernel, const DeviceArgs& args,
                         const LaunchShape& shape) {
  if (kernel.entry == nullptr) fail(ATSC_INTERNAL_ERROR, "a launch without a kernel");
  Command& command = add(Command::Kind::kLaunch, branch);
  command.kernel = kernel;
  command.args = args;
  command.shape = shape;
}

void CommandList::copy_to_device(Branch branch, DeviceAddress target, const void* source,
                                 uint64_t bytes) {
  if (bytes == 0) return;
  Command& command = add(Command::Kind::kCopyToDevice, branch);
  command.target = target;
  command.host = const_cast<void*>(source);
  command.bytes = bytes;
}

void CommandList::copy_to_host(Branch branch, void* target, DeviceAddress source, uint64_t bytes) {
  if (bytes == 0) return;
  Command& command = add(Command::Kind::kCopyToHost, branch);
  command.host = target;
  command.source = source;
  command.bytes = bytes;
}

void CommandList::transfer(Branch branch, DeviceAddress target, DeviceAddress source,
                           uint64_t bytes, int stamp) {
  if (bytes % 4 != 0) {
    fail(ATSC_INTERNAL_ERROR, "a transfer of %llu bytes: expected a multiple of 4",
         static_cast<unsigned long long>(bytes));
  }
  Command& command = add(Command::Kind::kTransfer, branch);
  command.target = target;
  command.source = source;
  command.bytes = bytes;
  command.stamp = stamp;
  num_stamps_ = std::max(num_stamps_, stamp + 1);
}

void CommandList::send(Branch branch, DeviceAddress target, DeviceAddress source, uint64_t bytes,
                       int flag, uint32_t value, int stamp) {
  check_flag(flag, value);
  transfer(branch, target, source, bytes, stamp);
  Command& command = commands_.back();
  command.kind = Command::Kind::kSend;
  command.flag = flag;
  command.value = value;
}

void CommandList::signal(Branch branch, int flag, uint32_t value, int stamp) {
  send(branch, 0, 0, 0, flag, value, stamp);
}

void CommandList::receive(Branch branch, DeviceAddress target, DeviceAddress source,
                          uint64_t bytes, int flag, uint32_t value, int stamp, bool spins) {
  wait_flag(branch, flag, value, spins);
  transfer(branch, target, source, bytes, stamp);
}

void CommandList::wait_flag(Branch branch, int flag, uint32_t value, bool spins) {
  check_flag(flag, value);
  Command& command = add(Command::Kind::kWaitFlag, branch);
  command.flag = flag;
  command.value = value;
  command.spins = spins;
}

CommandList::Point CommandList::record(Branch branch) {
  add(Command::Kind::kRecord, branch).point = num_points_;
  return num_points_++;
}

void CommandList::wait_for(Branch branch, Point point) {
  if (point < 0 || point >= num_points_) {
    fail(ATSC_INTERNAL_ERROR, "a wait for point %d, which is not recorded", point);
  }
  add(Command::Kind::kWaitPoint, branch).point = point;
}

void CommandList::stamp(Branch branch, int stamp) {
  add(Command::Kind::kStamp, branch).stamp = stamp;
  num_stamps_ = std::max(num_stamps_, stamp + 1);
}

std::string CommandList::text() const {
  std::string text;
  for (const Command& c : commands_) {
    char line[256];
    const auto bytes = static_cast<unsigned long long>(c.bytes);
    const auto rows = static_cast<long long>(c.shape.rows);
    const auto format = [&](const char* pattern, auto... values) {
      std::snprintf(line, sizeof line, pattern, kBranchNames[static_cast<int>(c.branch)],
                    values...);
    };
    switch (c.kind) {
      case Command::Kind::kLaunch: format("%s: launch %s rows=%lld", c.kernel.name, rows); break;
      case Command::Kind::kCopyToDevice: format("%s: copy to device %llu bytes", bytes); break;
      case Command::Kind::kCopyToHost: format("%s: copy to host %llu bytes", bytes); break;
      case Command::Kind::kTransfer: format("%s: transfer %llu bytes", bytes); break;
      case Command::Kind::kSend:
        format("%s: send %llu bytes, flag %d = %u", bytes, c.flag, c.value);
        break;
      case Command::Kind::kWaitFlag:
        format(c.spins ? "%s: spin for flag %d = %u" : "%s: wait for flag %d = %u", c.flag, c.value);
        break;
      case Command::Kind::kStamp: format("%s: stamp %d", c.stamp); break;
      case Command::Kind::kRecord: format("%s: point %d", c.point); break;
      case Command::Kind::kWaitPoint: format("%s: wait for point %d", c.point); break;
    }
    text.append(line).push_back('\n');
  }
  return text;
}

Executable::Executable(Device& device, const CommandList& list)
    : device_(device),
      control_(device.take_control(sizeof(Flag) * kNumFlags +
                                   sizeof(int64_t) * static_cast<uint64_t>(list.num_stamps()))),
      num_stamps_(list.num_stamps()) {
  for (const Command& command : list.commands()) {
    if (command.kind == Command::Kind::kWaitFlag) waited_flags_ |= 1u << command.flag;
  }
}

Executable::~Executable() { device_.give_control(std::move(control_)); }

void Executable::run() {
  const std::lock_guard lock(release_mutex_);
  if (is_running_) fail(ATSC_INTERNAL_ERROR, "a device round was started before it was over");
  for (int flag = 0; flag < kNumFlags; ++flag) flags()[flag].value.store(0);
  std::fill_n(stamps(), num_stamps_, int64_t{0});
  released_.store(false, std::memory_order_release);
  start();
  is_running_ = true;
}

// A release must not be undone by a raise that comes late, so a flag never falls.
void Executable::raise_at_least(int flag, uint32_t value) {
  std::atomic<uint32_t>& word = flags()[flag].value;
  uint32_t now = word.load(std::memory_order_relaxed);
  while (!has_reached(now, value) && !word.compare_exchange_weak(now, value)) {
  }
  flags_changed();
}

void Executable::raise(int flag, uint32_t value) {
  check_flag(flag, value);
  raise_at_least(flag, value);
}

bool Executable::await(int flag, uint32_t value) {
  check_flag(flag, value);
  const std::atomic<uint32_t>& word = flags()[flag].value;
  const auto reached = [&] { return has_reached(word.load(std::memory_order_acquire), value); };
  if (reached()) return !is_released();
  const int64_t begin = platform::now_ns();
  int64_t next_poll = begin + kPollNs;
  while (!reached()) {
    if (is_released()) return false;
    const int64_t now = platform::now_ns();
    if (now >= next_poll) {
      next_poll = now + kPollNs;
      if (done() && !reached() && !is_released()) {
        fail(ATSC_INTERNAL_ERROR, "a device round ended without flag %d reaching %u", flag, value);
      }
    }
    pause_after(now - begin);
  }
  return !is_released();
}

void Executable::release() {
  const std::lock_guard lock(release_mutex_);
  if (!is_running_) return;
  released_.store(true, std::memory_order_release);
  for (int flag = 0; flag < kNumFlags; ++flag) {
    if (waited_flags_ >> flag & 1) raise_at_least(flag, kReleased);
  }
  flags_changed();
}

void Executable::wait() {
  const int64_t begin = platform::now_ns();
  try {
    while (!done()) pause_after(platform::now_ns() - begin);
  } catch (...) {
    const std::lock_guard lock(release_mutex_);
    is_running_ = false;
    throw;
  }
  const std::lock_guard lock(release_mutex_);
  is_running_ = false;
}

void Executable::finish() noexcept {
  {
    const std::lock_guard lock(release_mutex_);
    if (!is_running_) return;  // another round may run, which is none of our business
  }
  release();
  try {
    wait();
  } catch (const Failure&) {  // it was reported to who waited, or nobody did
  }
}

DeviceMemory Device::memory() const {
  const std::lock_guard lock(mutex_);
  const uint64_t sum = used_[0] + used_[1] + used_[2] + used_[3];
  return {.budget = budget_bytes_,
          .context = used_[static_cast<int>(Use::kContext)],
          .modules = used_[static_cast<int>(Use::kModules)],
          .ranges = used_[static_cast<int>(Use::kRanges)],
          .executables = used_[static_cast<int>(Use::kExecutables)],
          .left = budget_bytes_ > sum ? budget_bytes_ - sum : 0};
}

void Device::charge(Use use, uint64_t bytes, const char* what) {
  const std::lock_guard lock(mutex_);
  const uint64_t sum = used_[0] + used_[1] + used_[2] + used_[3];
  if (bytes > budget_bytes_ || sum > budget_bytes_ - bytes) {
    fail(ATSC_DEVICE_ERROR,
         "%s need %.1f MiB of device memory, but of the budget of %.1f MiB only %.1f are left: "
         "give more, or compile for less",
         what, mib(bytes), mib(budget_bytes_),
         mib(budget_bytes_ > sum ? budget_bytes_ - sum : 0));
  }
  used_[static_cast<int>(use)] += bytes;
}

void Device::refund(Use use, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  used_[static_cast<int>(use)] -= bytes;
}

DeviceRange Device::allocate(uint64_t bytes, const char* what) {
  if (bytes == 0) return {};
  charge(Use::kRanges, bytes, what);
  const DeviceAddress address = allocate_raw(bytes);
  if (address == 0) {
    refund(Use::kRanges, bytes);
    fail(ATSC_DEVICE_ERROR,
         "%s has not the %.1f MiB free that %s need: close other programs that use it, or give a "
         "smaller budget",
         info_.name.c_str(), mib(bytes), what);
  }
  return {this, address, bytes};
}

std::optional<HostRange> Device::pin(void* memory, uint64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  if (bytes == 0 || bytes > kMaxPinnedBytes || begin % kPage != 0) {
    fail(ATSC_INTERNAL_ERROR, "pinning %.1f MiB at %p: expected whole pages and at most %.0f MiB",
         mib(bytes), memory, mib(kMaxPinnedBytes));
  }
  const DeviceAddress address = pin_raw(memory, bytes);
  if (address == 0) return std::nullopt;
  HostRange range;
  range.device_ = this;
  range.host_ = static_cast<std::byte*>(memory);
  range.address_ = address;
  range.bytes_ = bytes;
  const std::lock_guard lock(mutex_);
  pinned_.emplace(begin, bytes);
  return range;
}

HostRange Device::allocate_host(uint64_t bytes, const char* what) {
  bytes = std::max((bytes + kPage - 1) / kPage * kPage, kPage);
  platform::Mapping memory = platform::Mapping::anonymous(bytes, false, what);
  std::optional<HostRange> range = pin(memory.data(), bytes);
  if (!range) {
    fail(ATSC_DEVICE_ERROR,
         "the system refuses to pin %.1f MiB of memory for %s: raise the limit on locked memory "
         "(ulimit -l), or close programs that hold much of it",
         mib(bytes), what);
  }
  range->memory_ = std::move(memory);
  return std::move(*range);
}

HostRange Device::take_control(uint64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(
        spare_controls_, [&](const HostRange& spare) { return spare.bytes() >= bytes; });
    if (found != spare_controls_.end()) {
      HostRange control = std::move(*found);
      spare_controls_.erase(found);
      return control;
    }
  }
  return allocate_host(std::max(bytes, kControlBytes), "the flags of a device round");
}

void Device::give_control(HostRange control) noexcept {
  const std::lock_guard lock(mutex_);
  spare_controls_.push_back(std::move(control));
}

void Device::unpin(std::byte* memory, uint64_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    pinned_.erase(reinterpret_cast<uintptr_t>(memory));
  }
  unpin_raw(memory, bytes);
}

std::vector<Device::Piece> Device::pieces_of(const void* memory, uint64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t end = begin + bytes;
  std::vector<Piece> pieces;
  const std::lock_guard lock(mutex_);
  for (uintptr_t at = begin; at < end;) {
    const auto next = pinned_.upper_bound(at);
    uintptr_t stop = next == pinned_.end() ? end : std::min(end, next->first);
    bool pinned = false;
    if (next != pinned_.begin()) {
      const auto& [first, size] = *std::prev(next);
      pinned = at < first + size;
      if (pinned) stop = std::min(end, first + size);
    }
    pieces.push_back({at - begin, stop - at, pinned});
    at = stop;
  }
  return pieces;
}

bool Device::may_be_graph(const CommandList& list) const {
  if (!info_.has_graphs) return false;
  return std::ranges::all_of(list.commands(), [&](const Command& command) {
    if (command.kind == Command::Kind::kWaitFlag) return info_.has_stream_waits;
    if (command.kind != Command::Kind::kCopyToDevice &&
        command.kind != Command::Kind::kCopyToHost) {
      return true;
    }
    return std::ranges::all_of(pieces_of(command.host, command.bytes), &Piece::pinned);
  });
}

}  // namespace atsc
