#include "round_maker.h"

#include <exception>
#include <utility>

#include "failure.h"

namespace atsc {

RoundMaker::RoundMaker(const Plan& plan, Residency& residency, Executor& executor,
                       const TransferPolicy& policy)
    : plan_(plan), residency_(residency), executor_(executor), policy_(policy) {}

RoundMaker::~RoundMaker() {
  {
    const std::lock_guard lock(mutex_);
    quit_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::unique_ptr<HybridRound> RoundMaker::make(const SessionPlace& place, const RoundShape& shape,
                                              const Choice& choice, int version, BuildMode mode) {
  auto made = std::make_unique<HybridRound>();
  made->place = &place;
  made->shape = shape;
  made->version = version;
  made->advances = choice.advances;
  made->built = build_round(plan_, residency_, place, shape.num_tokens, shape.num_logit_rows, choice);
  made->program = executor_.compile(shape.num_tokens, shape.num_logit_rows, made->built.splits);
  if (!made->built.splits.runs.empty()) {
    made->executable = residency_.device().build(made->built.commands, mode);
  }
  return made;
}

bool RoundMaker::submit(Order order) {
  {
    const std::lock_guard lock(mutex_);
    if (order_ || is_busy_ || result_) return false;
    order_ = std::move(order);
    // Plans that never choose anew need no thread.
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
  return true;
}

std::optional<RoundMaker::Result> RoundMaker::take() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return std::nullopt;
  return std::exchange(result_, std::nullopt);
}

void RoundMaker::drop_orders() {
  const std::lock_guard lock(mutex_);
  order_.reset();
  if (result_ && result_->round) discarded_.push_back(std::move(result_->round));
  result_.reset();
  is_unwanted_ = is_busy_;
}

void RoundMaker::discard(std::unique_ptr<HybridRound> round) {
  {
    const std::lock_guard lock(mutex_);
    discarded_.push_back(std::move(round));
  }
  changed_.notify_all();
}

void RoundMaker::free_all() {
  std::vector<std::unique_ptr<HybridRound>> freed;
  {
    std::unique_lock lock(mutex_);
    order_.reset();
    is_unwanted_ = is_busy_;
    changed_.wait(lock, [&] { return !is_busy_; });
    result_.reset();
    freed.swap(discarded_);
  }
}

void RoundMaker::work() {
  platform::set_up_thread("atsc rounds", {});
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return quit_ || order_ || !discarded_.empty(); });
    if (quit_) return;
    std::vector<std::unique_ptr<HybridRound>> freed;
    freed.swap(discarded_);
    std::optional<Order> order = std::exchange(order_, std::nullopt);
    is_busy_ = true;
    lock.unlock();
    freed.clear();
    std::optional<Result> result;
    if (order) result = fulfil(std::move(*order));
    lock.lock();
    is_busy_ = false;
    if (result && is_unwanted_) {
      if (result->round) discarded_.push_back(std::move(result->round));
    } else if (result) {
      result_ = std::move(result);
    }
    is_unwanted_ = false;
    changed_.notify_all();
  }
}

// Whatever goes wrong here, the round that is there goes on being used.
RoundMaker::Result RoundMaker::fulfil(Order order) {
  Result result;
  const int64_t begin_ns = platform::now_ns();
  try {
    const Choice* choice = &order.choice;
    if (order.question) {
      result.answer = policy_.decide(*order.question, scheduler_);
      choice = result.answer.is_worthwhile ? &result.answer.choice : nullptr;
    }
    const auto mode = order.shape.num_tokens <= kFewRows ? BuildMode::kGraph : BuildMode::kLaunches;
    if (choice != nullptr) {
      is_reading_ = true;
      result.host_bytes = residency_.hold_on_host(choice->retreats);
      is_reading_ = false;
      result.round = make(*order.place, order.shape, *choice, order.version, mode);
    }
  } catch (const std::exception&) {
    result.has_failed = true;
    is_reading_ = false;
  }
  result.taken_ns = platform::now_ns() - begin_ns;
  result.order = std::move(order);
  return result;
}

}  // namespace atsc
