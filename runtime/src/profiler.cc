#include "profiler.h"

#include <algorithm>
#include <cstring>

#include "failure.h"
#include "profiler_inputs.h"

namespace atsc {
namespace {

constexpr int kMostRepeats = 15, kLeastRepeats = 3;
constexpr int64_t kEnoughNs = 400'000'000;        // then no more repeats
constexpr uint64_t kBeyondCaches = 256ull << 20;  // bytes of copies that take turns on a device
constexpr uint64_t kMostCopies = 32;
constexpr uint64_t kLinkBytes = 64ull << 20;
// Of host memory: more than its caches hold, which are 300 MiB on a server.
constexpr uint64_t kCopiedBytes = 8 * kLinkBytes, kReadBytes = 2ull << 30;
constexpr uint64_t kHandOffBytes = 16 << 10;
constexpr int kNumHandOffs = 200;
constexpr double kSlowHandOffNs = 50e3;  // there and back, beside copies
constexpr int kTurns = 4;
constexpr int64_t kWarmUpNs = 50'000'000;
constexpr uint64_t kMostFilled = 4 << 20;  // of a cache on the device at a time

uint64_t round_up(uint64_t bytes, uint64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

template <class T>
T median(std::vector<T> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

void flush_from_caches(const std::byte* data, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += 64) __builtin_ia32_clflush(data + at);
}

uint64_t cache_bytes(const CacheEntry& cache) {
  const auto heads = static_cast<uint64_t>(cache.kv_heads) * cache.head_size;
  return round_up(sizeof(uint16_t) * heads * cache.capacity, 4096);
}

std::vector<int32_t> token_ids(int64_t rows, int32_t vocab_size) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < rows; ++i) {
    tokens.push_back(static_cast<int32_t>((i * 7919 + 1) % vocab_size));
  }
  return tokens;
}

// Runs it once to warm up, then until the figure is good.
template <class Run>
int64_t median_ns(Run&& run) {
  run();
  std::vector<int64_t> times;
  const int64_t begin = platform::now_ns();
  for (int repeat = 0; repeat < kMostRepeats; ++repeat) {
    times.push_back(run());
    if (repeat + 1 >= kLeastRepeats && platform::now_ns() - begin > kEnoughNs) break;
  }
  return median(times);
}

}  // namespace

// What nodes read and do not make, at places of its own: in the arena, outputs that come after the
// last use of an input may lie where it was, and the next repeat would read them.
struct Profiler::Inputs {
  std::vector<uint64_t> offsets;  // of the plan's values; kNowhere: made by the nodes, or unused
  platform::Mapping memory;

  bool has(const Operand& operand) const {
    return operand.kind == OperandKind::kValue && offsets[operand.index] != kNowhere;
  }
};

// Some nodes, made ready to run on the host again and again.
struct Profiler::HostWork {
  Inputs inputs;
  std::vector<int32_t> tokens;
  int32_t logit_row;
  platform::Mapping logits, cache_memory;
  std::vector<CacheView> caches;
  std::atomic<bool> cancelled{false};
  std::unique_ptr<Executor::Program> program;
  Round round;
};

// A unit's weights and caches on the device, several times, and what its nodes need besides.
struct Profiler::DeviceWork {
  std::vector<int> nodes;
  const DeviceShare& share;
  int64_t rows;
  int unit;
  uint64_t unit_bytes, cache_bytes, stride, num_copies;
  const Inputs& inputs;
  DeviceRange copies, shared, read, arena, round, logits, scratch;
};

Profiler::Profiler(const Plan& plan, Executor& executor, Pool& pool, const std::byte* weights,
                   Device* device)
    : plan_(plan), executor_(executor), pool_(pool), weights_(weights), device_(device) {
  pool_.be_patient(true);
}

Profiler::~Profiler() { pool_.be_patient(false); }

// The threads slept while caches were flushed; in a round they are awake.
int64_t Profiler::time_segment(const HostWork& work) {
  pool_.run([](int) {});
  const int64_t begin = platform::now_ns();
  executor_.run_segment(*work.program, 0, work.cancelled);
  return platform::now_ns() - begin;
}

Device& Profiler::device() const {
  if (device_ == nullptr) {
    fail(ATSC_INVALID_ARGUMENT, "profiling: the plan has no device, or was opened without it");
  }
  return *device_;
}

std::vector<int> Profiler::nodes_of(int unit) const {
  std::vector<int> nodes;
  for (int node = 0; node < plan_.num_nodes; ++node) {
    if (plan_.nodes[node].unit == unit) nodes.push_back(node);
  }
  return nodes;
}

// The node that makes a value.
int Profiler::maker_of(uint64_t value) const {
  for (int node = 0; node < plan_.num_nodes; ++node) {
    for (const Operand& out : plan_.nodes[node].out) {
      if (out.kind == OperandKind::kValue && out.index == value) return node;
    }
  }
  fail(ATSC_PLAN_ERROR, "value %llu has no node: compile the model again",
       static_cast<unsigned long long>(value));
}

// In a round of so many tokens and one row of logits.
int64_t Profiler::rows_of(uint64_t value, int64_t tokens) const {
  return plan_.nodes[maker_of(value)].rows == RowsOf::kTokens ? tokens : 1;
}

Profiler::Inputs Profiler::inputs_of(const std::vector<int>& nodes, int64_t tokens) {
  Inputs inputs;
  inputs.offsets.assign(static_cast<size_t>(plan_.num_values), kNowhere);
  std::vector<uint64_t> read;
  std::vector<bool> known(static_cast<size_t>(plan_.num_values));
  uint64_t bytes = 0;
  for (const int node : nodes) {
    for (const Operand& in : plan_.nodes[node].in) {
      if (in.kind != OperandKind::kValue || known[in.index]) continue;
      known[in.index] = true;
      read.push_back(in.index);
      inputs.offsets[in.index] = bytes;
      bytes += round_up(plan_.values[in.index].bytes, 256);
    }
    for (const Operand& out : plan_.nodes[node].out) {
      if (out.kind == OperandKind::kValue) known[out.index] = true;
    }
  }
  inputs.memory = platform::Mapping::anonymous(bytes + 64, true, "activations");
  for (const uint64_t value : read) {
    fill_input(value, tokens, inputs.memory.data() + inputs.offsets[value]);
  }
  return inputs;
}

void Profiler::fill_input(uint64_t value, int64_t tokens, std::byte* place) {
  const ValueEntry& entry = plan_.values[value];
  const int64_t rows = rows_of(value, tokens);
  if (entry.type == ValueType::kF32) {
    return fill_activations(reinterpret_cast<float*>(place), rows, entry.width);
  }
  const auto work = host_work({maker_of(value)}, tokens, 0, true);
  executor_.bind(*work->program, work->round);
  executor_.run_segment(*work->program, 0, work->cancelled);
  const int64_t bytes = 2 * q8_blocks(entry.width) * rows * kQ8BytesPerBlock;
  std::memcpy(place, executor_.arena() + entry.offset, static_cast<uint64_t>(bytes));
}

// Outputs that are shared lie in the arena, also those that threads would make for themselves.
std::unique_ptr<Profiler::HostWork> Profiler::host_work(const std::vector<int>& nodes,
                                                        int64_t rows, int64_t position,
                                                        bool shares_outputs) {
  auto work = std::make_unique<HostWork>();
  work->inputs = inputs_of(nodes, rows);
  work->tokens = token_ids(rows, plan_.vocab_size);
  work->logit_row = static_cast<int32_t>(rows - 1);
  work->logits = platform::Mapping::anonymous(
      sizeof(float) * static_cast<size_t>(plan_.vocab_size) + 64, false, "logits");
  uint64_t bytes = 0;
  for (const int node : nodes) {
    if (plan_.nodes[node].layer >= 0) bytes += 2 * cache_bytes(plan_.caches[plan_.nodes[node].layer]);
  }
  work->cache_memory = platform::Mapping::anonymous(bytes + 64, false, "KV caches");
  fill_cache(work->cache_memory.data(), bytes);
  work->caches.resize(static_cast<size_t>(plan_.num_caches));
  std::byte* at = work->cache_memory.data();
  for (const int node : nodes) {
    const int layer = plan_.nodes[node].layer;
    if (layer < 0) continue;
    const uint64_t half = cache_bytes(plan_.caches[layer]);
    work->caches[layer] = {at, at + half};
    at += 2 * half;
  }
  Splits splits;
  splits.segments.push_back({0, nodes});
  splits.crosses.assign(static_cast<size_t>(plan_.num_values), shares_outputs);
  work->program = executor_.compile(rows, 1, splits);
  for (Executor::Instruction& instruction : work->program->instructions) {
    for (int slot = 0; slot < kMaxInputs; ++slot) {
      const Operand& in = instruction.node->in[slot];
      if (!work->inputs.has(in)) continue;
      instruction.args.in[slot] = work->inputs.memory.data() + work->inputs.offsets[in.index];
    }
  }
  work->round = {work->tokens.data(), rows, position, &work->logit_row, 1,
                 reinterpret_cast<float*>(work->logits.data()), work->caches.data(),
                 &work->cancelled};
  return work;
}

int64_t Profiler::unit_ns(int unit, bool on_device, int64_t rows, int64_t position) {
  std::vector<int> nodes = nodes_of(unit);
  if (nodes.empty()) return 0;
  if (!on_device) return host_ns(unit, rows, position);
  Placement alone;
  alone.on_device.resize(static_cast<size_t>(plan_.num_units));
  alone.on_device[unit] = 1;
  const DeviceShare share(plan_, device(), alone);
  std::erase_if(nodes, [&](int node) { return !share.node_on_device[node]; });
  if (nodes.empty()) return host_ns(unit, rows, position);
  return device_ns(unit, nodes, share, rows, position);
}

int64_t Profiler::host_ns(int unit, int64_t rows, int64_t position) {
  const auto work = host_work(nodes_of(unit), rows, position);
  executor_.bind(*work->program, work->round);
  const UnitEntry& entry = plan_.units[unit];
  return median_ns([&] {
    flush_from_caches(weights_ + entry.offset, entry.bytes);
    flush_from_caches(work->cache_memory.data(), work->cache_memory.bytes());
    return time_segment(*work);
  });
}

// Launches the unit's nodes on one of the copies.
void Profiler::record_copy(CommandList& list, const DeviceWork& work, int copy) const {
  const DeviceAddress base = work.copies.address() + work.stride * static_cast<uint64_t>(copy);
  const auto address = [&](const Operand& operand) -> DeviceAddress {
    switch (operand.kind) {
      case OperandKind::kNone: return 0;
      case OperandKind::kTokenIds: return work.round.address() + work.share.token_ids_offset;
      case OperandKind::kLogits: return work.logits.address();
      case OperandKind::kValue:
        if (work.inputs.has(operand)) {
          return work.read.address() + work.inputs.offsets[operand.index];
        }
        return work.arena.address() + plan_.values[operand.index].offset;
      case OperandKind::kWeight: break;
    }
    const int unit = work.share.unit_at(operand.index);
    const uint64_t inside = operand.index - plan_.units[unit].offset;
    return inside + (unit == work.unit ? base
                                       : work.shared.address() + work.share.unit_offsets[unit]);
  };
  for (const int index : work.nodes) {
    const NodeEntry& node = plan_.nodes[index];
    const int64_t rows = node.rows == RowsOf::kTokens ? work.rows : 1;
    const KernelHandle kernel = work.share.kernel(index, rows <= kFewRows);
    DeviceArgs args{};
    for (int slot = 0; slot < kMaxInputs; ++slot) args.in[slot] = as_operand(address(node.in[slot]));
    for (int slot = 0; slot < kMaxOutputs; ++slot) {
      args.out[slot] = as_operand(address(node.out[slot]));
    }
    args.round = static_cast<const RoundParams*>(as_operand(work.round.address()));
    args.logit_rows =
        static_cast<const int*>(as_operand(work.round.address() + work.share.logit_rows_offset));
    if (node.layer >= 0) {
      args.k_cache = as_operand(base + work.unit_bytes);
      args.v_cache = as_operand(base + work.unit_bytes + work.cache_bytes);
      args.kv_capacity = plan_.caches[node.layer].capacity;
    }
    const uint64_t scratch = work.share.scratch_of(kernel, args.kv_capacity);
    args.scratch = scratch == kNowhere ? nullptr : as_operand(work.scratch.address() + scratch);
    args.rows_of = node.rows == RowsOf::kTokens ? kDeviceTokens : kDeviceLogitRows;
    list.launch(Branch::kCompute, kernel, args, {rows, args.kv_capacity, device().info().num_sms});
  }
}

// Everything that the work's nodes read.
void Profiler::upload(const DeviceWork& work, int64_t position) {
  Device& gpu = device();
  for (int other = 0; other < plan_.num_units; ++other) {
    if (other == work.unit || !work.share.unit_on_device[other]) continue;
    gpu.upload(work.shared.address() + work.share.unit_offsets[other],
               weights_ + plan_.units[other].offset, plan_.units[other].bytes);
  }
  const auto pattern = platform::Mapping::anonymous(kMostFilled, false, "KV caches");
  fill_cache(pattern.data(), std::min(kMostFilled, 2 * work.cache_bytes));
  for (uint64_t copy = 0; copy < work.num_copies; ++copy) {
    const DeviceAddress base = work.copies.address() + work.stride * copy;
    const UnitEntry& entry = plan_.units[work.unit];
    gpu.upload(base, weights_ + entry.offset, entry.bytes);
    for (uint64_t done = 0; done < 2 * work.cache_bytes; done += kMostFilled) {
      const uint64_t bytes = std::min(kMostFilled, 2 * work.cache_bytes - done);
      gpu.upload(base + work.unit_bytes + done, pattern.data(), bytes);
    }
  }
  const platform::Mapping& made_up = work.inputs.memory;
  gpu.upload(work.read.address(), made_up.data(), made_up.bytes());
  if (work.arena.bytes() > 0) gpu.fill(work.arena.address(), 0, work.arena.bytes());
  if (work.scratch.bytes() > 0) gpu.fill(work.scratch.address(), 0, work.scratch.bytes());
  gpu.fill(work.round.address(), 0, work.round.bytes());
  const RoundParams params{position, {static_cast<int>(work.rows), 1}};
  gpu.upload(work.round.address(), &params, sizeof params);
  const auto logit_row = static_cast<int32_t>(work.rows - 1);
  gpu.upload(work.round.address() + work.share.logit_rows_offset, &logit_row, sizeof logit_row);
  const std::vector<int32_t> tokens = token_ids(work.rows, plan_.vocab_size);
  gpu.upload(work.round.address() + work.share.token_ids_offset, tokens.data(),
             sizeof(int32_t) * tokens.size());
}

int64_t Profiler::device_ns(int unit, const std::vector<int>& nodes, const DeviceShare& share,
                            int64_t rows, int64_t position) {
  Device& gpu = device();
  const Inputs inputs = inputs_of(nodes, rows);
  DeviceWork work{.nodes = nodes, .share = share, .rows = rows, .unit = unit,
                  .unit_bytes = round_up(plan_.units[unit].bytes, 256), .cache_bytes = 0,
                  .stride = 0, .num_copies = 1, .inputs = inputs,
                  .copies = {}, .shared = gpu.allocate(share.weights_bytes, "shared tables"),
                  .read = gpu.allocate(inputs.memory.bytes(), "activations"),
                  .arena = gpu.allocate(plan_.arena_bytes, "activations"),
                  .round = gpu.allocate(share.round_bytes, "the numbers of a round"),
                  .logits = gpu.allocate(share.logits_bytes, "logits"),
                  .scratch = gpu.allocate(share.scratch_bytes, "kernel scratch")};
  for (const int node : nodes) {
    const int layer = plan_.nodes[node].layer;
    if (layer >= 0) work.cache_bytes = cache_bytes(plan_.caches[layer]);
  }
  work.stride = std::max<uint64_t>(256, work.unit_bytes + 2 * work.cache_bytes);
  const uint64_t left = gpu.memory().left / 2;
  const uint64_t wanted = std::min(kMostCopies, kBeyondCaches / work.stride + 1);
  work.num_copies = std::max<uint64_t>(1, std::min(wanted, left / work.stride));
  work.copies = gpu.allocate(work.stride * work.num_copies, "copies of a unit");
  upload(work, position);

  CommandList list;
  list.stamp(Branch::kCompute, 0);
  for (uint64_t copy = 0; copy < work.num_copies; ++copy) {
    record_copy(list, work, static_cast<int>(copy));
  }
  list.stamp(Branch::kCompute, 1);
  const auto executable = gpu.build(list, BuildMode::kGraph);
  const auto run = [&] {
    executable->run();
    executable->wait();
    return (executable->stamp(1) - executable->stamp(0)) / static_cast<int64_t>(work.num_copies);
  };
  // A GPU that was idle takes milliseconds until its clocks are up, and they fall again where long
  // work takes more power than it may.
  for (const int64_t begin = platform::now_ns(); platform::now_ns() - begin < kWarmUpNs;) run();
  return median_ns(run);
}

LinkProfile Profiler::link() {
  LinkProfile profile{};
  Placement nothing;
  nothing.on_device.resize(static_cast<size_t>(plan_.num_units));
  profile.fixed_device_bytes = device_bytes(plan_, device(), nothing, 1);
  const uint64_t bytes = std::min(kLinkBytes, device().memory().left / 4 / 4096 * 4096);
  if (bytes == 0) {
    fail(ATSC_DEVICE_ERROR, "profiling: %s has no memory left", device().info().name.c_str());
  }
  profile.to_device_bytes_per_s = copy_rate(true, bytes);
  profile.to_host_bytes_per_s = copy_rate(false, bytes);
  measure_hand_offs(profile, bytes);
  measure_beside_cpu(profile, bytes);
  return profile;
}

double Profiler::copy_rate(bool to_device, uint64_t bytes) {
  const DeviceRange there = device().allocate(bytes, "a link's measurement");
  const HostRange here = device().allocate_host(bytes, "a link's measurement");
  CommandList list;
  list.stamp(Branch::kCopy, 0);
  if (to_device) list.copy_to_device(Branch::kCopy, there.address(), here.host(), bytes);
  if (!to_device) list.copy_to_host(Branch::kCopy, here.host(), there.address(), bytes);
  list.stamp(Branch::kCopy, 1);
  const auto executable = device().build(list, BuildMode::kGraph);
  const int64_t ns = median_ns([&] {
    executable->run();
    executable->wait();
    return executable->stamp(1) - executable->stamp(0);
  });
  return static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, ns)) * 1e9;
}

// There and back, many times in one round, while weights are copied, as in a decode round: what crosses
// waits behind them. Between the two stamps lie both payloads, of which each direction gets half; so the
// directions add up to what the host measures, whatever the clocks say.
void Profiler::measure_hand_offs(LinkProfile& profile, uint64_t bytes) {
  const DeviceRange there = device().allocate(kHandOffBytes, "a hand-off's measurement");
  const HostRange here = device().allocate_host(2 * kHandOffBytes, "a hand-off's measurement");
  const DeviceRange copied = device().allocate(bytes, "a link's measurement");
  const HostRange weights = device().allocate_host(bytes, "a link's measurement");
  CommandList list;
  for (int i = 0; i < kNumHandOffs; ++i) {
    const auto value = static_cast<uint32_t>(i + 1);
    list.receive(Branch::kCompute, there.address(), here.address(), kHandOffBytes, 0, value, 2 * i);
    list.send(Branch::kCompute, here.address() + kHandOffBytes, there.address(), kHandOffBytes, 1,
              value, 2 * i + 1);
  }
  const double copy_ns = static_cast<double>(bytes) / profile.to_device_bytes_per_s * 1e9;
  const auto num_copies = static_cast<int>(kNumHandOffs * kSlowHandOffNs / copy_ns) + 1;
  for (int i = 0; i < num_copies; ++i) {
    list.copy_to_device(Branch::kCopy, copied.address(), weights.host(), bytes);
  }
  const auto executable = device().build(list, BuildMode::kGraph);
  const int64_t offset = device().clock_offset_ns();
  std::vector<double> to_device, to_host;
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::vector<int64_t> raised, awaited;
    executable->run();
    for (int i = 0; i < kNumHandOffs; ++i) {
      const auto value = static_cast<uint32_t>(i + 1);
      raised.push_back(platform::now_ns());
      executable->raise(0, value);
      executable->await(1, value);
      awaited.push_back(platform::now_ns());
    }
    executable->wait();
    for (int i = 0; repeat == 1 && i < kNumHandOffs; ++i) {
      const int64_t begin = executable->stamp(2 * i) + offset;
      const int64_t end = executable->stamp(2 * i + 1) + offset;
      const double payload = static_cast<double>(end - begin) / 2;
      to_device.push_back(static_cast<double>(begin - raised[i]) + payload);
      to_host.push_back(static_cast<double>(awaited[i] - end) + payload);
    }
  }
  profile.hand_off_to_device_ns = std::max(0.0, median(to_device));
  profile.hand_off_to_host_ns = std::max(0.0, median(to_host));
}

// The CPU reads the model's weights, as in decode, while copies run. Both must read memory: what lies in
// the CPU's caches slows neither down.
void Profiler::measure_beside_cpu(LinkProfile& profile, uint64_t bytes) {
  std::vector<int> nodes;
  uint64_t read_bytes = 0;
  for (int node = 0; node < plan_.num_nodes; ++node) {
    const NodeEntry& entry = plan_.nodes[node];
    const UnitEntry& unit = plan_.units[entry.unit];
    if (unit.kind != UnitKind::kWeights || entry.layer >= 0 || read_bytes >= kReadBytes) continue;
    if (nodes.empty() || plan_.nodes[nodes.back()].unit != entry.unit) read_bytes += unit.bytes;
    nodes.push_back(node);
  }
  const auto work = host_work(nodes, 1, 0);
  executor_.bind(*work->program, work->round);
  const auto compute = [&] { return time_segment(*work); };
  compute();
  const int64_t first_ns = compute();

  const DeviceRange there = device().allocate(bytes, "a link's measurement");
  const double copy_ns = static_cast<double>(bytes) / profile.to_device_bytes_per_s * 1e9;
  const double copies = 3.0 * static_cast<double>(first_ns) / std::max(1.0, copy_ns);
  const auto num_copies = static_cast<uint64_t>(std::clamp(copies, 4.0, 1000.0));
  const uint64_t num_pieces = std::min(num_copies, kCopiedBytes / bytes);
  const HostRange here = device().allocate_host(num_pieces * bytes, "a link's measurement");
  CommandList list;
  list.stamp(Branch::kCopy, 0);
  for (uint64_t i = 0; i < num_copies; ++i) {
    const std::byte* const piece = here.host() + i % num_pieces * bytes;
    list.copy_to_device(Branch::kCopy, there.address(), piece, bytes);
  }
  list.stamp(Branch::kCopy, 1);
  const auto executable = device().build(list, BuildMode::kLaunches);
  // In turns: what else uses the memory, such as other virtual machines, comes and goes.
  std::vector<int64_t> alone, beside, copying;
  for (int turn = 0; turn < kTurns; ++turn) {
    executable->run();
    const size_t begin = beside.size();
    do {
      beside.push_back(compute());
    } while (!executable->done());
    executable->wait();
    if (beside.size() > begin + 1) beside.pop_back();  // the last one ran beside nothing for a while
    // As often: the first one after a pause waits for the pool's threads, the later ones do not.
    for (size_t i = begin; i < beside.size(); ++i) alone.push_back(compute());
    copying.push_back(std::max<int64_t>(1, executable->stamp(1) - executable->stamp(0)));
  }
  profile.to_device_beside_cpu_bytes_per_s =
      static_cast<double>(bytes * num_copies) / static_cast<double>(median(copying)) * 1e9;
  profile.cpu_slowdown = static_cast<double>(median(beside)) /
                         static_cast<double>(std::max<int64_t>(1, median(alone)));
}

}  // namespace atsc
