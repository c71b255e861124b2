#include "hybrid_executor.h"

#include <algorithm>
#include <cstring>

#include "failure.h"

namespace atsc {
namespace {

constexpr size_t kPreparedOfSession = 2, kPreparedBesides = 2;  // chunks, the rests of prompts

}  // namespace

// While one lives, `cancel` reaches the executable and the pool stays awake between segments.
class HybridExecutor::Running {
 public:
  Running(HybridExecutor& owner, Executable& executable, const std::atomic<bool>& cancelled)
      : owner_(owner) {
    owner_.pool_.be_patient(true);
    const std::lock_guard lock(owner_.mutex_);
    owner_.running_ = &executable;
    owner_.cancelled_ = &cancelled;
    owner_.was_released_ = false;
  }
  ~Running() {
    end();
    owner_.pool_.be_patient(false);
  }
  Running(const Running&) = delete;

  // Whether `cancel` came in time to spoil the round.
  bool end() {
    const std::lock_guard lock(owner_.mutex_);
    owner_.running_ = nullptr;
    return owner_.was_released_;
  }

 private:
  HybridExecutor& owner_;
};

HybridExecutor::HybridExecutor(const Plan& plan, Residency& residency, Executor& executor,
                               Pool& pool)
    : plan_(plan),
      residency_(residency),
      executor_(executor),
      pool_(pool),
      most_prepared_(kPreparedBesides +
                     kPreparedOfSession * static_cast<size_t>(residency.num_places())),
      clock_offset_ns_(residency.device().clock_offset_ns()) {}

void HybridExecutor::cancel(const std::atomic<bool>& cancelled) {
  const std::lock_guard lock(mutex_);
  if (running_ == nullptr || cancelled_ != &cancelled) return;
  was_released_ = true;
  running_->release();
}

void HybridExecutor::forget(const SessionPlace& place) {
  std::erase_if(prepared_, [&](const auto& known) { return known->place == place.index; });
}

HybridExecutor::Prepared& HybridExecutor::prepare(const Round& round, const SessionPlace& place) {
  for (const auto& known : prepared_) {
    if (known->place != place.index || known->num_tokens != round.num_tokens ||
        known->num_logit_rows != round.num_logit_rows) {
      continue;
    }
    known->last_used = num_rounds_;
    return *known;
  }
  if (prepared_.size() >= most_prepared_) {
    prepared_.erase(std::ranges::min_element(prepared_, {}, [](const auto& known) {
      return known->last_used;
    }));
  }
  auto made = std::make_unique<Prepared>();
  made->place = place.index;
  made->num_tokens = round.num_tokens;
  made->num_logit_rows = round.num_logit_rows;
  made->last_used = num_rounds_;
  made->round = build_round(plan_, residency_, place, round.num_tokens, round.num_logit_rows,
                            choice_for(round));
  made->program = executor_.compile(round.num_tokens, round.num_logit_rows, made->round.splits);
  if (!made->round.splits.runs.empty()) {
    made->executable = build(made->round.commands, round.num_tokens <= kFewRows);
  }
  prepared_.push_back(std::move(made));
  return *prepared_.back();
}

Choice HybridExecutor::choice_for(const Round& round) const {
  const int64_t stream_from = plan_.device.stream_from_rows;
  if (stream_from <= 0 || round.num_tokens < stream_from) return {};
  return streaming_choice(plan_, residency_, round.num_logit_rows >= stream_from);
}

std::unique_ptr<Executable> HybridExecutor::build(const CommandList& commands, bool few_rows) {
  Device& device = residency_.device();
  if (few_rows) {
    try {
      return device.build(commands, BuildMode::kGraph);
    } catch (const Failure& failure) {
      if (failure.status != ATSC_DEVICE_ERROR) throw;
      prepared_.clear();  // graphs hold device memory; launches hold none
    }
  }
  return device.build(commands, BuildMode::kLaunches);
}

void HybridExecutor::write_numbers(const Round& round) {
  const DeviceShare& share = residency_.share();
  std::byte* staging = residency_.staging().host();
  const RoundParams params{round.position,
                           {static_cast<int>(round.num_tokens),
                            static_cast<int>(round.num_logit_rows)}};
  std::memcpy(staging, &params, sizeof params);
  if (round.num_logit_rows > 0) {
    std::memcpy(staging + share.logit_rows_offset, round.logit_rows,
                sizeof(int32_t) * static_cast<size_t>(round.num_logit_rows));
  }
  std::memcpy(staging + share.token_ids_offset, round.token_ids,
              sizeof(int32_t) * static_cast<size_t>(round.num_tokens));
}

bool HybridExecutor::run(const Round& round, const SessionPlace& place) {
  if (round.cancelled->load(std::memory_order_relaxed)) return false;
  ++num_rounds_;
  Prepared& prepared = prepare(round, place);
  executor_.bind(*prepared.program, round);
  for (const Executor::Instruction& instruction : prepared.program->instructions) {
    residency_.device().check_host_args(instruction.node->name, instruction.args);
  }
  record_ = {};
  record_.begin_ns = platform::now_ns();
  if (!prepared.executable) return run_segments(prepared, round);
  write_numbers(round);
  Executable& executable = *prepared.executable;
  Running running(*this, executable, *round.cancelled);
  bool is_whole = false;
  try {
    executable.run();
    if (round.cancelled->load()) cancel(*round.cancelled);  // a release before `run` had no effect
    is_whole = run_segments(prepared, round);
  } catch (...) {
    executable.release();
    try {
      executable.wait();
    } catch (const Failure&) {  // the first failure is the one to report
    }
    throw;
  }
  if (!is_whole) executable.release();
  executable.wait();
  record_.end_ns = platform::now_ns();
  if (running.end() || !is_whole) return false;
  take_stamps(prepared);
  return true;
}

// False: cancelled.
bool HybridExecutor::run_segments(Prepared& prepared, const Round& round) {
  const std::vector<HostSegment>& segments = prepared.round.splits.segments;
  for (size_t index = 0; index < segments.size(); ++index) {
    const int64_t wait_ns = platform::now_ns();
    const auto run = static_cast<uint32_t>(segments[index].await_run);
    if (run > 0 && !prepared.executable->await(kFlagFromDevice, run)) return false;
    const int64_t begin_ns = platform::now_ns();
    const int number = static_cast<int>(index);
    if (!executor_.run_segment(*prepared.program, number, *round.cancelled)) return false;
    if (prepared.executable) {
      prepared.executable->raise(kFlagFromHost, static_cast<uint32_t>(index + 1));
    }
    const std::vector<int>& nodes = segments[index].nodes;
    record_.segments.push_back(
        {wait_ns, begin_ns, platform::now_ns(), nodes.front(), nodes.back()});
  }
  return true;
}

void HybridExecutor::take_stamps(const Prepared& prepared) {
  const auto at = [&](int stamp) { return prepared.executable->stamp(stamp) + clock_offset_ns_; };
  const BuiltRound& round = prepared.round;
  for (size_t run = 0; run < round.begin_stamps.size(); ++run) {
    const int64_t before = record_.runs.empty() ? at(0) : record_.runs.back().end_ns;
    const int begin = round.begin_stamps[run];
    const std::vector<DeviceStep>& steps = round.splits.runs[run].steps;
    record_.runs.push_back({begin == kNoStamp ? before : at(begin), at(round.end_stamps[run]),
                            steps.front().node, steps.back().node});
  }
  for (const PromotionStamps& stamps : round.promotion_stamps) {
    record_.copies.push_back(
        {stamps.unit, at(stamps.copied), at(stamps.wait), at(stamps.ready)});
  }
}

}  // namespace atsc
