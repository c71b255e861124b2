// What rounds cost on a device: device_measure virtual|cuda [MODULES SM]. Medians; each line names
// what it compares with.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "fixture.h"

namespace atsc::testing {
namespace {

using platform::now_ns;

constexpr int kCrossings = 40, kBetween = 6;
constexpr uint64_t kPayload = kValueBytes;  // 20 KiB, the residual stream of a 14B model

struct Times {
  double median_us, largest_us;
};

template <class Body>
Times time_of(int repeats, Body&& body) {
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    const int64_t begin = now_ns();
    body();
    if (i >= 3) times.push_back(static_cast<double>(now_ns() - begin) / 1e3);
  }
  std::ranges::sort(times);
  return {times[times.size() / 2], times.back()};
}

struct Shape {
  int between = 0;              // kernels between two hand-offs
  uint64_t weight_bytes = 0;    // copied every second hand-off, through four slots
  bool with_stamps = false;
  bool with_payload = true;
  bool spins = false;
};

class Measurement {
 public:
  explicit Measurement(const Options& options) : fixture_(options) {
    weights_ = fixture_.device->allocate_host(kWeightBytes * 4, "weights");
    slots_ = fixture_.device->allocate(kWeightBytes * 4, "slots");
  }

  void run() {
    print_device();
    compare_graph_and_launches();
    measure_hand_offs();
    measure_copies();
    measure_transfers();
    measure_host_memory();
    measure_building();
  }

 private:
  static constexpr uint64_t kWeightBytes = 40 << 20;

  void print_device() const {
    const DeviceInfo& info = fixture_.device->info();
    const DeviceMemory memory = fixture_.device->memory();
    std::printf("%s, sm_%d, %d SMs, driver %d, waits in graphs %d; context %.1f MiB, modules "
                "%.1f\n",
                info.name.c_str(), info.sm, info.num_sms, info.driver_version,
                info.has_stream_waits, static_cast<double>(memory.context) / (1 << 20),
                static_cast<double>(memory.modules) / (1 << 20));
  }

  CommandList hand_offs(const Shape& shape) const {
    CommandList list;
    fixture_.begin(list);
    const DeviceAddress value = fixture_.value.address(), host = fixture_.host_value.address();
    const uint64_t bytes = shape.with_payload ? kPayload : 0;
    CommandList::Point freed[4] = {};
    int num_copies = 0;
    for (uint32_t i = 1; i <= kCrossings; ++i) {
      for (int k = 0; k < shape.between; ++k) fixture_.launch_constant(list, Branch::kCompute, k);
      if (shape.weight_bytes > 0 && i % 2 == 0) {
        const int slot = num_copies++ % 4;
        const uint64_t offset = kWeightBytes * static_cast<uint64_t>(slot);
        if (num_copies > 4) list.wait_for(Branch::kCopy, freed[slot]);
        list.copy_to_device(Branch::kCopy, slots_.address() + offset, weights_.host() + offset,
                            shape.weight_bytes);
        list.wait_for(Branch::kCompute, list.record(Branch::kCopy));
        fixture_.launch(list, Branch::kCompute, slots_.address() + offset);
        freed[slot] = list.record(Branch::kCompute);
      }
      const int sent = shape.with_stamps ? static_cast<int>(2 * i) : kNoStamp;
      const int received = shape.with_stamps ? sent + 1 : kNoStamp;
      list.send(Branch::kCompute, host, value, bytes, 0, i, sent);
      list.receive(Branch::kCompute, value, host, bytes, 1, i, received, shape.spins);
    }
    return list;
  }

  static void serve(Executable& executable) {
    executable.run();
    for (uint32_t i = 1; i <= kCrossings; ++i) {
      EXPECT(executable.await(0, i));
      executable.raise(1, i);
    }
    executable.wait();
  }

  Times time_hand_offs(const Shape& shape, BuildMode mode, int repeats) const {
    const auto executable = fixture_.device->build(hand_offs(shape), mode);
    return time_of(repeats, [&] { serve(*executable); });
  }

  void compare_graph_and_launches() const {
    CommandList list;
    fixture_.begin(list);
    for (int i = 0; i < 300; ++i) fixture_.launch_constant(list, Branch::kCompute, i % 64);
    for (const BuildMode mode : {BuildMode::kGraph, BuildMode::kLaunches}) {
      const auto executable = fixture_.device->build(list, mode);
      const Times times = time_of(50, [&] {
        executable->run();
        executable->wait();
      });
      std::printf("300 small kernels as %s: %.1f us; executable holds %.1f KiB\n",
                  executable->is_graph() ? "a graph" : "launches", times.median_us,
                  static_cast<double>(executable->device_bytes()) / 1024);
    }
  }

  void measure_hand_offs() const {
    const auto print = [&](const char* what, const Shape& shape, BuildMode mode) {
      const Times times = time_hand_offs(shape, mode, 40);
      std::printf("hand-off there and back, %s: %.2f us\n", what, times.median_us / kCrossings);
    };
    print("flags only, graph", {.with_payload = false}, BuildMode::kGraph);
    print("20 KiB, graph", {}, BuildMode::kGraph);
    print("20 KiB, graph, stamps on both sides", {.with_stamps = true}, BuildMode::kGraph);
    print("20 KiB, graph, spinning", {.spins = true}, BuildMode::kGraph);
    print("20 KiB, launches", {}, BuildMode::kLaunches);
  }

  void measure_copies() const {
    CommandList list;
    for (int i = 0; i < 8; ++i) {
      const uint64_t offset = kWeightBytes * static_cast<uint64_t>(i % 4);
      list.copy_to_device(Branch::kCopy, slots_.address() + offset, weights_.host() + offset,
                          kWeightBytes);
    }
    const auto rate = [](int copies, double us) {
      return static_cast<double>(copies) * static_cast<double>(kWeightBytes) / us / 1e3;
    };
    const auto alone = fixture_.device->build(list, BuildMode::kGraph);
    const Times copies = time_of(10, [&] {
      alone->run();
      alone->wait();
    });
    std::printf("copies of 40 MiB alone: %.1f GB/s\n", rate(8, copies.median_us));
    const Shape shape{.between = kBetween, .weight_bytes = kWeightBytes};
    const Times both = time_hand_offs(shape, BuildMode::kGraph, 10);
    std::printf("copies of 40 MiB beside 40 hand-offs, 240 kernels: %.1f GB/s, %.0f us a round\n",
                rate(kCrossings / 2, both.median_us), both.median_us);
    const Times none = time_hand_offs({.between = kBetween}, BuildMode::kGraph, 20);
    std::printf("the same round without copies: %.0f us\n", none.median_us);
  }

  // The residual stream of a prefill chunk, by a kernel: 512 rows of 5120.
  void measure_transfers() const {
    constexpr uint64_t kBytes = 10 << 20;
    const auto print = [&](const char* what, DeviceAddress target, DeviceAddress source) {
      CommandList list;
      list.send(Branch::kCompute, target, source, kBytes, 0, 1);
      const auto executable = fixture_.device->build(list, BuildMode::kGraph);
      const Times times = time_of(20, [&] {
        executable->run();
        EXPECT(executable->await(0, 1));
        executable->wait();
      });
      std::printf("a transfer of 10 MiB %s: %.0f us, %.1f GB/s\n", what, times.median_us,
                  static_cast<double>(kBytes) / times.median_us / 1e3);
    };
    print("to the device", slots_.address(), weights_.address());
    print("to the host", weights_.address(), slots_.address());
  }

  void measure_host_memory() const {
    constexpr uint64_t kBytes = kWeightBytes * 4;
    const auto memory = platform::Mapping::anonymous(kBytes, true, "weights");
    std::fill_n(memory.data(), kBytes, std::byte{1});
    const Times upload =
        time_of(5, [&] { fixture_.device->upload(slots_.address(), memory.data(), kBytes); });
    std::printf("upload of memory that is not pinned: %.1f GB/s\n",
                static_cast<double>(kBytes) / upload.median_us / 1e3);
    const Times pin = time_of(5, [&] { EXPECT(fixture_.device->pin(memory.data(), kBytes)); });
    std::printf("pinning and unpinning: %.1f ms a GiB\n",
                pin.median_us / 1e3 * (1 << 30) / static_cast<double>(kBytes));
  }

  // Rounds while another thread builds the next, again and again.
  void measure_building() const {
    const Shape shape{.between = kBetween, .weight_bytes = kWeightBytes};
    const CommandList list = hand_offs(shape);
    const auto executable = fixture_.device->build(list, BuildMode::kGraph);
    const Times alone = time_of(30, [&] { serve(*executable); });
    std::atomic<bool> stop{false};
    std::vector<double> builds;
    std::thread builder([&] {
      while (!stop.load()) {
        const int64_t begin = now_ns();
        const auto next = fixture_.device->build(list, BuildMode::kGraph);
        builds.push_back(static_cast<double>(now_ns() - begin) / 1e3);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
    const Times beside = time_of(30, [&] { serve(*executable); });
    stop.store(true);
    builder.join();
    std::ranges::sort(builds);
    std::printf("%zu commands: built in %.0f us (median of %zu); rounds alone %.0f us (largest "
                "%.0f), beside building %.0f us (largest %.0f)\n",
                list.commands().size(), builds[builds.size() / 2], builds.size(), alone.median_us,
                alone.largest_us, beside.median_us, beside.largest_us);
  }

  Fixture fixture_;
  HostRange weights_;
  DeviceRange slots_;
};

}  // namespace
}  // namespace atsc::testing

int main(int argc, char** argv) {
  using namespace atsc::testing;
  try {
    Options options;
    options.budget_bytes = 256 << 20;
    options.cuda = argc > 1 && std::string(argv[1]) == "cuda";
    if (argc > 3) read_modules(options, argv[2], argv[3]);
    Measurement(options).run();
  } catch (const atsc::Failure& failure) {
    std::fprintf(stderr, "failed: %s\n", failure.what());
    return 1;
  }
  return 0;
}
