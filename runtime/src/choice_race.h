// Which of some choices is the fastest, where predictions differ by less than they are worth. Each runs for
// some rounds, one after the other, and those that were about as fast as the fastest once more, for a
// machine changes its pace meanwhile; then the one whose rounds took least goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "round_builder.h"

namespace atsc {

class ChoiceRace {
 public:
  struct Entry {
    Choice choice;
    int64_t round_ns;                    // as predicted
    std::vector<int64_t> taken_ns = {};  // by its rounds
  };
  // Between the choice that runs already, which comes first, and others; none: no race.
  void begin(std::vector<Entry> entries);
  void reset() { *this = {}; }
  bool is_under_way() const { return !entries_.empty(); }

  // A round of the entry that runs.
  void observe(int64_t taken_ns);

  // What rounds do from now on.
  struct Step {
    Choice choice;
    int64_t before_ns;    // mean of the rounds of what runs
    int64_t after_ns;     // the same of the next one; as predicted where none has run
    size_t num_compared;  // 0: there are more to come
    bool is_another;      // than what runs already
  };
  // If enough rounds have run. Without more to come the race is over, and the step is to the winner.
  std::optional<Step> next();

 private:
  std::optional<size_t> next_from(size_t index) const;

  std::vector<Entry> entries_;  // empty: no race
  size_t running_ = 0;
  int heat_ = 0;
  int num_rounds_ = 0;  // of this entry in this heat, and the one that pays for the swap
};

}  // namespace atsc
