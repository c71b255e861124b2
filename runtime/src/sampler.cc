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

struct MoreLikely {
  template <class Candidate>
  bool operator()(const Candidate& a, const Candidate& b) const {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
  }
};

// e^x of numbers from -87 to 0, within 3e-7 of it.
__m128 exp_of(__m128 x) {
  const __m128i n = _mm_cvtps_epi32(_mm_mul_ps(x, _mm_set1_ps(1.44269504f)));
  const __m128 whole = _mm_cvtepi32_ps(n);
  // ln 2 in two parts: products with the first are exact.
  __m128 r = _mm_sub_ps(x, _mm_mul_ps(whole, _mm_set1_ps(0.693359375f)));
  r = _mm_add_ps(r, _mm_mul_ps(whole, _mm_set1_ps(2.12194440e-4f)));
  __m128 sum = _mm_set1_ps(1.0f / 720);
  for (const float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm_add_ps(_mm_mul_ps(sum, r), _mm_set1_ps(factor));
  }
  return _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(sum), _mm_slli_epi32(n, 23)));
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

// The top_k most likely of those that are not dropped, in any order.
void Sampler::find_top_k(const float* logits, int32_t vocab_size, const Scale& scale) {
  const auto count = static_cast<size_t>(options_.top_k);
  const size_t most = std::max<size_t>(4 * count, 512);
  float least = largest_ + scale.least / scale.factor;
  const auto add = [&](int32_t token) {
    if (!((logits[token] - largest_) * scale.factor >= scale.least)) return;
    candidates_.push_back({logits[token], token, 0});
    if (candidates_.size() < most) return;
    keep_top_k();
    // Of equal logits the first ones stay.
    least = std::nextafter(candidates_[count - 1].logit, std::numeric_limits<float>::infinity());
  };
  int32_t at = 0;
  for (; at + 4 <= vocab_size; at += 4) {
    const __m128 four = _mm_loadu_ps(logits + at);
    int likely = _mm_movemask_ps(_mm_cmpge_ps(four, _mm_set1_ps(least)));
    for (; likely != 0; likely &= likely - 1) add(at + __builtin_ctz(static_cast<unsigned>(likely)));
  }
  for (; at < vocab_size; ++at) {
    if (logits[at] >= least) add(at);
  }
  keep_top_k();
}

void Sampler::keep_top_k() {
  const auto count = static_cast<size_t>(options_.top_k);
  if (count >= candidates_.size()) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + options_.top_k - 1,
                   candidates_.end(), MoreLikely());
  candidates_.resize(count);
}

// Of all tokens; what is dropped, or no number, weighs nothing. Returns their sum.
double Sampler::weigh_all(const float* logits, int32_t vocab_size, const Scale& scale) {
  const int32_t padded = (vocab_size + kBlock - 1) / kBlock * kBlock;
  weights_.resize(static_cast<size_t>(padded));
  sums_.clear();
  const __m128 largest = _mm_set1_ps(largest_), factor = _mm_set1_ps(scale.factor);
  const __m128 least = _mm_set1_ps(scale.least);
  double total = 0;
  for (int32_t block = 0; block < padded; block += kBlock) {
    __m128 sum = _mm_setzero_ps();
    for (int32_t at = block; at < block + kBlock; at += 4) {
      alignas(16) float last[4] = {NAN, NAN, NAN, NAN};
      for (int i = 0; at + 4 > vocab_size && at + i < vocab_size; ++i) last[i] = logits[at + i];
      const __m128 four = at + 4 > vocab_size ? _mm_load_ps(last) : _mm_loadu_ps(logits + at);
      const __m128 x = _mm_mul_ps(_mm_sub_ps(four, largest), factor);
      const __m128 weight = _mm_and_ps(exp_of(x), _mm_cmpge_ps(x, least));
      _mm_storeu_ps(weights_.data() + at, weight);
      sum = _mm_add_ps(sum, weight);
    }
    alignas(16) float four[4];
    _mm_store_ps(four, sum);
    sums_.push_back((static_cast<double>(four[0]) + four[1]) + (static_cast<double>(four[2]) + four[3]));
    total += sums_.back();
  }
  return total;
}

// The candidates that top_p may keep: all others together weigh less than it drops.
void Sampler::find_nucleus(const float* logits, int32_t vocab_size, double total) {
  const auto enough = static_cast<float>(total * (1 - options_.top_p) / vocab_size);
  const __m128 least = _mm_set1_ps(std::max(enough, std::numeric_limits<float>::min()));
  for (size_t at = 0; at < weights_.size(); at += 4) {
    int likely = _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(weights_.data() + at), least));
    for (; likely != 0; likely &= likely - 1) {
      const size_t token = at + static_cast<size_t>(__builtin_ctz(static_cast<unsigned>(likely)));
      candidates_.push_back({logits[token], static_cast<int32_t>(token), weights_[token]});
    }
  }
}

// `total` is the weight of all, with those that are no candidates.
void Sampler::keep_top_p(double total) {
  // Sort only as many as are needed: the nucleus is small most of the time.
  double sum = 0;
  size_t sorted = 0;
  for (size_t wanted = 64; sorted < candidates_.size(); wanted *= 4) {
    const size_t end = std::min(wanted, candidates_.size());
    std::partial_sort(candidates_.begin() + sorted, candidates_.begin() + end, candidates_.end(),
                      MoreLikely());
    for (; sorted < end; ++sorted) {
      sum += candidates_[sorted].weight;
      if (sum >= total * options_.top_p) {
        candidates_.resize(sorted + 1);
        return;
      }
    }
  }
}

int32_t Sampler::draw_candidate() {
  double total = 0;
  for (const Candidate& one : candidates_) total += one.weight;
  double left = draw() * total;
  for (const Candidate& one : candidates_) {
    left -= one.weight;
    if (left < 0) return one.token;
  }
  return candidates_.back().token;
}

// In proportion to weights_.
int32_t Sampler::draw_any(double total) {
  double left = draw() * total;
  size_t block = 0;
  while (block + 1 < sums_.size() && left >= sums_[block]) left -= sums_[block++];
  // A block's sum and those of its weights one by one may differ in the last digits.
  int32_t found = -1;
  for (int32_t at = static_cast<int32_t>(block) * kBlock; found < 0 || left >= 0; ++at) {
    if (at == static_cast<int32_t>(weights_.size())) break;
    if (weights_[static_cast<size_t>(at)] == 0) continue;
    left -= weights_[static_cast<size_t>(at)];
    found = at;
  }
  if (found >= 0) return found;
  const auto last = std::find_if(weights_.rbegin(), weights_.rend(), [](float w) { return w > 0; });
  return static_cast<int32_t>(weights_.rend() - last) - 1;
}

int32_t Sampler::choose(const float* logits, int32_t vocab_size) {
  largest_ = largest_of(logits, vocab_size);
  if (!std::isfinite(largest_)) {
    fail(ATSC_INTERNAL_ERROR, "the logits hold no finite number: the model or its weights are broken");
  }
  if (options_.temperature <= 0) {
    return static_cast<int32_t>(std::find(logits, logits + vocab_size, largest_) - logits);
  }
  Scale scale{1 / options_.temperature, kNegligible};
  if (options_.min_p > 0) scale.least = std::max(scale.least, std::log(options_.min_p));
  const bool has_top_p = options_.top_p > 0 && options_.top_p < 1;
  candidates_.clear();
  if (options_.top_k > 0 && options_.top_k < vocab_size) {
    find_top_k(logits, vocab_size, scale);
    double total = 0;
    for (Candidate& one : candidates_) {
      total += one.weight = std::exp((one.logit - largest_) * scale.factor);
    }
    if (has_top_p) keep_top_p(total);
    return draw_candidate();
  }
  const double total = weigh_all(logits, vocab_size, scale);
  if (!has_top_p) return draw_any(total);
  find_nucleus(logits, vocab_size, total);
  keep_top_p(total);
  return draw_candidate();
}

}  // namespace atsc
