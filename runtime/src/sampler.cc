#include "sampler.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "failure.h"

namespace atsc {
namespace {

// Tokens less likely than this, relative to the most likely one, never come up in practice: their
// exponentials are not worth computing. The natural logarithm of about 1e-13.
constexpr float kNegligible = -30;

// The largest logit; NaNs are passed over.
float largest_of(const float* logits, int32_t count) {
  const float none = -std::numeric_limits<float>::infinity();
  __m128 lanes[4] = {_mm_set1_ps(none), _mm_set1_ps(none), _mm_set1_ps(none), _mm_set1_ps(none)};
  int32_t at = 0;
  for (; at + 16 <= count; at += 16) {
    // max_ps yields its second operand if either is NaN.
    for (int i = 0; i < 4; ++i) lanes[i] = _mm_max_ps(_mm_loadu_ps(logits + at + 4 * i), lanes[i]);
  }
  alignas(16) float rest[16];
  for (int i = 0; i < 4; ++i) _mm_store_ps(rest + 4 * i, lanes[i]);
  float largest = *std::max_element(rest, rest + 16);
  for (; at < count; ++at) largest = logits[at] > largest ? logits[at] : largest;
  return largest;
}

}  // namespace

// SplitMix64 (Steele, Lea, Flood 2014): 53 random bits in [0, 1).
double Sampler::draw() {
  state_ += 0x9E3779B97F4A7C15u;
  uint64_t bits = state_;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  bits ^= bits >> 31;
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

namespace {

struct MoreLikely {
  template <class Candidate>
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  }
};

}  // namespace

void Sampler::keep_top_k() {
  const auto count = static_cast<size_t>(options_.top_k);
  if (options_.top_k <= 0 || count >= candidates_.size()) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + options_.top_k - 1,
                   candidates_.end(), MoreLikely());
  candidates_.resize(count);
}

void Sampler::keep_top_p(float scale) {
  if (options_.top_p <= 0 || options_.top_p >= 1) return;
  double total = 0;
  for (const Candidate& one : candidates_) total += std::exp((one.logit - largest_) * scale);
  // Sort only as many as are needed: the nucleus is small most of the time.
  double sum = 0;
  size_t sorted = 0;
  for (size_t wanted = 64; sorted < candidates_.size(); wanted *= 4) {
    const size_t end = std::min(wanted, candidates_.size());
    std::partial_sort(candidates_.begin() + sorted, candidates_.begin() + end, candidates_.end(),
                      MoreLikely());
    for (; sorted < end; ++sorted) {
      sum += std::exp((candidates_[sorted].logit - largest_) * scale);
      if (sum >= total * options_.top_p) {
        candidates_.resize(sorted + 1);
        return;
      }
    }
  }
}

int32_t Sampler::choose(const float* logits, int32_t vocab_size) {
  largest_ = largest_of(logits, vocab_size);
  if (!std::isfinite(largest_)) {
    fail(ATSC_INTERNAL_ERROR, "the logits hold no finite number: the model or its weights are broken");
  }
  if (options_.temperature <= 0) {
    return static_cast<int32_t>(std::find(logits, logits + vocab_size, largest_) - logits);
  }
  const float scale = 1 / options_.temperature;
  float least = kNegligible;
  if (options_.min_p > 0) least = std::max(least, std::log(options_.min_p));
  candidates_.clear();
  for (int32_t token = 0; token < vocab_size; ++token) {
    if ((logits[token] - largest_) * scale >= least) candidates_.push_back({logits[token], token});
  }
  keep_top_k();
  keep_top_p(scale);
  double total = 0;
  for (const Candidate& one : candidates_) total += std::exp((one.logit - largest_) * scale);
  double left = draw() * total;
  for (const Candidate& one : candidates_) {
    left -= std::exp((one.logit - largest_) * scale);
    if (left < 0) return one.token;
  }
  return candidates_.back().token;
}

}  // namespace atsc
