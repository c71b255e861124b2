// Times CPU kernels and plain reads on a few threads; benchmarks/kernels.py calls it by ctypes.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "kernel.h"

namespace {

// Median seconds of work(thread, round) over all threads and rounds after the first.
template <class Work>
double median_seconds(int threads, int rounds, const Work& work) {
  std::vector<double> seconds;
  std::atomic<int> arrived{0};
  const auto together = [&](int generation) {
    arrived.fetch_add(1);
    while (arrived.load() < threads * generation) _mm_pause();
  };
  const auto loop = [&](int thread) {
    for (int round = 0; round <= rounds; ++round) {
      together(2 * round + 1);
      const auto start = std::chrono::steady_clock::now();
      work(thread, round);
      together(2 * round + 2);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (thread == 0 && round > 0) seconds.push_back(taken.count());
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(loop, thread);
  loop(0);
  for (std::thread& other : others) other.join();
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

float read_bytes(const uint8_t* p, size_t bytes) {
  __m256i sums[4] = {};
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
    for (int j = 0; j < 4; ++j) {
      const auto* at = reinterpret_cast<const __m256i*>(p + i + 32 * j);
      sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(at));
    }
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]),
                                       _mm256_xor_si256(sums[2], sums[3]));
  return static_cast<float>(_mm256_extract_epi32(all, 0));
}

}  // namespace

// Seconds of a call of `kernel` that cycles through `count` sets of operands. A thread's share comes
// in pieces, as in a plan (runtime/src/executor.cc kChunksOfManyRows).
extern "C" double time_kernel(const atsc::CpuKernel* kernel, const atsc::KernelArgs* args,
                              int count, int threads, int rounds) {
  const int64_t items = kernel->domain(args[0]);
  return median_seconds(threads, rounds, [&](int thread, int round) {
    const int64_t pieces = 6 * threads;
    for (int64_t piece = 6 * thread; piece < 6 * (thread + 1); ++piece) {
      const int64_t begin = items * piece / pieces, end = items * (piece + 1) / pieces;
      if (begin < end) kernel->run(args[round % count], begin, end);
    }
  });
}

// Seconds of a plain read of `bytes` at each of `count` places in turn.
extern "C" double time_read(const uint8_t* const* places, size_t bytes, int count, int threads,
                            int rounds) {
  static volatile float sink;
  return median_seconds(threads, rounds, [&](int thread, int round) {
    const size_t first = bytes * thread / threads, last = bytes * (thread + 1) / threads;
    sink = read_bytes(places[round % count] + first, last - first);
  });
}
