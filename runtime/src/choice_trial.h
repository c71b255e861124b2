// Whether a new choice of promotions keeps its promise: rounds after it against rounds before it.
//
// The scheduler predicts from times of units, and may be wrong where something weighs that it does
// not know. So the first rounds of a new choice are a trial. They are compared with the latest ones
// of the choice before, which already ran at the speeds that the question was about: a change shows
// after as many rounds as are kept here. Only rounds at about the same depth count. How much slower
// is too much follows from how much rounds jitter, and is at least what a choice had to promise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace atsc {

// A better choice must promise at least this share of the round.
inline constexpr double kWorthwhileGain = 0.03;

class ChoiceTrial {
 public:
  struct RoundTime {
    int64_t taken_ns;
    int64_t position;  // of its first token
    int64_t num_tokens;
  };

  // A round of the present choice.
  void observe(const RoundTime& round);

  // The next rounds run another choice. There is no trial if too little is known of this one.
  // `must_gain`: what takes memory and time to begin with must be faster, not only as fast.
  void begin(bool must_gain = false);
  // Forgets all rounds; no trial.
  void reset() { *this = {}; }

  bool is_under_way() const { return is_under_way_; }
  // Ends the trial if it is time: whether the choice before was better.
  bool was_better_before();

  // Medians of the rounds compared.
  int64_t before_ns() const { return median_ns(before_); }
  int64_t after_ns() const { return median_ns(after_); }

 private:
  static int64_t median_ns(std::vector<RoundTime> rounds);
  static double jitter(const std::vector<RoundTime>& rounds);

  std::vector<RoundTime> before_, after_;  // the latest of the choice before; of this one
  bool is_under_way_ = false, must_gain_ = false;
  int num_rounds_ = 0;  // since the trial began

  static constexpr size_t kKept = 5, kLeastBefore = 3;
  static constexpr size_t kEarly = 4, kEnough = 12;
  static constexpr int kMostRounds = 40;  // then a trial without comparable rounds is over
  static constexpr int64_t kAlikePositions = 256;
};

}  // namespace atsc
