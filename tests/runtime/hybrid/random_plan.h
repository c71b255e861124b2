// A plan made at run time, for tests of rounds on host and device: layers of two linear units and a
// cache, units of random sizes that live on either side, slots of random number and size. Sums have
// one order, so results are equal to the bit wherever a unit runs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "checksum.h"
#include "device_virtual.h"
#include "executor.h"
#include "hybrid_executor.h"
#include "residency.h"
#include "session.h"
#include "tables.h"

namespace atsc::testing {

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

inline constexpr int kWidth = 16, kHeads = 4, kVocab = 32, kChunk = 12, kContext = 64;
inline constexpr double kCpuShare = 0.85;
using Random = std::mt19937_64;

inline int below(Random& random, int limit) {
  return static_cast<int>(random() % static_cast<uint64_t>(limit));
}

inline double between(Random& random, double least, double most) {
  return std::uniform_real_distribution(least, most)(random);
}

namespace kernels {

inline const float* in(const KernelArgs& a, int slot) {
  return static_cast<const float*>(a.in[slot]);
}
inline float* out(const KernelArgs& a) { return static_cast<float*>(a.out[0]); }
inline int64_t rows(const KernelArgs& a) { return a.rows; }
inline int64_t outputs(const KernelArgs&) { return kWidth; }
inline int64_t tokens(const KernelArgs&) { return kVocab; }

inline float dot(const float* x, const float* w) {
  float sum = 0;
  for (int k = 0; k < kWidth; ++k) sum += x[k] * w[k];
  return sum;
}

inline void embed(const KernelArgs& a, int64_t begin, int64_t end) {
  const auto* ids = static_cast<const int32_t*>(a.in[0]);
  for (int64_t m = begin; m < end; ++m) {
    std::memcpy(out(a) + m * kWidth, in(a, 1) + ids[m] * kWidth, kWidth * sizeof(float));
  }
}

// y = x + w x / (1 + max |x|), by outputs
inline void linear(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < a.rows; ++m) {
    const float* x = in(a, 0) + m * kWidth;
    float largest = 0;
    for (int k = 0; k < kWidth; ++k) largest = std::max(largest, std::abs(x[k]));
    for (int64_t n = begin; n < end; ++n) {
      out(a)[m * kWidth + n] = x[n] + dot(x, in(a, 1) + n * kWidth) / (1 + largest);
    }
  }
}

// Keeps x in K, and its negative in V; y = x + what was kept at half the position in K / 2, in V / 4.
inline void remember(const KernelArgs& a, int64_t begin, int64_t end) {
  constexpr int kHeadSize = kWidth / kHeads;
  auto *k = static_cast<_Float16*>(a.k_cache), *v = static_cast<_Float16*>(a.v_cache);
  for (int64_t i = begin; i < end; ++i) {
    const auto at = [&](int64_t t) {
      return (i / kHeadSize * a.kv_capacity + t % a.kv_capacity) * kHeadSize + i % kHeadSize;
    };
    for (int64_t m = 0; m < a.rows; ++m) {
      const int64_t t = a.position + m;
      const float x = in(a, 0)[m * kWidth + i];
      k[at(t)] = static_cast<_Float16>(x);
      v[at(t)] = static_cast<_Float16>(-x);
      const auto old_k = static_cast<float>(k[at(t / 2)]), old_v = static_cast<float>(v[at(t / 2)]);
      out(a)[m * kWidth + i] = x + old_k / 2 + old_v / 4;
    }
  }
}

inline void select(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float* x = in(a, 0) + a.logit_rows[r] * kWidth;
    std::memcpy(out(a) + r * kWidth, x, kWidth * sizeof(float));
  }
}

inline void head(const KernelArgs& a, int64_t begin, int64_t end) {
  for (int64_t v = begin; v < end; ++v) {
    for (int64_t r = 0; r < a.rows; ++r) {
      out(a)[r * kVocab + v] = dot(in(a, 0) + r * kWidth, in(a, 1) + v * kWidth);
    }
  }
}

inline constexpr CpuKernel kEmbed{"embed", embed, rows, nullptr};
inline constexpr CpuKernel kLinear{"linear", linear, outputs, nullptr};
inline constexpr CpuKernel kRemember{"remember", remember, outputs, nullptr};
inline constexpr CpuKernel kSelect{"select", select, rows, nullptr};
inline constexpr CpuKernel kHead{"head", head, tokens, nullptr};

}  // namespace kernels

// Tables that live as long as the object. Times are made up; see `policy_test.cc`.
class RandomPlan {
 public:
  RandomPlan(Random& random, int num_layers) {
    const Operand ids{OperandKind::kTokenIds, 0};
    add_unit(random, UnitKind::kHost, kVocab * kWidth);
    add_node(kernels::kEmbed, {ids, weight()}, RowsOf::kTokens, -1);
    for (int layer = 0; layer < num_layers; ++layer) {
      add_unit(random, UnitKind::kWeights, kWidth * kWidth);
      add_node(kernels::kLinear, {value(), weight()}, RowsOf::kTokens, -1);
      add_unit(random, UnitKind::kKvCache, kWidth);  // a norm's, say
      add_node(kernels::kRemember, {value()}, RowsOf::kTokens, layer);
      caches_.push_back({kHeads, kWidth / kHeads, 0, kContext});
      add_unit(random, UnitKind::kWeights, kWidth * kWidth);
      add_node(kernels::kLinear, {value(), weight()}, RowsOf::kTokens, -1);
    }
    add_unit(random, UnitKind::kWeights, kVocab * kWidth);
    add_node(kernels::kSelect, {value()}, RowsOf::kLogitRows, -1);
    add_node(kernels::kHead, {value(), weight()}, RowsOf::kLogitRows, -1, true);
    for (auto& text : names_) text_.push_back(text.c_str());
    for (size_t unit = 0; unit < units.size(); ++unit) units[unit].name = text_[unit];
    for (NodeEntry& node : nodes_) node.name = units[static_cast<size_t>(node.unit)].name;
  }

  RandomPlan(RandomPlan&&) = default;  // tables refer to names, which a copy would not move along

  Plan plan() const {
    Plan made{};
    made.abi_version = kAbiVersion;
    made.model_name = made.plan_id = "random";
    made.vocab_size = kVocab;
    made.context_length = kContext;
    made.chunk = made.max_logit_rows = kChunk;
    made.bos_token_id = -1;
    made.arena_bytes = 4 * kValueBytes;
    made.private_arena_bytes = 0;
    made.weights_bytes = weights.size();
    made.num_values = static_cast<int32_t>(values_.size());
    made.num_nodes = static_cast<int32_t>(nodes_.size());
    made.num_units = static_cast<int32_t>(units.size());
    made.num_caches = static_cast<int32_t>(caches_.size());
    made.values = values_.data();
    made.nodes = nodes_.data();
    made.units = units.data();
    made.caches = caches_.data();
    made.device.kind = DeviceKind::kVirtual;
    made.device.hand_off_ns = 10'000;
    made.device.link_bytes_per_s = 20e9;
    made.device.cpu_share = kCpuShare;
    return made;
  }

  void write(const std::string& path) const {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(weights.data()),
               static_cast<std::streamsize>(weights.size()));
  }

  std::vector<UnitEntry> units;
  std::vector<std::byte> weights;

 private:
  static constexpr uint64_t kValueBytes = kChunk * kWidth * sizeof(float), kPage = 4096;

  void add_unit(Random& random, UnitKind kind, int num_weights) {
    UnitEntry unit{};
    unit.offset = weights.size();
    unit.kind = kind;
    if (num_weights > 0) {
      unit.bytes = static_cast<uint64_t>(num_weights) * sizeof(float) +
                   kPage * static_cast<uint64_t>(below(random, 4));
    }
    std::vector<float> numbers(unit.bytes / sizeof(float));
    for (float& number : numbers) number = static_cast<float>(between(random, -0.5, 0.5));
    const auto* bytes = reinterpret_cast<const std::byte*>(numbers.data());
    unit.crc32 = crc32(0, bytes, unit.bytes);
    weights.insert(weights.end(), bytes, bytes + unit.bytes);
    weights.resize((weights.size() + kPage - 1) / kPage * kPage);
    names_.push_back("unit" + std::to_string(units.size()));
    units.push_back(unit);
  }

  Operand weight() const { return {OperandKind::kWeight, units.back().offset}; }
  Operand value() const { return {OperandKind::kValue, values_.size() - 1}; }
  Operand next_value() {
    values_.push_back({values_.size() % 4 * kValueBytes, kValueBytes, kNotPrivate});
    return value();
  }

  // Its output is the next value, or logits.
  void add_node(const CpuKernel& kernel, const std::vector<Operand>& in, RowsOf rows, int layer,
                bool makes_logits = false) {
    NodeEntry node{};
    node.op = kernel.name;
    node.few_rows[0] = node.many_rows[0] = &kernel;
    for (size_t slot = 0; slot < in.size(); ++slot) node.in[slot] = in[slot];
    node.out[0] = makes_logits ? Operand{OperandKind::kLogits, 0} : next_value();
    node.rows = rows;
    node.group = static_cast<int>(nodes_.size());
    node.unit = static_cast<int>(units.size()) - 1;
    node.layer = layer;
    nodes_.push_back(node);
  }

  std::vector<ValueEntry> values_;
  std::vector<NodeEntry> nodes_;
  std::vector<CacheEntry> caches_;
  std::vector<std::string> names_;
  std::vector<const char*> text_;
};

// A plan in use: everything but the C interface.
struct Setup {
  Setup(const RandomPlan& made, const std::string& path, const Placement& placement,
        const VirtualOptions& options, int num_threads, int sessions,
        uint64_t reserve_bytes = 0)
      : plan(made.plan()),
        pool(num_threads),
        device(open_virtual_device(options)),
        weights(platform::Mapping::anonymous(plan.weights_bytes, false, "weights")),
        executor(plan, weights.data(), 1, pool),
        reference(plan, made.weights.data(), 1, pool) {
    made.write(path);
    const Residency::HostMemory host{weights.data(), executor.arena(), reserve_bytes};
    residency = std::make_unique<Residency>(plan, *device, placement, sessions, host, path, pool);
  }

  Plan plan;
  Pool pool;
  std::unique_ptr<VirtualDevice> device;
  platform::Mapping weights;
  Executor executor, reference;  // of what is on the host; of everything
  std::unique_ptr<Residency> residency;
};

// Bits for units, slots for some of them.
inline Placement random_placement(Random& random, const RandomPlan& made, double share) {
  Placement placement;
  uint64_t largest = 0;
  for (const UnitEntry& unit : made.units) {
    placement.on_device.push_back(between(random, 0, 1) < share);
    largest = std::max(largest, unit.bytes);
  }
  placement.num_slots = 1 + below(random, 4);
  placement.slot_bytes = (largest / 4 + random() % largest) / 256 * 256;
  return placement;
}

}  // namespace atsc::testing
