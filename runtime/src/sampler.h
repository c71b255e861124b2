// Chooses a token from a row of logits.
//
// Order: divide by the temperature; drop what is below min_p times the most likely token; keep the
// top_k largest; keep the fewest of these that together have at least top_p of their probability;
// draw from what is left in proportion. Equal logits rank by token id. Deterministic for a seed.
#pragma once

#include <cstdint>
#include <vector>

namespace atsc {

struct SamplingOptions {
  float temperature = 0;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
};

class Sampler {
 public:
  Sampler() = default;
  Sampler(const SamplingOptions& options, uint64_t seed) : options_(options), state_(seed) {}

  // Fails if no logit is a finite number.
  int32_t choose(const float* logits, int32_t vocab_size);

  const SamplingOptions& options() const { return options_; }
  uint64_t state() const { return state_; }

 private:
  struct Candidate {
    float logit;
    int32_t token;
    float weight;  // its probability to that of the most likely one
  };
  struct Scale {
    float factor, least;  // logits below the largest one, times the factor; less than least: dropped
  };

  double draw();
  void find_top_k(const float* logits, int32_t vocab_size, const Scale& scale);
  void keep_top_k();
  double weigh_all(const float* logits, int32_t vocab_size, const Scale& scale);
  void find_nucleus(const float* logits, int32_t vocab_size, double total);
  void keep_top_p(double total);
  int32_t draw_candidate();
  int32_t draw_any(double total);

  static constexpr int32_t kBlock = 256;

  SamplingOptions options_;
  uint64_t state_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<float> weights_;  // of all tokens; the last block is filled up with zeros
  std::vector<double> sums_;    // of blocks of them
  float largest_ = 0;
};

}  // namespace atsc
