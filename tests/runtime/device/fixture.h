// A device under test, with one kernel, one buffer that rounds work on, and what they should do to
// it. The same program runs on the virtual device and on a GPU.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "device_cuda.h"
#include "device_virtual.h"
#include "failure.h"

namespace atsc::testing {

inline constexpr int kWidth = 256, kMaxRows = 20;
inline constexpr uint64_t kRowBytes = kWidth * sizeof(uint32_t);
inline constexpr uint64_t kValueBytes = kRowBytes * kMaxRows;

using Words = std::vector<uint32_t>;

#define EXPECT(condition)                                                         \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)

inline void affine(const KernelArgs& args, int64_t begin, int64_t end) {
  const auto* x = static_cast<const uint32_t*>(args.in[0]);
  const auto* w = static_cast<const uint32_t*>(args.in[1]);
  auto* y = static_cast<uint32_t*>(args.out[0]);
  for (int64_t at = begin * kWidth; at < end * kWidth; ++at) y[at] = 3 * x[at] + w[at % kWidth];
}

inline const CpuKernel kAffineOnCpu = {"test_affine", affine,
                                       [](const KernelArgs& args) { return args.rows; }, nullptr};

inline const DeviceKernel kAffineOnGpu = {
    "test_affine", 1, kWidth, 0,
    [](const LaunchShape& shape, uint32_t grid[3]) {
      grid[0] = static_cast<uint32_t>(shape.rows);
      grid[1] = grid[2] = 1;
    },
    [](const LaunchShape&) { return uint64_t{0}; }};

struct Options {
  bool cuda = false;
  std::string modules;  // folder of handoff.bin and kernels.bin
  int sm = 0;           // that they are for
  bool is_ptx = false;
  VirtualOptions of_virtual = {};
  uint64_t budget_bytes = 64 << 20;
};

// From the arguments `MODULES SM`; SM ends in "ptx" where the modules are PTX.
inline void read_modules(Options& options, const char* folder, const std::string& sm) {
  options.modules = folder;
  options.sm = std::atoi(sm.c_str());
  options.is_ptx = sm.find("ptx") != std::string::npos;
}

class Fixture {
 public:
  explicit Fixture(const Options& options) {
    if (options.cuda) {
      device = open_cuda_device({0, 0});
      const ModuleEntry modules[] = {{"handoff.bin", 0, options.sm, options.is_ptx},
                                     {"kernels.bin", 1, options.sm, options.is_ptx}};
      device->load_modules(modules, [&](const char* file) {
        std::ifstream stream(options.modules + "/" + file, std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(stream), {});
      });
    } else {
      VirtualOptions of_virtual = options.of_virtual;
      of_virtual.budget_bytes = options.budget_bytes;
      auto opened = open_virtual_device(of_virtual);
      controls = opened.get();
      device = std::move(opened);
    }
    node.name = node.op = "affine";
    node.few_rows[0] = &kAffineOnCpu;
    node.device_few_rows = &kAffineOnGpu;
    kernel = device->kernel_of(node, true);
    value = device->allocate(kValueBytes, "a value");
    params = device->allocate(256, "the round's numbers");
    constants = device->allocate(kRowBytes * kNumConstants, "constants");
    host_params = device->allocate_host(4096, "the round's numbers");
    host_value = device->allocate_host(kValueBytes, "a value");
    Words words(kWidth * kNumConstants);
    for (int c = 0; c < kNumConstants; ++c) {
      for (int i = 0; i < kWidth; ++i) words[static_cast<size_t>(c * kWidth + i)] = constant(c, i);
    }
    device->upload(constants.address(), words.data(), kRowBytes * kNumConstants);
    set_rows(kMaxRows);
  }

  static constexpr int kNumConstants = 64;
  static uint32_t constant(int c, int i) { return static_cast<uint32_t>(c * 7919 + i * 31 + 1); }

  void set_rows(int rows) {
    auto* numbers = reinterpret_cast<RoundParams*>(host_params.host());
    numbers->position = 0;
    numbers->rows[0] = numbers->rows[1] = rows;
  }

  // Every round begins with it.
  void begin(CommandList& list) const {
    list.transfer(Branch::kCompute, params.address(), host_params.address(), sizeof(RoundParams));
  }

  // value = 3 * value + what lies at `addend`
  void launch(CommandList& list, Branch branch, DeviceAddress addend) const {
    DeviceArgs args{};
    args.in[0] = as_operand(value.address());
    args.in[1] = as_operand(addend);
    args.out[0] = as_operand(value.address());
    args.round = static_cast<const RoundParams*>(as_operand(params.address()));
    list.launch(branch, kernel, args, {kMaxRows, 0, 1});
  }
  void launch_constant(CommandList& list, Branch branch, int c) const {
    launch(list, branch, constants.address() + kRowBytes * static_cast<uint64_t>(c));
  }

  static void apply_constant(Words& words, int c, int rows = kMaxRows) {
    for (int at = 0; at < rows * kWidth; ++at) {
      uint32_t& word = words[static_cast<size_t>(at)];
      word = 3 * word + constant(c, at % kWidth);
    }
  }

  void put(const Words& words) const { device->upload(value.address(), words.data(), kValueBytes); }
  Words get() const {
    Words words(kWidth * kMaxRows);
    device->download(words.data(), value.address(), kValueBytes);
    return words;
  }

  uint32_t* shared() const { return reinterpret_cast<uint32_t*>(host_value.host()); }

  std::unique_ptr<Device> device;
  VirtualControls* controls = nullptr;
  NodeEntry node = {};
  KernelHandle kernel;
  DeviceRange value, params, constants;
  HostRange host_params, host_value;
};

inline Words start_value() {
  Words words(kWidth * kMaxRows);
  for (size_t at = 0; at < words.size(); ++at) words[at] = static_cast<uint32_t>(at);
  return words;
}

// A generator whose numbers are the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  int below(int limit) {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(limit));
  }

 private:
  uint64_t state_;
};

}  // namespace atsc::testing
