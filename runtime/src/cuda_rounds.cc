#include "cuda_rounds.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <variant>
#include <vector>

#include "backoff.h"
#include "cuda_device.h"
#include "failure.h"

namespace atsc {

using platform::now_ns;

namespace {

constexpr uint64_t kOneBlockBytes = 64 << 10;  // largest payload that one block sends with its flag
constexpr unsigned kSendThreads = 1024, kTransferThreads = 256;
constexpr uint64_t kMostBlocks = 256;
constexpr int64_t kPollNs = 1'000'000;
constexpr uint64_t kGraphBytes = 4 << 20, kNodeBytes = 4 << 10;  // at most; 0 was measured

// A command as the driver takes it.
struct Step {
  enum class Kind : uint8_t {
    kKernel,
    kCopy,
    kMove,     // from an address of the device to another, one of them in mapped host memory
    kWaitFlag,
    kRecord,
    kWaitPoint,
    kSettle,   // the host waits for the stream and raises the flag
  };
  Kind kind;
  Branch branch;
  cuda::Function function = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  unsigned block = 1, shared_bytes = 0;
  std::variant<DeviceArgs, HandOffArgs> args = {};
  bool to_device = false;
  std::byte* host = nullptr;
  cuda::DevicePtr device = 0, from = 0;
  uint64_t bytes = 0;
  int flag = 0;
  uint32_t value = 0;
  int point = 0;

  void* argument() {
    return std::visit([](auto& held) -> void* { return &held; }, args);
  }
};

}  // namespace

class CudaRound : public Executable {
 protected:
  CudaRound(CudaDevice& device, const CommandList& list, BuildMode mode)
      : Executable(device, list),
        gpu_(device),
        context_(device.context()),
        is_synchronous_(mode == BuildMode::kSynchronous) {
    if (device.hand_off() == nullptr) {
      fail(ATSC_PLAN_ERROR, "the plan has no hand-off kernels: compile the model again");
    }
  }

  std::vector<Step> lower(const CommandList& list);

  // Whether all commands of a stream are over.
  bool is_idle(cuda::Stream stream) const {
    const cuda::Result result = context_.driver().cuStreamQuery(stream);
    if (result == cuda::kNotReady) return false;
    context_.check(result, "running a round");
    return true;
  }

  CudaDevice& gpu_;
  const CudaContext& context_;
  const bool is_synchronous_;

 private:
  void lower(const Command& command, std::vector<Step>& steps);
  void add_hand_off(Branch branch, const HandOffArgs& args, uint32_t blocks, unsigned threads,
                    std::vector<Step>& steps) const;
  void add_copy(const Command& command, std::vector<Step>& steps) const;
  void add_hand_offs(const Command& command, std::vector<Step>& steps) const;
  void add_plain_hand_offs(const Command& command, std::vector<Step>& steps) const;
};

std::vector<Step> CudaRound::lower(const CommandList& list) {
  std::vector<Step> steps;
  steps.reserve(list.commands().size());
  for (Command command : list.commands()) {
    if (is_synchronous_) command.branch = Branch::kCompute;
    lower(command, steps);
  }
  return steps;
}

void CudaRound::lower(const Command& command, std::vector<Step>& steps) {
  Step step{.kind = Step::Kind::kKernel, .branch = command.branch};
  switch (command.kind) {
    case Command::Kind::kLaunch: {
      const auto& kernel = *static_cast<const CudaDevice::Kernel*>(command.kernel.entry);
      step.function = kernel.function;
      LaunchShape shape = command.shape;
      shape.num_sms = gpu_.info().num_sms;
      kernel.table->grid(shape, step.grid);
      if (step.grid[0] == 0 || step.grid[1] == 0 || step.grid[2] == 0) {
        fail(ATSC_INTERNAL_ERROR, "kernel %s has an empty grid for %lld rows", command.kernel.name,
             static_cast<long long>(shape.rows));
      }
      step.block = static_cast<unsigned>(kernel.table->block);
      step.shared_bytes = static_cast<unsigned>(kernel.table->shared_bytes);
      step.args = command.args;
      break;
    }
    case Command::Kind::kCopyToDevice:
    case Command::Kind::kCopyToHost: return add_copy(command, steps);
    case Command::Kind::kTransfer:
    case Command::Kind::kSend:
    case Command::Kind::kStamp:
      return is_synchronous_ ? add_plain_hand_offs(command, steps) : add_hand_offs(command, steps);
    case Command::Kind::kWaitFlag:
      step.kind = Step::Kind::kWaitFlag;
      step.flag = command.flag;
      step.value = command.value;
      break;
    case Command::Kind::kRecord:
    case Command::Kind::kWaitPoint:
      step.kind = command.kind == Command::Kind::kRecord ? Step::Kind::kRecord
                                                         : Step::Kind::kWaitPoint;
      step.point = command.point;
      break;
  }
  steps.push_back(step);
}

void CudaRound::add_copy(const Command& command, std::vector<Step>& steps) const {
  const bool to_device = command.kind == Command::Kind::kCopyToDevice;
  for (const CudaDevice::Piece& piece : gpu_.pieces_of(command.host, command.bytes)) {
    Step step{.kind = Step::Kind::kCopy, .branch = command.branch};
    step.to_device = to_device;
    step.host = static_cast<std::byte*>(command.host) + piece.offset;
    step.device = (to_device ? command.target : command.source) + piece.offset;
    step.bytes = piece.bytes;
    steps.push_back(step);
  }
}

void CudaRound::add_hand_offs(const Command& command, std::vector<Step>& steps) const {
  HandOffArgs payload{};
  payload.target = as_operand(command.target);
  payload.source = as_operand(command.source);
  payload.bytes = command.bytes;
  auto* stamp = static_cast<long long*>(as_operand(stamp_address(command.stamp)));
  const uint64_t wide = (command.bytes + 15) / 16;
  const auto blocks = [&](unsigned threads) {
    const uint64_t enough = (wide + threads - 1) / threads;
    return static_cast<uint32_t>(std::clamp<uint64_t>(enough, 1, kMostBlocks));
  };
  if (command.kind == Command::Kind::kTransfer) {
    payload.stamp_before = stamp;
    return add_hand_off(command.branch, payload, blocks(kTransferThreads), kTransferThreads, steps);
  }
  const bool one_block = command.bytes <= kOneBlockBytes;
  HandOffArgs tail = one_block ? payload : HandOffArgs{};
  tail.stamp_after = stamp;
  if (command.kind == Command::Kind::kSend) {
    tail.flag = static_cast<unsigned*>(as_operand(flag_address(command.flag)));
    tail.value = command.value;
  }
  if (!one_block) {
    add_hand_off(command.branch, payload, blocks(kTransferThreads), kTransferThreads, steps);
  }
  const unsigned threads = one_block && command.bytes > 0 ? kSendThreads : 32;
  add_hand_off(command.branch, tail, 1, threads, steps);
}

// A copy, and where it is a send, the host waits for it. Stamps still are the hand-off kernel's.
void CudaRound::add_plain_hand_offs(const Command& command, std::vector<Step>& steps) const {
  const auto add_stamp = [&] {
    if (command.stamp == kNoStamp) return;
    HandOffArgs stamp{};
    stamp.stamp_after = static_cast<long long*>(as_operand(stamp_address(command.stamp)));
    add_hand_off(command.branch, stamp, 1, 32, steps);
  };
  const bool sends = command.kind == Command::Kind::kSend;
  if (!sends) add_stamp();
  if (command.bytes > 0) {
    steps.push_back({.kind = Step::Kind::kMove,
                     .branch = command.branch,
                     .device = command.target,
                     .from = command.source,
                     .bytes = command.bytes});
  }
  if (!sends) return;
  add_stamp();
  steps.push_back({.kind = Step::Kind::kSettle,
                   .branch = command.branch,
                   .flag = command.flag,
                   .value = command.value});
}

void CudaRound::add_hand_off(Branch branch, const HandOffArgs& args, uint32_t blocks,
                             unsigned threads, std::vector<Step>& steps) const {
  Step step{.kind = Step::Kind::kKernel, .branch = branch};
  step.function = gpu_.hand_off();
  step.grid[0] = blocks;
  step.block = threads;
  step.args = args;
  steps.push_back(step);
}

// A graph, made node by node: a branch is a chain, and a wait for a point is one more edge.
class CudaGraph final : public CudaRound {
 public:
  CudaGraph(CudaDevice& device, const CommandList& list);
  ~CudaGraph() override;

  bool is_graph() const override { return true; }
  uint64_t device_bytes() const override { return bytes_; }

  bool done() override {
    const CudaContext::Current current(context_);
    return is_idle(gpu_.stream(Branch::kCompute));
  }

 private:
  using Nodes = std::vector<cuda::GraphNode>;

  void start() override {
    const CudaContext::Current current(context_);
    context_.check(context_.driver().cuGraphLaunch(exec_, gpu_.stream(Branch::kCompute)),
                   "starting a round");
  }

  void add_nodes(cuda::Graph graph, const CommandList& list);
  cuda::GraphNode add_node(cuda::Graph graph, Step& step, const Nodes& after);
  void instantiate(cuda::Graph graph);

  cuda::GraphExec exec_ = nullptr;
  uint64_t num_nodes_ = 0;
  uint64_t bytes_ = 0;
};

CudaGraph::CudaGraph(CudaDevice& device, const CommandList& list)
    : CudaRound(device, list, BuildMode::kGraph) {
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  cuda::Graph graph = nullptr;
  context_.check(driver.cuGraphCreate(&graph, 0), "making a graph");
  try {
    add_nodes(graph, list);
    instantiate(graph);
  } catch (...) {
    driver.cuGraphDestroy(graph);
    if (exec_ != nullptr) driver.cuGraphExecDestroy(exec_);
    throw;
  }
  driver.cuGraphDestroy(graph);
}

CudaGraph::~CudaGraph() {
  finish();
  const CudaContext::Current current(context_);
  context_.driver().cuGraphExecDestroy(exec_);
  gpu_.refund_executable(bytes_);
}

void CudaGraph::add_nodes(cuda::Graph graph, const CommandList& list) {
  Nodes ends[kNumBranches];  // what the next command of a branch follows
  std::vector<Nodes> points(static_cast<size_t>(list.num_points()));
  for (Step& step : lower(list)) {
    Nodes& end = ends[static_cast<int>(step.branch)];
    if (step.kind == Step::Kind::kRecord) {
      points[static_cast<size_t>(step.point)] = end;
    } else if (step.kind == Step::Kind::kWaitPoint) {
      for (cuda::GraphNode node : points[static_cast<size_t>(step.point)]) {
        if (std::ranges::find(end, node) == end.end()) end.push_back(node);
      }
    } else {
      end = {add_node(graph, step, end)};
      ++num_nodes_;
    }
  }
}

cuda::GraphNode CudaGraph::add_node(cuda::Graph graph, Step& step, const Nodes& after) {
  const cuda::Driver& driver = context_.driver();
  cuda::GraphNode node = nullptr;
  cuda::Result result = cuda::kSuccess;
  if (step.kind == Step::Kind::kKernel) {
    void* params[] = {step.argument()};
    const cuda::KernelNodeParams kernel = {
        step.function, step.grid[0], step.grid[1], step.grid[2],      step.block, 1,
        1,             step.shared_bytes, params,  nullptr, nullptr, nullptr};
    result = driver.cuGraphAddKernelNode(&node, graph, after.data(), after.size(), &kernel);
  } else if (step.kind == Step::Kind::kCopy) {
    cuda::CopyParams copy{};
    cuda::CopyParams::Side& host = step.to_device ? copy.source : copy.target;
    cuda::CopyParams::Side& device = step.to_device ? copy.target : copy.source;
    host.type = cuda::kHostMemory;
    host.host = step.host;
    device.type = cuda::kDeviceMemory;
    device.device = step.device;
    copy.width_bytes = step.bytes;
    copy.height = copy.depth = 1;
    result = driver.cuGraphAddMemcpyNode(&node, graph, after.data(), after.size(), &copy,
                                         context_.handle());
  } else {
    cuda::MemOp op{};
    op.wait = {cuda::kOpWaitValue32, flag_address(step.flag), step.value, cuda::kWaitUntilReached,
               0};
    const cuda::MemOpNodeParams wait = {context_.handle(), 1, &op, 0};
    result = driver.cuGraphAddBatchMemOpNode(&node, graph, after.data(), after.size(), &wait);
  }
  context_.check(result, "adding to a graph");
  return node;
}

void CudaGraph::instantiate(cuda::Graph graph) {
  const cuda::Driver& driver = context_.driver();
  const uint64_t before = gpu_.free_bytes();
  context_.check(driver.cuGraphInstantiate(&exec_, graph, 0), "making a graph ready");
  context_.check(driver.cuGraphUpload(exec_, gpu_.side_stream()), "uploading a graph");
  context_.check(driver.cuStreamSynchronize(gpu_.side_stream()), "uploading a graph");
  const uint64_t after = gpu_.free_bytes();
  // Another program may allocate at the same moment: count no more than a graph can take.
  const uint64_t most = kGraphBytes + kNodeBytes * num_nodes_;
  const uint64_t taken = std::min(before > after ? before - after : 0, most);
  gpu_.charge_executable(taken);
  bytes_ = taken;
}

// The same round by launches: each branch is a stream, a point is an event, and a wait for a flag
// is one of the issuing thread, which goes on with the other branches meanwhile. If it is
// synchronous, there is one branch, and that thread also waits for the stream at each send.
class CudaLaunches final : public CudaRound {
 public:
  CudaLaunches(CudaDevice& device, const CommandList& list, BuildMode mode);
  ~CudaLaunches() override;

  bool is_graph() const override { return false; }
  uint64_t device_bytes() const override { return 0; }
  bool done() override;

  // By the launcher's thread, with the context current.
  void issue();

 private:
  void start() override {
    CudaLauncher& launcher = gpu_.launcher();
    was_issued_.store(false, std::memory_order_relaxed);
    launcher.issue(*this);
  }

  void issue_all();
  bool issue_next(Step& step);

  std::vector<Step> branches_[kNumBranches];
  std::vector<cuda::Event> events_;
  std::vector<bool> is_recorded_;
  std::string error_;                    // of issue; read after was_issued_
  std::atomic<bool> was_issued_{true};
};

CudaLaunches::CudaLaunches(CudaDevice& device, const CommandList& list, BuildMode mode)
    : CudaRound(device, list, mode) {
  const CudaContext::Current current(context_);
  for (const Step& step : lower(list)) branches_[static_cast<int>(step.branch)].push_back(step);
  for (int point = 0; point < list.num_points(); ++point) {
    cuda::Event event = nullptr;
    context_.check(context_.driver().cuEventCreate(&event, cuda::kEventWithoutTiming),
                   "making an event");
    events_.push_back(event);
  }
  is_recorded_.resize(events_.size());
}

CudaLaunches::~CudaLaunches() {
  finish();
  while (!was_issued_.load(std::memory_order_acquire)) std::this_thread::yield();
  const CudaContext::Current current(context_);
  for (cuda::Event event : events_) context_.driver().cuEventDestroy(event);
}

bool CudaLaunches::done() {
  // Asking a stream takes a lock that the issuing thread needs, and that one looks out for faults.
  if (!was_issued_.load(std::memory_order_acquire)) return false;
  if (!error_.empty()) fail(ATSC_DEVICE_ERROR, "%s", error_.c_str());
  const CudaContext::Current current(context_);
  bool all_idle = true;
  for (int branch = 0; branch < kNumBranches; ++branch) {
    if (!branches_[branch].empty()) {
      all_idle &= is_idle(gpu_.stream(static_cast<Branch>(branch)));
    }
  }
  return all_idle;
}

void CudaLaunches::issue() {
  try {
    error_.clear();
    issue_all();
  } catch (const Failure& failure) {
    error_ = failure.what();
  }
  was_issued_.store(true, std::memory_order_release);
}

void CudaLaunches::issue_all() {
  std::fill(is_recorded_.begin(), is_recorded_.end(), false);
  size_t next[kNumBranches] = {};
  int64_t blocked_since = 0, next_poll = 0;
  for (;;) {
    bool all_issued = true, any_issued = false;
    for (int branch = 0; branch < kNumBranches; ++branch) {
      std::vector<Step>& steps = branches_[branch];
      while (next[branch] < steps.size() && issue_next(steps[next[branch]])) {
        ++next[branch];
        any_issued = true;
      }
      all_issued &= next[branch] == steps.size();
    }
    if (all_issued) return;
    const int64_t now = now_ns();
    if (any_issued || blocked_since == 0) {
      blocked_since = now;
      next_poll = now + kPollNs;
    }
    if (now >= next_poll) {
      next_poll = now + kPollNs;
      for (int branch = 0; branch < kNumBranches; ++branch) {
        is_idle(gpu_.stream(static_cast<Branch>(branch)));  // a fault must end the waiting
      }
    }
    pause_after(now - blocked_since);
  }
}

// False: it has to wait for the host or for another branch to be issued.
bool CudaLaunches::issue_next(Step& step) {
  const cuda::Driver& driver = context_.driver();
  cuda::Stream stream = gpu_.stream(step.branch);
  const auto point = static_cast<size_t>(step.point);
  cuda::Result result = cuda::kSuccess;
  switch (step.kind) {
    case Step::Kind::kKernel: {
      void* params[] = {step.argument()};
      result = driver.cuLaunchKernel(step.function, step.grid[0], step.grid[1], step.grid[2],
                                     step.block, 1, 1, step.shared_bytes, stream, params, nullptr);
      break;
    }
    case Step::Kind::kCopy:
      result = step.to_device
                   ? driver.cuMemcpyHtoDAsync(step.device, step.host, step.bytes, stream)
                   : driver.cuMemcpyDtoHAsync(step.host, step.device, step.bytes, stream);
      break;
    case Step::Kind::kMove:
      result = driver.cuMemcpyAsync(step.device, step.from, step.bytes, stream);
      break;
    case Step::Kind::kSettle:
      result = driver.cuStreamSynchronize(stream);
      if (result == cuda::kSuccess) {
        flags()[step.flag].value.store(step.value, std::memory_order_release);
      }
      break;
    case Step::Kind::kWaitFlag: {
      const uint32_t now = flags()[step.flag].value.load(std::memory_order_acquire);
      return static_cast<int32_t>(now - step.value) >= 0;
    }
    case Step::Kind::kRecord:
      result = driver.cuEventRecord(events_[point], stream);
      is_recorded_[point] = true;
      break;
    case Step::Kind::kWaitPoint:
      if (!is_recorded_[point]) return false;
      result = driver.cuStreamWaitEvent(stream, events_[point], 0);
      break;
  }
  context_.check(result, "running a round");
  return true;
}

CudaLauncher::CudaLauncher(CudaDevice& device) : device_(device), thread_([this] { work(); }) {}

CudaLauncher::~CudaLauncher() {
  {
    const std::lock_guard lock(mutex_);
    quit_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CudaLauncher::issue(CudaLaunches& round) {
  {
    const std::lock_guard lock(mutex_);
    round_ = &round;
  }
  changed_.notify_one();
}

void CudaLauncher::work() {
  platform::set_up_thread("atsc launch", {});
  const CudaContext::Current current(device_.context());
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return quit_ || round_ != nullptr; });
    if (quit_) return;
    CudaLaunches* round = std::exchange(round_, nullptr);
    lock.unlock();
    round->issue();
    lock.lock();
  }
}

std::unique_ptr<Executable> make_cuda_round(CudaDevice& device, const CommandList& list,
                                            BuildMode mode) {
  if (mode == BuildMode::kGraph) return std::make_unique<CudaGraph>(device, list);
  return std::make_unique<CudaLaunches>(device, list, mode);
}

}  // namespace atsc
