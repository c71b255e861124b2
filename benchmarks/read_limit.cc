// Reads a buffer with AVX2 and T threads: what decode could reach if nothing but weights cost time.
//
//     read_limit BYTES THREADS
//
// Prints a line when the buffer is filled, and for each line of input {"seconds": ...}: the time of
// one pass over all bytes, averaged over at least a tenth of a second.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "plain_read.h"

namespace {

constexpr std::size_t kLine = 64;
constexpr double kLeastSeconds = 0.1;

double seconds_of(const std::byte* buffer, std::size_t bytes, int threads, int passes) {
  std::atomic<std::uint64_t> sink{0};
  std::vector<std::thread> workers;
  const auto begin = std::chrono::steady_clock::now();
  for (int t = 0; t < threads; ++t) {
    const std::size_t first = bytes / kLine * t / threads * kLine;
    const std::size_t last = bytes / kLine * (t + 1) / threads * kLine;
    workers.emplace_back([=, &sink] {
      for (int i = 0; i < passes; ++i) sink += read_once(buffer + first, buffer + last);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  volatile std::uint64_t keep = sink;
  (void)keep;
  return elapsed.count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::size_t bytes = std::strtoull(argv[1], nullptr, 10) / kLine * kLine;
  const int threads = std::atoi(argv[2]);
  auto* buffer = static_cast<std::byte*>(std::aligned_alloc(kLine, bytes));
  if (buffer == nullptr || threads < 1) return 1;
  for (std::size_t i = 0; i < bytes; ++i) buffer[i] = static_cast<std::byte>(i * 31);
  std::cout << "{\"version\": \"AVX2\"}" << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
    int passes = 1;
    double elapsed = seconds_of(buffer, bytes, threads, passes);
    while (elapsed < kLeastSeconds) {
      passes *= 2;
      elapsed = seconds_of(buffer, bytes, threads, passes);
    }
    std::cout << "{\"seconds\": " << elapsed / passes << "}" << std::endl;
  }
  std::free(buffer);
}
