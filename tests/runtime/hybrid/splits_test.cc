// Random graphs, arenas and placements through make_splits, against an independent checker: whatever
// host and device do at once must not touch the same bytes unless both only read, nobody waits for
// ever, and every node reads the values that it should. splits_test SEED COUNT; prints "fine".
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "splits.h"

namespace atsc {
namespace {

constexpr uint64_t kGranule = 64;

struct Graph {
  std::vector<ValueEntry> values;
  std::vector<NodeEntry> nodes;
  std::vector<Runner> runners;
  Plan plan{};
};

using Random = std::mt19937;

int below(Random& random, int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); }

// A value a node; a node reads a few recent values. Places are used again by first fit, as soon as
// nobody reads their values any more.
Graph make_graph(Random& random) {
  Graph graph;
  const int count = 4 + below(random, 40);
  std::vector<int> last_reader(static_cast<size_t>(count));
  for (int node = 0; node < count; ++node) {
    NodeEntry entry{};
    entry.name = "node";
    entry.out[0] = {OperandKind::kValue, static_cast<uint64_t>(node)};
    const int reads = node == 0 ? 0 : 1 + below(random, 3);
    for (int slot = 0; slot < reads; ++slot) {
      const int value = std::max(0, node - 1 - below(random, slot == 0 ? 2 : 6));
      entry.in[slot] = {OperandKind::kValue, static_cast<uint64_t>(value)};
      last_reader[value] = node;
    }
    graph.nodes.push_back(entry);
  }
  for (int value = 0; value < count; ++value) {
    const uint64_t bytes = kGranule * static_cast<uint64_t>(1 + below(random, 4));
    uint64_t offset = 0;
    for (int other = 0; other < value;) {
      const ValueEntry& there = graph.values[other];
      const bool lives = last_reader[other] >= value;
      if (lives && offset < there.offset + there.bytes && there.offset < offset + bytes) {
        offset = there.offset + there.bytes;
        other = 0;
      } else {
        ++other;
      }
    }
    graph.values.push_back({offset, bytes, kNotPrivate});
    last_reader[value] = std::max(last_reader[value], value);
  }
  Runner runner = Runner::kHost;
  const int keep = 1 + below(random, 6);
  for (int node = 0; node < count; ++node) {
    if (below(random, keep) == 0) runner = below(random, 2) ? Runner::kHost : Runner::kDevice;
    graph.runners.push_back(runner);
  }
  graph.plan.num_values = graph.plan.num_nodes = count;
  graph.plan.values = graph.values.data();
  graph.plan.nodes = graph.nodes.data();
  return graph;
}

enum class Do : uint8_t { kRead, kWrite, kWait, kTell };

struct Action {
  Do what;
  bool in_host_arena;
  int value;  // of a wait or a tell: the count
};

struct Access {
  int side, clock, known_of_other;
  bool writes;
};

class Checker {
 public:
  Checker(const Graph& graph, const Splits& splits) : graph_(graph) {
    uint64_t end = 0;
    for (const ValueEntry& value : graph.values) end = std::max(end, value.offset + value.bytes);
    for (int arena = 0; arena < 2; ++arena) {
      content_[arena].assign(end / kGranule, -1);
      accesses_[arena].resize(end / kGranule);
    }
    for (size_t index = 0; index < splits.segments.size(); ++index) {
      const HostSegment& segment = splits.segments[index];
      if (segment.await_run > 0) add(0, Do::kWait, segment.await_run);
      for (const int node : segment.nodes) add_node(0, node);
      add(0, Do::kTell, static_cast<int>(index) + 1);
    }
    for (size_t index = 0; index < splits.runs.size(); ++index) {
      const DeviceRun& run = splits.runs[index];
      for (const DeviceStep& step : run.steps) {
        if (step.wait_segment > 0) add(1, Do::kWait, step.wait_segment);
        for (const int value : step.pulls) {
          actions_[1].push_back({Do::kRead, true, value});
          actions_[1].push_back({Do::kWrite, false, value});
        }
        add_node(1, step.node);
      }
      if (run.wait_segment > 0) add(1, Do::kWait, run.wait_segment);
      for (const int value : run.pushes) {
        actions_[1].push_back({Do::kRead, false, value});
        actions_[1].push_back({Do::kWrite, true, value});
      }
      if (run.is_awaited) add(1, Do::kTell, static_cast<int>(index) + 1);
    }
  }

  // Null if all is well.
  const char* check(Random& random) {
    size_t done[2] = {0, 0};
    while (done[0] < actions_[0].size() || done[1] < actions_[1].size()) {
      const int first = below(random, 2);
      bool moved = false;
      for (const int side : {first, 1 - first}) {
        const int burst = 1 + below(random, 12);
        for (int i = 0; i < burst && done[side] < actions_[side].size(); ++i) {
          if (!step(side, actions_[side][done[side]])) break;
          ++done[side];
          moved = true;
        }
      }
      if (!moved) return "both sides wait for ever";
      if (wrong_ != nullptr) return wrong_;
    }
    return races() ? "host and device use the same bytes at once" : nullptr;
  }

 private:
  void add(int side, Do what, int count) { actions_[side].push_back({what, false, count}); }

  void add_node(int side, int node) {
    for (const Operand& in : graph_.nodes[node].in) {
      if (in.kind != OperandKind::kValue) continue;
      actions_[side].push_back({Do::kRead, side == 0, static_cast<int>(in.index)});
    }
    actions_[side].push_back({Do::kWrite, side == 0, node});
  }

  bool step(int side, const Action& action) {
    ++clock_[side];
    if (action.what == Do::kTell) {
      told_[side].resize(static_cast<size_t>(action.value) + 1, clock_[side]);
      return true;
    }
    if (action.what == Do::kWait) {
      const auto count = static_cast<size_t>(action.value);
      if (told_[1 - side].size() <= count) return false;
      known_[side] = std::max(known_[side], told_[1 - side][count]);
      return true;
    }
    const ValueEntry& place = graph_.values[action.value];
    const int arena = action.in_host_arena ? 0 : 1;
    for (uint64_t at = place.offset; at < place.offset + place.bytes; at += kGranule) {
      int& content = content_[arena][at / kGranule];
      const bool writes = action.what == Do::kWrite;
      if (!writes && content != action.value) wrong_ = "a value is not where it is read";
      if (writes) content = action.value;
      accesses_[arena][at / kGranule].push_back({side, clock_[side], known_[side], writes});
    }
    return true;
  }

  static bool comes_before(const Access& one, const Access& other) {
    return other.known_of_other >= one.clock;
  }

  bool races() const {
    for (const auto& arena : accesses_) {
      for (const std::vector<Access>& place : arena) {
        for (const Access& one : place) {
          for (const Access& other : place) {
            if (one.side == other.side || !(one.writes || other.writes)) continue;
            if (!comes_before(one, other) && !comes_before(other, one)) return true;
          }
        }
      }
    }
    return false;
  }

  const Graph& graph_;
  std::vector<Action> actions_[2];  // host, device
  std::vector<int> content_[2];     // by arena: the value in each granule
  std::vector<std::vector<Access>> accesses_[2];
  int clock_[2] = {0, 0};
  int known_[2] = {0, 0};           // the other side's clock, as far as was waited for
  std::vector<int> told_[2] = {{0}, {0}};
  const char* wrong_ = nullptr;
};

bool crosses_right(const Graph& graph, const Splits& splits) {
  for (int value = 0; value < graph.plan.num_values; ++value) {
    bool read_there = false;
    for (int node = 0; node < graph.plan.num_nodes; ++node) {
      for (const Operand& in : graph.nodes[node].in) {
        if (in.kind != OperandKind::kValue || static_cast<int>(in.index) != value) continue;
        read_there = read_there || graph.runners[node] == Runner::kDevice;
      }
    }
    const bool expected = graph.runners[value] == Runner::kHost && read_there;
    if (splits.crosses[value] != expected) return false;
  }
  return true;
}

}  // namespace
}  // namespace atsc

int main(int argc, char** argv) {
  using namespace atsc;
  if (argc != 3) return 64;
  size_t hand_offs = 0;
  for (int number = 0; number < std::atoi(argv[2]); ++number) {
    Random random(static_cast<unsigned>(std::atoi(argv[1]) + number));
    const Graph graph = make_graph(random);
    const Splits splits = make_splits(graph.plan, graph.runners);
    const char* wrong = Checker(graph, splits).check(random);
    if (!crosses_right(graph, splits)) wrong = "a value crosses unknown, or is said to cross";
    if (wrong != nullptr) {
      std::fprintf(stderr, "graph %d: %s\n", number, wrong);
      return 1;
    }
    for (const DeviceRun& run : splits.runs) hand_offs += run.pushes.size();
  }
  if (hand_offs == 0) return 2;  // nothing was tested
  std::puts("fine");
}
