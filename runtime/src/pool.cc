#include "pool.h"

#include <algorithm>
#include <system_error>

#include "failure.h"

namespace atsc {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kMostSpinNs = 50'000, kLeastSpinNs = 1'000;
constexpr int64_t kMostPatientSpinNs = 500'000;
constexpr int64_t kPreemptedNs = 100'000;  // more time than this between two looks at the clock
constexpr int kLooks = 32;                 // at the barrier, between those

}  // namespace

Pool::Pool(int num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    fail(ATSC_INVALID_ARGUMENT, "num_threads is %d: expected 1 to %d, or 0 for one a core",
         num_threads, kMaxThreads);
  }
  const platform::CpuSet usable = platform::usable_cpus();
  const int most = std::min(static_cast<int>(usable.cpus.size()), usable.limit);
  num_threads_ = num_threads > 0 ? num_threads : std::max(1, std::min(usable.num_cores, most));
  num_threads_ = std::min(num_threads_, kMaxThreads);
  spin_ns_ = num_threads_ > most ? kLeastSpinNs : kMostSpinNs;
  if (usable.is_subset && num_threads_ <= usable.num_cores) cpus_ = usable.cpus;

  const int wanted = num_threads_;
  try {
    threads_.reserve(static_cast<size_t>(wanted - 1));
    for (int thread = 1; thread < wanted; ++thread) {
      threads_.emplace_back([this, thread] { work(thread); });
    }
  } catch (const std::system_error& error) {
    // Those that have started wait for all; take the places of the missing ones and let them go.
    quit_ = true;
    const int missing = wanted - static_cast<int>(threads_.size()) - 1;
    arrived_.fetch_add(missing, std::memory_order_acq_rel);
    if (!threads_.empty()) barrier([] {});
    for (std::thread& thread : threads_) thread.join();
    fail(ATSC_DEVICE_ERROR, "cannot start %d threads (%s): ask for fewer", wanted, error.what());
  }
}

Pool::~Pool() {
  if (threads_.empty()) return;
  quit_ = true;
  barrier([] {});
  for (std::thread& thread : threads_) thread.join();
}

void Pool::work(int thread) {
  platform::set_up_thread("atsc", cpus_);
  for (;;) {
    barrier([] {});
    if (quit_) return;
    body_(context_, thread);
    barrier([] {});
  }
}

void Pool::await(uint32_t generation) {
  if (spin(generation)) return;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (generation_.load(std::memory_order_seq_cst) == generation) {
    platform::wait_on(generation_, generation);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

// Whether the barrier opened while we looked.
bool Pool::spin(uint32_t generation) {
  const bool is_patient = is_patient_.load(std::memory_order_relaxed);
  const int64_t most = is_patient ? kMostPatientSpinNs : kMostSpinNs;
  const int64_t budget = std::min(most, spin_ns_.load(std::memory_order_relaxed));
  int64_t now = platform::now_ns();
  const int64_t end = now + budget;
  for (;;) {
    for (int look = 0; look < kLooks; ++look) {
      if (generation_.load(std::memory_order_acquire) != generation) {
        spin_ns_.store(std::min(most, budget + budget / 2), std::memory_order_relaxed);
        return true;
      }
      __builtin_ia32_pause();
    }
    const int64_t before = now;
    now = platform::now_ns();
    const bool was_preempted = now - before > kPreemptedNs;
    if (!was_preempted && now < end) continue;
    if (is_patient && !was_preempted) return false;
    const int64_t less = was_preempted ? kLeastSpinNs : std::max(kLeastSpinNs, budget / 2);
    spin_ns_.store(less, std::memory_order_relaxed);
    return false;
  }
}

}  // namespace atsc
