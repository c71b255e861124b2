// A persistent pool of threads, of which the caller is one.
//
// All of them meet at one barrier, which counts arrivals; the last one opens it. Those who wait spin
// for a while and then sleep in the kernel. Waking costs microseconds, so on a quiet machine it pays
// to spin; on a loaded one spinning takes the cores from whatever the others wait for, and uses up
// this process's share (2 threads on 2 cores beside 8 busy ones: rounds of 50 ms with 50 us of
// spinning, 25 ms without). So the time adapts: it grows to 50 us while barriers open in time, halves
// when one does not, and drops to 1 us when a spinning thread finds that it was preempted. A pool of
// one thread touches no atomic at all.
//
// Rounds with a device are another matter: between two runs the threads wait for the device, and that
// takes long although nobody else wants the core. A patient pool spins up to 500 us, and less only
// when it was preempted.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "platform.h"

namespace atsc {

class Pool {
 public:
  // `num_threads` counts the caller; 0 takes one a physical core that this process may use.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Between two runs, by the caller.
  void be_patient(bool patient) { is_patient_.store(patient, std::memory_order_relaxed); }

  // Runs body(thread) on every thread, 0 being the caller, and returns when all are done. Only one
  // run at a time.
  template <class Body>
  void run(Body&& body) {
    if (num_threads_ == 1) return body(0);
    context_ = &body;
    body_ = [](void* context, int thread) {
      (*static_cast<std::remove_reference_t<Body>*>(context))(thread);
    };
    barrier([] {});
    body(0);
    barrier([] {});
  }

  // Inside a body, by every thread: the last to arrive calls `last` before anyone goes on.
  template <class Last>
  void barrier(Last&& last) {
    if (num_threads_ == 1) return last();
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
      return await(generation);
    }
    last();
    arrived_.store(0, std::memory_order_relaxed);
    // Sequentially consistent, as is the sleeper's announcement: one of the two sees the other.
    generation_.store(generation + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) platform::wake_all(generation_);
  }

 private:
  void work(int thread);
  void await(uint32_t generation);
  bool spin(uint32_t generation);

  int num_threads_;
  bool quit_ = false;
  void* context_ = nullptr;
  void (*body_)(void*, int) = nullptr;
  std::vector<int> cpus_;  // empty: wherever the system likes
  std::vector<std::thread> threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int64_t> spin_ns_;
  std::atomic<bool> is_patient_{false};
};

}  // namespace atsc
