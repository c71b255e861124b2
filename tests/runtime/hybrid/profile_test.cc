// What timed units read, on host and device.
//
//     profile_test inputs                    of a plan: prints "fine"
//     profile_test floats ROWS WIDTH FILE    made-up activations, as raw floats
//     profile_test cache BYTES FILE          a made-up cache
#include <cmath>
#include <set>

#include "profiler.h"
#include "profiler_inputs.h"
#include "random_plan.h"

namespace atsc::testing {
namespace {

constexpr int64_t kInputs = 640, kMostRows = 64;

// What the probe saw, call by call: all numbers, and the share of blocks with a second digit.
struct Seen {
  std::set<uint32_t> checksums;
  std::vector<double> refined;
  std::vector<int64_t> rows;
} seen;

// The scales of compiler/ops/quantize.py; nobody reads the codes here.
void quantize(const KernelArgs& a, int64_t begin, int64_t end) {
  const auto* x = static_cast<const float*>(a.in[0]);
  const Q8View first = q8_view(a.out[0], a.rows, kInputs);
  const Q8View second = q8_view(a.out[0], a.rows, kInputs, 1);
  for (int64_t row = begin; row < end; ++row) {
    double total = 0;
    for (int64_t block = 0; block < q8_blocks(kInputs); ++block) {
      float largest = 0;
      for (int64_t i = 0; i < kQ8Block; ++i) {
        largest = std::max(largest, std::abs(x[row * kInputs + block * kQ8Block + i]));
      }
      first.scales[block * a.rows + row] = largest / 127;
      total += largest / 127;
    }
    for (int64_t block = 0; block < q8_blocks(kInputs); ++block) {
      const int64_t at = block * a.rows + row;
      const bool is_refined = first.scales[at] > 2 * total / q8_blocks(kInputs);
      second.scales[at] = is_refined ? first.scales[at] / 254 : 0;
    }
  }
}

// y = x, and remembers its Q8 input and its cache.
void probe(const KernelArgs& a, int64_t, int64_t) {
  const int64_t blocks = q8_blocks(kInputs) * a.rows;
  const Q8View fine = q8_view(a.in[0], a.rows, kInputs, 1);
  double refined = 0;
  for (int64_t at = 0; at < blocks; ++at) refined += fine.scales[at] > 0;
  uint32_t checksum = 0;
  for (const Q8View& digit : {q8_view(a.in[0], a.rows, kInputs), fine}) {
    const auto* scales = reinterpret_cast<const std::byte*>(digit.scales);
    checksum = crc32(checksum, scales, static_cast<uint64_t>(blocks) * sizeof(float));
  }
  const auto floats = static_cast<uint64_t>(a.rows * kInputs) * sizeof(float);
  checksum = crc32(checksum, static_cast<const std::byte*>(a.in[1]), floats);
  const auto* keys = static_cast<const _Float16*>(a.k_cache);
  for (int64_t at = 0; at < a.kv_capacity * kWidth; ++at) {
    EXPECT(std::isfinite(static_cast<float>(keys[at])) && keys[at] != 0);
  }
  seen.checksums.insert(checksum);
  seen.refined.push_back(refined / static_cast<double>(blocks));
  seen.rows.push_back(a.rows);
  std::memcpy(a.out[0], a.in[1], floats);
}

int64_t once(const KernelArgs&) { return 1; }

constexpr CpuKernel kEmbed{"embed", kernels::embed, kernels::rows, nullptr};
constexpr CpuKernel kQuantize{"quantize", quantize, kernels::rows, nullptr};
constexpr CpuKernel kProbe{"probe", probe, once, nullptr};

constexpr uint64_t kFloats = kMostRows * kInputs * sizeof(float);
constexpr uint64_t kDigits = 2 * (kInputs / kQ8Block) * kMostRows * kQ8BytesPerBlock;

NodeEntry node(const CpuKernel& kernel, Operand in, Operand other, Operand out, int unit) {
  NodeEntry made{};
  made.name = made.op = kernel.name;
  made.few_rows[0] = made.many_rows[0] = &kernel;
  made.in[0] = in;
  made.in[1] = other;
  made.out[0] = out;
  made.rows = RowsOf::kTokens;
  made.group = unit;
  made.unit = unit;
  made.layer = -1;
  return made;
}

void check_inputs() {
  const auto value = [](uint64_t index) { return Operand{OperandKind::kValue, index}; };
  const Operand ids{OperandKind::kTokenIds, 0}, none{};
  // As an allocator may do it, y lies over x and its digits, which nothing reads after the probe.
  const ValueEntry values[] = {
      {0, kFloats, kNotPrivate, ValueType::kF32, kInputs},
      {kFloats, kDigits, 0, ValueType::kQ8, kInputs},
      {kFloats / 2, kFloats, kNotPrivate, ValueType::kF32, kInputs},
  };
  NodeEntry nodes[] = {
      node(kEmbed, ids, {OperandKind::kWeight, 0}, value(0), 0),
      node(kQuantize, value(0), none, value(1), 1),
      node(kProbe, value(1), value(0), value(2), 2),
  };
  nodes[1].flags = kReplicate;
  nodes[2].layer = 0;
  const UnitEntry units[] = {{"table", 0, 4096, 0, UnitKind::kHost},
                             {"q", 4096, 4096, 0},
                             {"probe", 8192, 4096, 0, UnitKind::kKvCache}};
  const CacheEntry caches[] = {{1, kWidth, 0, kContext}};
  Plan plan{};
  plan.vocab_size = kVocab;
  plan.context_length = kContext;
  plan.chunk = kMostRows;
  plan.max_logit_rows = 1;
  plan.arena_bytes = 2 * kFloats + kDigits;
  plan.private_arena_bytes = kDigits;
  plan.num_values = 3;
  plan.num_nodes = 3;
  plan.num_units = 3;
  plan.num_caches = 1;
  plan.values = values;
  plan.nodes = nodes;
  plan.units = units;
  plan.caches = caches;
  const std::vector<std::byte> weights(3 * 4096);
  Pool pool(2);
  Executor executor(plan, weights.data(), 1, pool);
  const auto device = open_virtual_device({});
  Profiler profiler(plan, executor, pool, weights.data(), device.get());
  for (const int64_t rows : {int64_t{1}, kMostRows}) {
    seen = {};
    EXPECT(profiler.unit_ns(2, false, rows, 0) > 0);
    const size_t on_host = seen.refined.size();
    EXPECT(on_host > 1);
    EXPECT(profiler.unit_ns(2, true, rows, 0) > 0);
    EXPECT(seen.refined.size() > on_host + 1);
    EXPECT(seen.checksums.size() == 1);  // in every repeat, on both sides
    for (const int64_t of_call : seen.rows) EXPECT(of_call == rows);
    EXPECT(0.05 < seen.refined[0] && seen.refined[0] < 0.15);
  }
}

void write(const std::vector<std::byte>& bytes, const char* path) {
  const auto count = static_cast<std::streamsize>(bytes.size());
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), count);
}

}  // namespace
}  // namespace atsc::testing

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "inputs") {
    atsc::testing::check_inputs();
  } else if (what == "floats" && argc == 5) {
    const int64_t rows = std::atoll(argv[2]), width = std::atoll(argv[3]);
    std::vector<std::byte> bytes(static_cast<size_t>(rows * width) * sizeof(float));
    atsc::fill_activations(reinterpret_cast<float*>(bytes.data()), rows, width);
    atsc::testing::write(bytes, argv[4]);
  } else if (what == "cache" && argc == 4) {
    std::vector<std::byte> bytes(static_cast<size_t>(std::atoll(argv[2])));
    atsc::fill_cache(bytes.data(), bytes.size());
    atsc::testing::write(bytes, argv[3]);
  } else {
    return 2;
  }
  std::puts("fine");
}
