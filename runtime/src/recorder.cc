#include "recorder.h"

#include <algorithm>

#include "platform.h"

namespace atsc {
namespace {

const char* name_of(const Plan& plan, int node) {
  return node >= 0 ? plan.nodes[node].name : nullptr;
}

std::vector<atsc_event> events_of(const std::vector<Executor::StepTime>& steps) {
  std::vector<atsc_event> events;
  events.reserve(steps.size());
  for (const auto& step : steps) {
    events.push_back({ATSC_TRACK_CPU, static_cast<int32_t>(events.size()), step.begin_ns, step.end_ns,
                      step.first->name, step.last->name});
  }
  return events;
}

}  // namespace

Recorder::Recorder(const Plan& plan, Executor& executor, HybridExecutor* hybrid)
    : plan_(plan), executor_(executor), hybrid_(hybrid) {}

bool Recorder::run(const Round& round, SessionPlace* place) {
  if (is_first_taken_) rounds_.pop_front();
  is_first_taken_ = false;
  std::vector<Executor::StepTime> steps;
  const int64_t begin_ns = platform::now_ns();
  const bool is_whole =
      hybrid_ != nullptr ? hybrid_->run(round, *place) : executor_.run(round, &steps);
  const int64_t end_ns = platform::now_ns();
  if (!is_whole) return false;
  rounds_.emplace_back();
  Recorded& made = rounds_.back();
  made.events = hybrid_ != nullptr ? atsc::events_of(plan_, hybrid_->latest()) : events_of(steps);
  // The device's clock is known to microseconds: nothing lies outside of its round all the same.
  for (atsc_event& event : made.events) {
    event.begin_ns = std::clamp(event.begin_ns, begin_ns, end_ns);
    event.end_ns = std::clamp(event.end_ns, begin_ns, end_ns);
  }
  made.round.position = round.position;
  made.round.num_tokens = round.num_tokens;
  made.round.num_logit_rows = round.num_logit_rows;
  made.round.begin_ns = begin_ns;
  made.round.end_ns = end_ns;
  made.round.num_events = static_cast<int64_t>(made.events.size());
  made.round.events = made.events.data();
  return true;
}

atsc_round Recorder::take() {
  if (is_first_taken_) rounds_.pop_front();
  is_first_taken_ = !rounds_.empty();
  return is_first_taken_ ? rounds_.front().round : atsc_round{};
}

std::vector<atsc_event> events_of(const Plan& plan, const RoundRecord& record) {
  std::vector<atsc_event> events;
  events.reserve(2 * (record.segments.size() + record.copies.size()) + record.runs.size());
  int32_t index = 0;
  for (const auto& segment : record.segments) {
    const char* const first = name_of(plan, segment.first_node);
    const char* const last = name_of(plan, segment.last_node);
    events.push_back(
        {ATSC_TRACK_CPU_WAIT, index, segment.wait_ns, segment.begin_ns, nullptr, nullptr});
    events.push_back({ATSC_TRACK_CPU, index++, segment.begin_ns, segment.end_ns, first, last});
  }
  index = 0;
  for (const auto& run : record.runs) {
    events.push_back({ATSC_TRACK_DEVICE, index++, run.begin_ns, run.end_ns,
                      name_of(plan, run.first_node), name_of(plan, run.last_node)});
  }
  for (const auto& copy : record.copies) {
    events.push_back({ATSC_TRACK_COPY, copy.unit, copy.begin_ns, copy.copied_ns, nullptr, nullptr});
    events.push_back(
        {ATSC_TRACK_DEVICE_WAIT, copy.unit, copy.wait_ns, copy.ready_ns, nullptr, nullptr});
  }
  return events;
}

}  // namespace atsc
