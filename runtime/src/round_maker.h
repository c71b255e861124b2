// Makes rounds ready on a thread of its own, while others run: chooses promotions anew, reads the
// weights of units that retreat, builds the device's list and the host's program, and frees what is no
// longer used. The rounds' thread hands in work and takes results between two rounds, and never waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "hybrid_round.h"
#include "transfer_policy.h"

namespace atsc {

class RoundMaker {
 public:
  RoundMaker(const Plan& plan, Residency& residency, Executor& executor,
             const TransferPolicy& policy);
  ~RoundMaker();  // waits for what it is doing
  RoundMaker(const RoundMaker&) = delete;

  // A round as it should be now. Any thread. Raises Failure: no memory on the device.
  std::unique_ptr<HybridRound> make(const SessionPlace& place, const RoundShape& shape,
                                    const Choice& choice, int version, BuildMode mode);

  struct Order {
    const SessionPlace* place;
    RoundShape shape;
    // Decide this first, and build only what is worthwhile; none: build `choice`.
    std::optional<TransferQuestion> question;
    Choice choice;
    int version;
    uint64_t number = 0;
  };
  struct Result {
    Order order;
    TransferAnswer answer;
    std::unique_ptr<HybridRound> round;  // null: not worthwhile, or it failed
    bool has_failed = false;
    int64_t taken_ns = 0;
    uint64_t host_bytes = 0;  // of memory that weights of retreating units took
  };

  // One at a time: false while another one is under way or waits to be taken.
  bool submit(Order order);
  std::optional<Result> take();

  // Whether it reads weights, which slows rounds down. Any thread.
  bool is_reading() const { return is_reading_.load(std::memory_order_relaxed); }

  // What is under way will not be handed out. Its session may end.
  void drop_orders();
  // Frees a round soon.
  void discard(std::unique_ptr<HybridRound> round);
  // Frees all that was discarded or is ready, now.
  void free_all();

 private:
  void work();
  Result fulfil(Order order);

  const Plan& plan_;
  Residency& residency_;
  Executor& executor_;
  const TransferPolicy& policy_;
  TransferScheduler scheduler_;  // of the thread

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::optional<Order> order_;
  std::optional<Result> result_;
  std::vector<std::unique_ptr<HybridRound>> discarded_;
  bool is_busy_ = false, is_unwanted_ = false, quit_ = false;
  std::atomic<bool> is_reading_{false};
  std::thread thread_;
};

}  // namespace atsc
