#include "hybrid_executor.h"

#include <algorithm>
#include <cstring>

#include "failure.h"

namespace atsc {
namespace {

constexpr size_t kPreparedOfSession = 2, kPreparedBesides = 2;  // chunks, the rests of prompts
constexpr int64_t kPauseAfterFailureNs = 60'000'000'000;  // no memory for a new round
// Units change places twice a prompt. More than this, and it takes more time than it saves.
constexpr int kMostExchanges = 6;
constexpr int64_t kExchangesNs = 10'000'000'000;

// The rows of a cache that hold tokens: of each head the first ones. All of it in one copy where the rest
// takes less time than it would take to begin the others.
void add_copies(const CacheEntry& entry, const SessionPlace::Cache& there, const CacheView& here,
                int64_t written, bool to_host, uint64_t begin_bytes, CommandList& list) {
  const auto row = sizeof(uint16_t) * static_cast<uint64_t>(entry.head_size);
  const auto capacity = static_cast<uint64_t>(entry.capacity);
  const uint64_t used = std::min(static_cast<uint64_t>(written), capacity);
  const bool whole = row * (capacity - used) <= begin_bytes;
  const uint64_t num_parts = whole ? 1 : static_cast<uint64_t>(entry.kv_heads);
  const uint64_t part_bytes = row * capacity * static_cast<uint64_t>(entry.kv_heads) / num_parts;
  const uint64_t bytes = whole ? part_bytes : row * used;
  const auto add = [&](void* host, DeviceAddress device) {
    for (uint64_t at = 0; at < part_bytes * num_parts; at += part_bytes) {
      std::byte* const memory = static_cast<std::byte*>(host) + at;
      if (to_host) {
        list.copy_to_host(Branch::kCompute, memory, device + at, bytes);
      } else {
        list.copy_to_device(Branch::kCompute, device + at, memory, bytes);
      }
    }
  };
  add(here.k, there.k);
  add(here.v, there.v);
}

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
                               Pool& pool, const TransferOptions& options)
    : plan_(plan),
      residency_(residency),
      executor_(executor),
      pool_(pool),
      most_prepared_(kPreparedBesides +
                     kPreparedOfSession * static_cast<size_t>(residency.num_places())),
      clock_offset_ns_(residency.device().clock_offset_ns()),
      copy_begin_bytes_(options.copy_begin_bytes),
      policy_(plan, residency, options),
      maker_(plan, residency, executor, policy_) {}

void HybridExecutor::cancel(const std::atomic<bool>& cancelled) {
  const std::lock_guard lock(mutex_);
  if (running_ == nullptr || cancelled_ != &cancelled) return;
  was_released_ = true;
  running_->release();
}

void HybridExecutor::forget(const SessionPlace& place) {
  maker_.drop_orders();
  std::erase_if(prepared_, [&](const auto& known) { return known->place == &place; });
}

HybridRound* HybridExecutor::find(const RoundShape& shape, const SessionPlace& place) {
  const auto found = std::ranges::find_if(prepared_, [&](const auto& known) {
    return known->place == &place && known->shape == shape;
  });
  return found == prepared_.end() ? nullptr : found->get();
}

HybridRound& HybridExecutor::prepare(const RoundShape& shape, const SessionPlace& place) {
  if (HybridRound* known = find(shape, place)) {
    known->last_used = num_rounds_;
    const TransferPolicy::Adopted& adopted = policy_.choice_of(shape);
    // Another session's round brought the new choice, or the policy went back to the old one.
    if (known->version != adopted.version && platform::now_ns() >= remake_from_ns_) {
      maker_.submit({.place = &place, .shape = shape, .question = {}, .choice = adopted.choice,
                     .version = adopted.version});
    }
    return *known;
  }
  if (prepared_.size() >= most_prepared_) {
    const auto oldest = std::ranges::min_element(prepared_, {}, [](const auto& known) {
      return known->last_used;
    });
    maker_.discard(std::move(*oldest));
    prepared_.erase(oldest);
  }
  prepared_.push_back(make(shape, place));
  prepared_.back()->last_used = num_rounds_;
  return *prepared_.back();
}

std::unique_ptr<HybridRound> HybridExecutor::make(const RoundShape& shape,
                                                  const SessionPlace& place) {
  const TransferPolicy::Adopted adopted = policy_.choice_of(shape);
  const auto make_it = [&](BuildMode mode) {
    return maker_.make(place, shape, adopted.choice, adopted.version, mode);
  };
  if (shape.num_tokens <= kFewRows) {
    try {
      return make_it(BuildMode::kGraph);
    } catch (const Failure& failure) {
      if (failure.status != ATSC_DEVICE_ERROR) throw;
      prepared_.clear();  // graphs hold device memory; launches hold none
      maker_.free_all();
    }
  }
  return make_it(BuildMode::kLaunches);
}

// Between two rounds: what the other thread has made takes the place of what is there.
void HybridExecutor::adopt_what_is_ready() {
  const int64_t begin_ns = platform::now_ns();
  std::optional<RoundMaker::Result> result = maker_.take();
  if (!result) return;
  const RoundMaker::Order& order = result->order;
  if (result->round) {
    result->round->last_used = num_rounds_;
    const auto known = std::ranges::find_if(prepared_, [&](const auto& round) {
      return round->place == order.place && round->shape == order.shape;
    });
    if (known != prepared_.end()) std::swap(*known, result->round);
    maker_.discard(std::move(result->round));
  }
  const int64_t now_ns = platform::now_ns();
  if (!order.question) {
    if (result->has_failed) remake_from_ns_ = now_ns + kPauseAfterFailureNs;
    return;
  }
  if (result->has_failed) {
    policy_.put_off(*order.question, result->answer, now_ns + kPauseAfterFailureNs);
  } else {
    policy_.settle(*order.question, result->answer,
                   {now_ns - begin_ns, result->taken_ns, result->host_bytes}, now_ns);
  }
}

void HybridExecutor::look_at_speeds(const HybridRound& round) {
  if (maker_.is_reading()) return;  // such rounds are no measure
  policy_.observe(round, record_);
  std::optional<TransferQuestion> question = policy_.due(round.shape, record_.end_ns);
  if (!question) return;
  const int version = question->version;
  maker_.submit({.place = round.place, .shape = round.shape, .question = std::move(question),
                 .choice = {}, .version = version});
}

// All copies in one list, so that the device is waited for once.
void HybridExecutor::move_caches(const HybridRound& prepared, const Round& round,
                                 SessionPlace& place) {
  CommandList copies;
  std::vector<SessionPlace::Cache*> moved;
  for (size_t index = 0; index < place.caches.size(); ++index) {
    SessionPlace::Cache& cache = place.caches[index];
    const bool to_host = prepared.built.caches_on_host[index];
    if (cache.k == 0 || cache.has_retreated == to_host) continue;
    moved.push_back(&cache);
    if (round.written == 0) continue;
    add_copies(plan_.caches[index], cache, round.caches[index], round.written, to_host,
               copy_begin_bytes_, copies);
  }
  if (!copies.commands().empty()) {
    const auto executable = residency_.device().build(copies, BuildMode::kLaunches);
    executable->run();
    executable->wait();
  }
  for (SessionPlace::Cache* cache : moved) cache->has_retreated = !cache->has_retreated;
}

void HybridExecutor::count_exchange() {
  const int64_t now_ns = platform::now_ns();
  if (now_ns - exchanges_since_ns_ > kExchangesNs) {
    exchanges_since_ns_ = now_ns;
    num_exchanges_ = 0;
  }
  if (++num_exchanges_ > kMostExchanges) policy_.stop_exchanges();
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

bool HybridExecutor::run(const Round& round, SessionPlace& place) {
  if (round.cancelled->load(std::memory_order_relaxed)) return false;
  ++num_rounds_;
  adopt_what_is_ready();
  HybridRound& prepared = prepare({round.num_tokens, round.num_logit_rows}, place);
  move_caches(prepared, round, place);
  if (prepared.executable && residency_.exchange(prepared.advances)) count_exchange();
  executor_.bind(*prepared.program, round);
  for (const Executor::Instruction& instruction : prepared.program->instructions) {
    residency_.device().check_host_args(instruction.node->name, instruction.args);
  }
  record_ = {};
  record_.position = round.position;
  record_.begin_ns = platform::now_ns();
  if (!prepared.executable) {
    const bool is_whole = run_segments(prepared, round);
    record_.end_ns = platform::now_ns();
    if (is_whole) look_at_speeds(prepared);
    return is_whole;
  }
  write_numbers(round);
  if (!run_whole(prepared, round)) return false;
  take_stamps(prepared);
  look_at_speeds(prepared);
  return true;
}

// False: cancelled.
bool HybridExecutor::run_whole(HybridRound& prepared, const Round& round) {
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
  return !running.end() && is_whole;
}

// False: cancelled.
bool HybridExecutor::run_segments(HybridRound& prepared, const Round& round) {
  const std::vector<HostSegment>& segments = prepared.built.splits.segments;
  for (size_t index = 0; index < segments.size(); ++index) {
    const int64_t wait_ns = platform::now_ns();
    const auto run = static_cast<uint32_t>(segments[index].await_run);
    if (run > 0 && !prepared.executable->await(kFlagFromDevice, run)) return false;
    const int64_t begin_ns = platform::now_ns();
    const int number = static_cast<int>(index);
    if (!executor_.run_segment(*prepared.program, number, *round.cancelled)) return false;
    residency_.device().slow_down_host(begin_ns);
    const int64_t end_ns = platform::now_ns();  // the device may go on before this thread does
    if (prepared.executable) {
      prepared.executable->raise(kFlagFromHost, static_cast<uint32_t>(index + 1));
    }
    const std::vector<int>& nodes = segments[index].nodes;
    record_.segments.push_back({wait_ns, begin_ns, end_ns, nodes.front(), nodes.back()});
  }
  return true;
}

void HybridExecutor::take_stamps(const HybridRound& prepared) {
  const auto at = [&](int stamp) { return prepared.executable->stamp(stamp) + clock_offset_ns_; };
  const BuiltRound& round = prepared.built;
  for (size_t run = 0; run < round.begin_stamps.size(); ++run) {
    const int64_t before = record_.runs.empty() ? at(0) : record_.runs.back().end_ns;
    const int begin = round.begin_stamps[run];
    const std::vector<DeviceStep>& steps = round.splits.runs[run].steps;
    record_.runs.push_back({begin == kNoStamp ? before : at(begin), at(round.end_stamps[run]),
                            steps.front().node, steps.back().node});
  }
  int64_t before_ns = 0;
  for (const PromotionStamps& stamps : round.promotion_stamps) {
    const int64_t begin_ns = stamps.begin == kNoStamp ? before_ns : at(stamps.begin);
    const int64_t ready_ns = at(stamps.ready);
    int64_t wait_ns = at(stamps.wait);
    if (stamps.wait_segment > 0) {
      wait_ns = std::max(wait_ns, record_.segments[static_cast<size_t>(stamps.wait_segment) - 1].end_ns);
    }
    // Whose stamp may be late.
    const int64_t copied_ns = std::max(before_ns, std::min(at(stamps.copied), ready_ns));
    record_.copies.push_back({stamps.unit, std::clamp(begin_ns, before_ns, copied_ns), copied_ns,
                              std::min(wait_ns, ready_ns), ready_ns});
    before_ns = copied_ns;
  }
}

}  // namespace atsc
