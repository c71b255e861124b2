#include "profiler_inputs.h"

#include <algorithm>

#include "kernel.h"

namespace atsc {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
constexpr float kLargeFactor = 8.0f;
constexpr double kLargeShare = 0.1;    // of the columns' blocks
constexpr double kUnlikeShare = 0.01;  // of all blocks are not what their column's are
constexpr uint16_t kCacheMask = 0x87ff, kCacheExponent = 0x3000;

// Sebastiano Vigna's splitmix64: a number's bits, mixed.
uint64_t mixed(uint64_t number) {
  number += kGolden;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

uint64_t share_of_range(double share) { return static_cast<uint64_t>(share * 0x1p64); }

// The sum of four uniform numbers of 16 bits, at mean 0 and variance 1.
float normal(uint64_t index) {
  constexpr float kMean = 2 * 65535.0f, kDeviation = 37837.2f;
  const uint64_t bits = mixed(index);
  const uint64_t first = (bits & 0xffff) + (bits >> 16 & 0xffff);
  const uint64_t sum = first + (bits >> 32 & 0xffff) + (bits >> 48);
  return (static_cast<float>(sum) - kMean) / kDeviation;
}

// Multiples of the golden ratio lie evenly, so that a row of any length has its tenth.
bool is_large(int64_t row, int64_t block) {
  const auto column = static_cast<uint64_t>(block);
  const bool of_column = (column + 1) * kGolden < share_of_range(kLargeShare);
  const uint64_t place = mixed(static_cast<uint64_t>(row)) ^ (column << 1);
  return of_column != (mixed(place) < share_of_range(kUnlikeShare));
}

}  // namespace

void fill_activations(float* values, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t first = 0; first < width; first += kQ8Block) {
      const float factor = is_large(row, first / kQ8Block) ? kLargeFactor : 1.0f;
      const int64_t end = row * width + std::min<int64_t>(first + kQ8Block, width);
      for (int64_t at = row * width + first; at < end; ++at) {
        values[at] = factor * normal(static_cast<uint64_t>(at));
      }
    }
  }
}

void fill_cache(std::byte* cache, uint64_t bytes) {
  auto* halves = reinterpret_cast<uint16_t*>(cache);
  for (uint64_t at = 0; at < bytes / sizeof(uint16_t); ++at) {
    halves[at] = static_cast<uint16_t>((mixed(at) & kCacheMask) | kCacheExponent);
  }
}

}  // namespace atsc
