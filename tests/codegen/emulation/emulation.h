// Enough of CUDA C++ to run a kernel's blocks one after another on a CPU, each thread as a fiber.
//
// A fiber runs until it must wait for others: at a barrier, or where lanes read one another's
// values. Warps advance in an order that changes all the time, so that kernels cannot lean on one.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index3 { int x, y, z; };

using std::max;
using std::min;

namespace atsc {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;
  int num_bytes;
  bool wanted;
};

struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Barrier {
  int arrived = 0, expected = 0;
  unsigned generation = 0;
};

constexpr int kSlotBytes = 64;

struct Fiber {
  ucontext_t beginning;  // entered once; from then on jumps are cheaper, they leave signals alone
  jmp_buf place;
  bool begun = false;
  std::unique_ptr<char[]> stack;
  Index3 thread;
  Copies copies;
  bool ended = false;
};

struct Warp {
  Barrier barrier;
  alignas(16) char slots[2][32][kSlotBytes];  // in turns: who is late may still read the other
};

// The block that runs.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Index3 index;
  Fiber* current = nullptr;
  ucontext_t before_fiber;
  jmp_buf scheduler;
  void (*body)(const void*) = nullptr;
  const void* args = nullptr;
};

inline Block block;
inline Index3 grid;
inline unsigned char dynamic_shared[256 << 10] __attribute__((aligned(128)));

inline int lane() { return block.current->thread.x % 32; }
inline Warp& warp() { return block.warps[block.current->thread.x / 32]; }
inline Copies& copies() { return block.current->copies; }

inline void yield() {
  if (_setjmp(block.current->place) == 0) _longjmp(block.scheduler, 1);
}

inline void resume(Fiber& fiber) {
  block.current = &fiber;
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  swapcontext(&block.before_fiber, &fiber.beginning);
}

inline void wait_at(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}

// Every lane's value, after all lanes have given theirs.
template <class T>
inline std::array<T, 32> lay_open(const T& mine) {
  static_assert(sizeof(T) <= kSlotBytes);
  auto& slots = warp().slots[warp().barrier.generation % 2];
  std::memcpy(slots[lane()], &mine, sizeof(T));
  wait_at(warp().barrier);
  std::array<T, 32> all;
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], slots[i], sizeof(T));
  return all;
}

inline void enter() {
  block.body(block.args);
  block.current->ended = true;
  // Whoever returns early is waited for no longer.
  for (Barrier* barrier : {&block.barrier, &warp().barrier}) {
    if (--barrier->expected == barrier->arrived && barrier->arrived > 0) {
      barrier->arrived = 0;
      ++barrier->generation;
    }
  }
  yield();
}

inline void run_block(Index3 index, int num_threads) {
  block.index = index;
  block.fibers.resize(num_threads);
  block.warps = std::vector<Warp>(num_threads / 32);
  block.barrier = {0, num_threads, 0};
  for (Warp& w : block.warps) w.barrier.expected = 32;
  std::memset(dynamic_shared, 0xcd, sizeof dynamic_shared);
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = block.fibers[i];
    constexpr size_t kStackBytes = 128 << 10;
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    fiber.thread = {i, 0, 0};
    fiber.copies = {};
    fiber.begun = fiber.ended = false;
    getcontext(&fiber.beginning);
    fiber.beginning.uc_stack = {fiber.stack.get(), 0, kStackBytes};
    fiber.beginning.uc_link = nullptr;
    makecontext(&fiber.beginning, enter, 0);
  }
  unsigned random = 1;
  for (bool alive = true; alive;) {
    alive = false;
    random = random * 1664525u + 1013904223u;
    const int first = static_cast<int>(random >> 16) % (num_threads / 32) * 32;
    for (int i = 0; i < num_threads; ++i) {
      Fiber& fiber = block.fibers[(first + i) % num_threads];
      if (fiber.ended) continue;
      alive = true;
      resume(fiber);
    }
  }
}

}  // namespace atsc

#define threadIdx (::atsc::block.current->thread)
#define blockIdx (::atsc::block.index)
#define gridDim (::atsc::grid)

inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __double2float_rd(double x) {
  const float nearest = static_cast<float>(x);
  return nearest > x ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }

inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) {
    sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  }
  return sum;
}

inline void __syncthreads() { ::atsc::wait_at(::atsc::block.barrier); }
inline void __syncwarp() { ::atsc::wait_at(::atsc::warp().barrier); }

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return ::atsc::lay_open(value)[::atsc::lane() ^ mask];
}

inline unsigned __ballot_sync(unsigned, bool mine) {
  const auto all = ::atsc::lay_open(mine);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}

inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }
