// One round of host and device as it is run again and again, and the record of its latest run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "executor.h"
#include "round_builder.h"

namespace atsc {

// When the parts of the latest round ran, on the host's clock.
struct RoundRecord {
  struct Segment {
    int64_t wait_ns, begin_ns, end_ns;  // wait: when it began to wait for the device
    int first_node, last_node;
  };
  struct Run {
    int64_t begin_ns, end_ns;
    int first_node, last_node;
  };
  struct Copy {
    int unit;
    int64_t begin_ns, copied_ns;
    int64_t wait_ns, ready_ns;   // their difference is the exposed wait
  };
  int64_t begin_ns = 0, end_ns = 0;
  int64_t position = 0;  // of the first token
  std::vector<Segment> segments;
  std::vector<Run> runs;
  std::vector<Copy> copies;
};

struct RoundShape {
  int64_t num_tokens, num_logit_rows;

  bool operator==(const RoundShape&) const = default;
};

// Rounds with equal shape, session and promotions run the same one.
struct HybridRound {
  const SessionPlace* place;
  RoundShape shape;
  int version;  // of the shape's choice
  std::vector<Advance> advances;
  BuiltRound built;
  std::unique_ptr<Executor::Program> program;
  std::unique_ptr<Executable> executable;  // null: the host does everything
  uint64_t last_used;
};

}  // namespace atsc
