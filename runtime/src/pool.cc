#include "pool.h"

#include <algorithm>
#include <system_error>

#include "failure.h"

namespace atsc {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kSpinNs = 50'000;

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
  spin_ns_ = num_threads_ > most ? 0 : kSpinNs;
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
  constexpr int kLooks = 64;  // between two looks at the clock
  if (spin_ns_ > 0) {
    const int64_t end = platform::now_ns() + spin_ns_;
    do {
      for (int look = 0; look < kLooks; ++look) {
        if (generation_.load(std::memory_order_acquire) != generation) return;
        __builtin_ia32_pause();
      }
    } while (platform::now_ns() < end);
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (generation_.load(std::memory_order_seq_cst) == generation) {
    platform::wait_on(generation_, generation);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace atsc
