// A device with memory of its own, as the executor sees it. Two implement it: a CUDA GPU by the
// driver API (device_cuda.h), and a virtual one in host memory (device_virtual.h) that tests every
// path where there is no GPU.
//
// How to use it
//
//   device  = open_cuda_device(...)                    context, streams; counts what that costs
//   device->load_modules(...)                          all modules of the plan, eagerly
//   range   = device->allocate(bytes, "slots")         counted against the budget
//   pinned  = device->pin(weights, bytes)              nullopt where the system refuses
//   CommandList list; list.launch(...); ...            plain data, any thread, no device calls
//   round   = device->build(list, BuildMode::kGraph)   any thread, also while a round runs
//   round->run(); ... round->await(...); round->raise(...); ... round->wait();
//
// Rounds. A list is recorded once and run many times: what changes from round to round lies in
// memory that its commands read (begin a decode round with a `transfer` of RoundParams, token ids
// and logit rows from mapped host memory into device memory). Only one executable runs at a time:
// `run` after the `wait` of the one before. Swapping choices means: build the next on another
// thread, run it at the next round boundary, then destroy the old one (destroying costs
// microseconds; both count in the budget meanwhile). Ranges must outlive the executables that name
// them.
//
// Branches. Commands of one branch run in order. kCompute is the main one; the others run beside it
// and begin when the round begins; `run` is over when all branches are. An order between branches
// exists only where the list says so: `record` a point on one, `wait_for` it on the other. For a
// promotion that is: slot free (point after its last consumer on kCompute) -> copy_to_device on
// kCopy -> point -> wait_for on kCompute -> consumer.
//
// Flags. Each executable has kNumFlags words in mapped host memory, all 0 when `run` begins. A wait
// is over when the word has *reached* the value, so give each flag ascending values from 1 and one
// writer: the host (`raise`, then the device waits for it) or the device (`send` or `signal`, then
// the host waits by `await`). One flag a direction serves a whole decode round. Order is guaranteed
// with the payload: what the host wrote before `raise` is seen by commands after the device's wait,
// and what a `send` wrote is seen by the host after `await`. While the device waits, other programs may
// have it, and it comes back when their time slice is over. A wait that spins keeps it, for as long as
// its own slice lasts: in a graph a kernel polls the flag, on the branch of what follows. (A kernel on
// another branch keeps what waits from being looked at until the next slice.)
//
// Hand-offs cross by copy kernels on mapped memory (zero-copy), never by the copy engines, so they
// do not queue behind weights. On an H200 one of 20 KiB costs 10 us there and back in a graph, 15
// us in launches; large ones run at the link's rate (10 MiB: 49 GB/s). tests/runtime/device has the
// program that measures all this.
//
// Ending early. `release` (any thread) lets every wait of the device pass, now and for the rest of
// the round, and makes every `await` return false; the device then runs through what is left on
// whatever data there is, so the round's results are worthless: call `wait`, then report the error.
// What serves as an index must be a valid one even then: mapped memory begins as zeros and keeps
// what was last written, device memory begins as anything.
// It acts on the round that is running: one that comes before `run` has no effect on it, so look at
// the session's cancel flag after `run`. Destroying a running executable releases it and waits.
//
// Failures. A fault on the device ends every `await`, `done` and `wait` with a Failure instead of a
// hang: they ask the device each millisecond. After a fault the device serves nothing any more.
// Everything here raises Failure(ATSC_DEVICE_ERROR) with one line for a person.
//
// Stamps. A hand-off writes the device's clock where a list asks for it, at 0.1 us or less: `send`
// after its payload, a transfer before its own. `stamp` alone is a kernel of its own (about 1 us on
// the branch). Among copies it would hold the engine up until the device has time for a kernel, which
// takes long beside another program: put it on kStamps, behind a point of the copies' branch, where
// nothing waits for it. They are read after `wait`; Device::clock_offset_ns() puts them on the host's
// clock.
//
// Threads. Device: allocate, pin, build and uploads from any thread. Executable: run, await, raise
// and wait from the thread that runs the round; release from any.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device_kernel.h"
#include "platform.h"
#include "tables.h"

namespace atsc {

// Where something lies as the device sees it: in its own memory or in mapped host memory. Sums stay
// valid inside a range. Never dereferenced by the host: on the virtual device it is no valid
// pointer.
using DeviceAddress = uint64_t;

inline void* as_operand(DeviceAddress address) { return reinterpret_cast<void*>(address); }

struct DeviceInfo {
  std::string name;
  int sm = 0;              // compute capability, 90 for sm_90; 0: virtual
  int num_sms = 0;
  int driver_version = 0;  // 13000: CUDA 13.0; 0: virtual
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;        // when the device was opened, its context already counted out
  bool has_stream_waits = false;  // a stream can wait for a word of memory
  bool has_graphs = false;        // rounds can be graphs; those with waits need both
};

// What the process holds of the device's memory, in bytes.
struct DeviceMemory {
  uint64_t budget;
  uint64_t context;      // of the driver; 0 if it could not be measured
  uint64_t modules;
  uint64_t ranges;
  uint64_t executables;
  uint64_t left;         // of the budget
};

class Device;

// Memory of the device; freed with the object. Aligned to 256 bytes. Not cleared: the virtual
// device fills it with 0xFF (NaN as fp16, bf16 and fp32), so that a forgotten transfer shows.
class DeviceRange {
 public:
  DeviceRange() = default;
  DeviceRange(Device* device, DeviceAddress address, uint64_t bytes)
      : device_(device), address_(address), bytes_(bytes) {}
  ~DeviceRange();
  DeviceRange(DeviceRange&& other) noexcept { *this = std::move(other); }
  DeviceRange& operator=(DeviceRange&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  DeviceAddress address() const { return address_; }
  uint64_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  DeviceAddress address_ = 0;
  uint64_t bytes_ = 0;
};

// Host memory that the device reads at full speed (pinned) and by address (mapped). Unpinned with
// the object; frees the memory too if the device allocated it.
class HostRange {
 public:
  HostRange() = default;
  HostRange(Device* device, std::byte* host, DeviceAddress address, uint64_t bytes)
      : device_(device), host_(host), address_(address), bytes_(bytes) {}
  ~HostRange();
  HostRange(HostRange&& other) noexcept { *this = std::move(other); }
  HostRange& operator=(HostRange&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(host_, other.host_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
    return *this;
  }

  std::byte* host() const { return host_; }             // for the CPU
  DeviceAddress address() const { return address_; }    // of the same bytes, for the device
  uint64_t bytes() const { return bytes_; }

 private:
  friend class Device;
  Device* device_ = nullptr;
  std::byte* host_ = nullptr;
  DeviceAddress address_ = 0;
  uint64_t bytes_ = 0;
  platform::Mapping memory_;
};

enum class Branch : uint8_t { kCompute, kCopy, kCopy2, kStamps };
inline constexpr int kNumBranches = 4;

inline constexpr int kNumFlags = 32;
inline constexpr uint32_t kMaxFlagValue = (1u << 30) - 1;
inline constexpr int kNoStamp = -1;

// What a kernel is to a device: made by Device::kernel_of, valid while the device lives.
struct KernelHandle {
  const char* name = nullptr;
  const void* entry = nullptr;  // the device's own record of it
};

struct Command {
  enum class Kind : uint8_t {
    kLaunch,        // kernel, args, shape
    kCopyToDevice,  // target, host, bytes
    kCopyToHost,    // host, source, bytes
    kTransfer,      // target, source, bytes, stamp (before)
    kSend,          // target, source, bytes, stamp (after), then flag = value
    kWaitFlag,      // until flag has reached value; spins
    kStamp,
    kRecord,        // point
    kWaitPoint,
  };
  Kind kind;
  Branch branch;
  KernelHandle kernel = {};
  DeviceArgs args = {};
  LaunchShape shape = {};
  DeviceAddress target = 0, source = 0;
  void* host = nullptr;
  uint64_t bytes = 0;
  int flag = 0;
  uint32_t value = 0;
  bool spins = false;
  int stamp = kNoStamp;
  int point = 0;
};

// The commands of a round (or of a segment of one), in the order of recording. Plain data:
// recording calls no device and copies its arguments. Raises Failure(ATSC_INTERNAL_ERROR) when
// misused.
class CommandList {
 public:
  using Point = int;

  // `shape` holds the rows that the grid is made for: at least those that RoundParams will say.
  void launch(Branch branch, KernelHandle kernel, const DeviceArgs& args, const LaunchShape& shape);

  // By a copy engine: for weights and other large things. `source` should be pinned; a list with
  // one that is not runs as launches, since a graph cannot hold such a copy.
  void copy_to_device(Branch branch, DeviceAddress target, const void* source, uint64_t bytes);
  void copy_to_host(Branch branch, void* target, DeviceAddress source, uint64_t bytes);

  // By a kernel, between device memory and mapped host memory in any direction; multiples of 4
  // bytes.
  void transfer(Branch branch, DeviceAddress target, DeviceAddress source, uint64_t bytes,
                int stamp = kNoStamp);

  // A hand-off to the host: a transfer, then the flag is raised to `value`.
  void send(Branch branch, DeviceAddress target, DeviceAddress source, uint64_t bytes, int flag,
            uint32_t value, int stamp = kNoStamp);
  void signal(Branch branch, int flag, uint32_t value, int stamp = kNoStamp);

  // A hand-off from the host: waits until the host has raised the flag, then a transfer.
  void receive(Branch branch, DeviceAddress target, DeviceAddress source, uint64_t bytes, int flag,
               uint32_t value, int stamp = kNoStamp, bool spins = false);
  void wait_flag(Branch branch, int flag, uint32_t value, bool spins = false);

  // What follows a wait_for of a point runs after all that came before the point on its branch.
  Point record(Branch branch);
  void wait_for(Branch branch, Point point);

  void stamp(Branch branch, int stamp);

  std::span<const Command> commands() const { return commands_; }
  int num_points() const { return num_points_; }
  int num_stamps() const { return num_stamps_; }

  // One line a command, for dumps and error notes.
  std::string text() const;

 private:
  Command& add(Command::Kind kind, Branch branch);

  std::vector<Command> commands_;
  int num_points_ = 0;
  int num_stamps_ = 0;
};

// A list made ready to run again and again.
class Executable {
 public:
  virtual ~Executable();  // ends what runs, by releasing it
  Executable(const Executable&) = delete;

  // Clears flags and stamps and starts the round; returns at once.
  void run();

  // Host -> device: lets the device's waits for `flag` up to `value` pass.
  void raise(int flag, uint32_t value);

  // Device -> host: returns when `flag` has reached `value`. False: the round was released.
  bool await(int flag, uint32_t value);

  // Ends all waits of the round that runs now, on both sides.
  void release();

  // Returns when the round is over; also after a release.
  void wait();
  virtual bool done() = 0;

  // Nanoseconds of the device's clock; 0: not reached. After `wait`.
  int64_t stamp(int index) const { return stamps()[index]; }

  virtual bool is_graph() const = 0;
  virtual uint64_t device_bytes() const = 0;  // held by the executable itself

 protected:
  // A flag has a cache line of its own.
  struct alignas(64) Flag {
    std::atomic<uint32_t> value;
  };
  static_assert(sizeof(Flag) == 64);

  Executable(Device& device, const CommandList& list);

  // In mapped host memory: kNumFlags flags, then the stamps.
  Flag* flags() const { return reinterpret_cast<Flag*>(control_.host()); }
  int64_t* stamps() const { return reinterpret_cast<int64_t*>(flags() + kNumFlags); }
  DeviceAddress flag_address(int flag) const { return control_.address() + sizeof(Flag) * flag; }
  DeviceAddress stamp_address(int stamp) const {  // 0 for kNoStamp
    if (stamp == kNoStamp) return 0;
    return flag_address(kNumFlags) + sizeof(int64_t) * static_cast<uint64_t>(stamp);
  }
  bool is_released() const { return released_.load(std::memory_order_acquire); }

  virtual void start() = 0;
  virtual void flags_changed() {}  // the host raised a flag

  // Releases and waits. For the destructors of implementations: `done` must still work.
  void finish() noexcept;

 private:
  void raise_at_least(int flag, uint32_t value);

  Device& device_;
  HostRange control_;
  int num_stamps_;
  uint32_t waited_flags_ = 0;  // bit i: the device waits for flag i
  std::mutex release_mutex_;   // a release comes before a run or after it, never between
  bool is_running_ = false;
  std::atomic<bool> released_{false};
};

// kGraph falls back to kLaunches where the device or the list does not allow a graph. On an H200 a
// graph of 480 commands takes 2 ms to build, and 300 small kernels then take 340 us; as launches
// they take 1060 us, with nothing to build, which suits prefill chunks. Launches are issued by a
// thread of the device, so `run` never blocks. kSynchronous is what a plain engine does, to compare
// with: the commands of all branches on one stream in the order of recording, so that no copy runs
// beside a kernel; payloads cross by copies, and after each send the host waits for the stream.
enum class BuildMode : uint8_t { kGraph, kLaunches, kSynchronous };

inline constexpr uint64_t kMaxPinnedBytes = uint64_t{1} << 30;  // of one request

class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;

  const DeviceInfo& info() const { return info_; }
  DeviceMemory memory() const;

  // Device memory; `what` names it in the error when the budget or the device has not enough.
  // Allocating and freeing may wait for what runs: do neither beside a round.
  DeviceRange allocate(uint64_t bytes, const char* what);

  // Pins memory that is there already (page-aligned, at most kMaxPinnedBytes: split larger regions,
  // so that a refusal costs one piece and addresses stay contiguous for the CPU; copies may cross
  // pieces). nullopt: the system refuses; copies from it work but are slower and keep a list from
  // being a graph.
  std::optional<HostRange> pin(void* memory, uint64_t bytes);

  // Pinned memory for hand-offs: zero at first, page-aligned, at most kMaxPinnedBytes. A refusal is
  // a Failure, since nothing works without it.
  HostRange allocate_host(uint64_t bytes, const char* what);

  // Done when they return. Host memory of any kind.
  virtual void upload(DeviceAddress target, const void* source, uint64_t bytes) = 0;
  virtual void download(void* target, DeviceAddress source, uint64_t bytes) = 0;
  virtual void fill(DeviceAddress target, uint8_t byte, uint64_t bytes) = 0;

  // Loads of every module index the binary for this device's compute capability, or else the PTX
  // that its driver can compile; `read` returns a file's bytes. The hand-off kernels
  // (templates/cuda/handoff) must be among them. Does nothing on the virtual device.
  virtual void load_modules(std::span<const ModuleEntry> modules,
                            const std::function<std::string(const char* file)>& read) = 0;

  // The kernel of a node for rounds of few or many rows, and the scratch that a launch of it needs
  // (zero it once). Its name is null if the node has no kernel here and runs on the host.
  virtual KernelHandle kernel_of(const NodeEntry& node, bool few_rows) = 0;
  virtual uint64_t scratch_bytes(KernelHandle kernel, const LaunchShape& shape) = 0;

  virtual std::unique_ptr<Executable> build(const CommandList& list, BuildMode mode) = 0;

  // Whatever mode is asked for, build what is at least as plain as this. Before the first build.
  void set_least_plain(BuildMode mode) { least_plain_ = mode; }

  // Add to a stamp to get platform::now_ns() of the same moment; good to some microseconds.
  // Measures anew with each call, while no round runs.
  virtual int64_t clock_offset_ns() = 0;

  // Waits until what the host began at that moment has taken as long as a test wants. Only the
  // virtual device does.
  virtual void slow_down_host(int64_t begin_ns) const { (void)begin_ns; }

  // Aborts with node and operand if a CPU kernel was handed a device address. Only the virtual
  // device can tell for certain; free on the others.
  virtual void check_host_args(const char* node, const KernelArgs& args) const {
    (void)node, (void)args;
  }

 protected:
  explicit Device(uint64_t budget_bytes) : budget_bytes_(budget_bytes) {}

  enum class Use : uint8_t { kContext, kModules, kRanges, kExecutables };
  // Raises Failure where the budget has not so much left.
  void charge(Use use, uint64_t bytes, const char* what);
  void refund(Use use, uint64_t bytes);

  // A copy's part whose host side lies in one pinned range, or outside of all.
  struct Piece {
    uint64_t offset, bytes;
    bool pinned;
  };
  // No copy may cross the border of a pinned range.
  std::vector<Piece> pieces_of(const void* memory, uint64_t bytes) const;
  bool may_be_graph(const CommandList& list) const;
  BuildMode mode_of(const CommandList& list, BuildMode wanted) const {
    const BuildMode mode = std::max(wanted, least_plain_);
    return mode == BuildMode::kGraph && !may_be_graph(list) ? BuildMode::kLaunches : mode;
  }

  // 0: not enough memory.
  virtual DeviceAddress allocate_raw(uint64_t bytes) = 0;
  virtual void free_raw(DeviceAddress address, uint64_t bytes) noexcept = 0;
  // 0: refused.
  virtual DeviceAddress pin_raw(void* memory, uint64_t bytes) = 0;
  virtual void unpin_raw(void* memory, uint64_t bytes) noexcept = 0;

  DeviceInfo info_;

  // Implementations call it in their destructor, while they can still unpin.
  void drop_spare_controls() { spare_controls_.clear(); }

 private:
  friend class DeviceRange;
  friend class HostRange;
  friend class Executable;
  void unpin(std::byte* memory, uint64_t bytes) noexcept;

  // Mapped memory for an executable's flags and stamps. It is kept for the next one, since pinning
  // may stall the round that runs meanwhile.
  HostRange take_control(uint64_t bytes);
  void give_control(HostRange control) noexcept;

  const uint64_t budget_bytes_;
  BuildMode least_plain_ = BuildMode::kGraph;
  mutable std::mutex mutex_;
  uint64_t used_[4] = {};
  std::map<uintptr_t, uint64_t> pinned_;  // begin -> bytes
  std::vector<HostRange> spare_controls_;
};

}  // namespace atsc
