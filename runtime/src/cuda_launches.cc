// A round as launches, and the thread that issues them.
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "backoff.h"
#include "cuda_rounds.h"
#include "cuda_steps.h"
#include "failure.h"

namespace atsc {

using platform::now_ns;

namespace {

constexpr int64_t kPollNs = 1'000'000;

}  // namespace

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

std::unique_ptr<Executable> make_cuda_launches(CudaDevice& device, const CommandList& list,
                                               BuildMode mode) {
  return std::make_unique<CudaLaunches>(device, list, mode);
}

}  // namespace atsc
