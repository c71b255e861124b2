// Tests of a device: device_test virtual|cuda TEST ROUNDS [MODULES SM]. Prints "fine", or says what
// is wrong; the tests named misuse_* are expected to abort.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "cuda_driver.h"
#include "fixture.h"

namespace atsc::testing {
namespace {

using platform::now_ns;

constexpr Branch kBranches[] = {Branch::kCompute, Branch::kCopy, Branch::kCopy2, Branch::kStamps};
constexpr BuildMode kModes[] = {BuildMode::kGraph, BuildMode::kLaunches, BuildMode::kSynchronous};
constexpr int kToHost = 0, kToDevice = 1;  // flags

template <class Body>
std::string failure_of(Body&& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// Commands on random branches, each ordered after the one before by a point. The commands do not
// commute, so the result tells their order.
CommandList random_chain(const Fixture& fixture, Random& random, int length, Words& expected) {
  CommandList list;
  fixture.begin(list);
  Branch last = Branch::kCompute;
  for (int i = 0; i < length; ++i) {
    const Branch branch = kBranches[random.below(kNumBranches)];
    if (branch != last) list.wait_for(branch, list.record(last));
    const int c = random.below(Fixture::kNumConstants);
    fixture.launch_constant(list, branch, c);
    Fixture::apply_constant(expected, c);
    last = branch;
  }
  return list;
}

void test_order(const Options& options, int rounds) {
  const Fixture fixture(options);
  Random random(1);
  for (int round = 0; round < rounds; ++round) {
    Words expected = start_value();
    fixture.put(expected);
    const CommandList list = random_chain(fixture, random, 1 + random.below(24), expected);
    const BuildMode mode = kModes[round % 3];
    const auto executable = fixture.device->build(list, mode);
    EXPECT(executable->is_graph() == (mode == BuildMode::kGraph));
    executable->run();
    executable->wait();
    EXPECT(fixture.get() == expected);
  }
}

// Hand-offs there and back: the host changes what it gets.
struct HandOffs {
  static constexpr int kCount = 3;
  std::unique_ptr<Executable> executable;

  HandOffs(const Fixture& fixture, BuildMode mode) {
    CommandList list;
    fixture.begin(list);
    const DeviceAddress value = fixture.value.address(), host = fixture.host_value.address();
    for (uint32_t i = 1; i <= kCount; ++i) {
      fixture.launch_constant(list, Branch::kCompute, static_cast<int>(i));
      list.send(Branch::kCompute, host, value, kValueBytes, kToHost, i, static_cast<int>(2 * i));
      const bool spins = i > 1, is_alone = i == 3;
      if (is_alone) list.wait_flag(Branch::kCompute, kToDevice, i, spins);
      list.receive(Branch::kCompute, value, host, kValueBytes, kToDevice, i,
                   static_cast<int>(2 * i + 1), spins);
    }
    fixture.launch_constant(list, Branch::kCompute, 0);
    executable = fixture.device->build(list, mode);
  }

  // False: released. `words` becomes what the device should hold at the end.
  bool run(Fixture& fixture, Words& words, int rows) {
    fixture.set_rows(rows);
    executable->run();
    return serve(fixture, words, rows);
  }

  bool serve(const Fixture& fixture, Words& words, int rows) {
    for (uint32_t i = 1; i <= kCount; ++i) {
      if (!executable->await(kToHost, i)) return false;
      Fixture::apply_constant(words, static_cast<int>(i), rows);
      const bool is_same = std::memcmp(fixture.shared(), words.data(), kValueBytes) == 0;
      if (!executable->await(kToHost, i)) return false;  // released: the device writes on
      EXPECT(is_same);
      for (uint32_t& word : words) word ^= 0x5A5A0000u + i;
      std::memcpy(fixture.shared(), words.data(), kValueBytes);
      executable->raise(kToDevice, i);
    }
    executable->wait();
    Fixture::apply_constant(words, 0, rows);
    return true;
  }
};

void run_hand_offs(const Options& options, int rounds, BuildMode mode) {
  Fixture fixture(options);
  HandOffs hand_offs(fixture, mode);
  Random random(2);
  Words words = start_value();
  fixture.put(words);
  for (int round = 0; round < rounds; ++round) {
    EXPECT(hand_offs.run(fixture, words, 1 + random.below(kMaxRows)));
    if (round % 16 == 0) EXPECT(fixture.get() == words);
  }
  EXPECT(fixture.get() == words);
}

void test_hand_offs(const Options& options, int rounds) {
  run_hand_offs(options, rounds, BuildMode::kGraph);
}

void test_launches(const Options& options, int rounds) {
  run_hand_offs(options, rounds, BuildMode::kLaunches);
}

void test_synchronous(const Options& options, int rounds) {
  run_hand_offs(options, rounds, BuildMode::kSynchronous);
}

// Where a stream or a graph cannot do it, the same list gives the same.
void test_no_graphs(const Options& options, int rounds) {
  Options poor = options;
  poor.of_virtual.has_graphs = false;
  const Fixture fixture(poor);
  EXPECT(!fixture.device->info().has_stream_waits);
  run_hand_offs(poor, rounds, BuildMode::kGraph);
}

// Weights copied through two slots beside the computation, new ones each round.
void test_slots(const Options& options, int rounds) {
  constexpr int kWeights = 9, kSlots = 2;
  const Fixture fixture(options);
  const HostRange weights = fixture.device->allocate_host(kRowBytes * kWeights, "weights");
  const DeviceRange slots = fixture.device->allocate(kRowBytes * kSlots, "slots");
  CommandList list;
  fixture.begin(list);
  CommandList::Point freed[kSlots] = {};
  for (int w = 0; w < kWeights; ++w) {
    const int slot = w % kSlots;
    const DeviceAddress address = slots.address() + kRowBytes * static_cast<uint64_t>(slot);
    if (w >= kSlots) list.wait_for(Branch::kCopy, freed[slot]);
    list.copy_to_device(Branch::kCopy, address, weights.host() + kRowBytes * w, kRowBytes);
    list.stamp(Branch::kCopy, w);
    list.wait_for(Branch::kCompute, list.record(Branch::kCopy));
    fixture.launch(list, Branch::kCompute, address);
    freed[slot] = list.record(Branch::kCompute);
  }
  const auto executable = fixture.device->build(list, BuildMode::kGraph);
  Random random(3);
  auto* words = reinterpret_cast<uint32_t*>(weights.host());
  for (int round = 0; round < rounds; ++round) {
    Words expected = start_value();
    fixture.put(expected);
    for (int i = 0; i < kWeights * kWidth; ++i) {
      words[i] = static_cast<uint32_t>(random.below(1 << 30));
    }
    for (int w = 0; w < kWeights; ++w) {
      for (size_t at = 0; at < expected.size(); ++at) {
        expected[at] = 3 * expected[at] + words[static_cast<size_t>(w) * kWidth + at % kWidth];
      }
    }
    executable->run();
    executable->wait();
    EXPECT(fixture.get() == expected);
    for (int w = 1; w < kWeights; ++w) EXPECT(executable->stamp(w - 1) <= executable->stamp(w));
    EXPECT(executable->stamp(0) != 0);
  }
}

// Releases at any moment, by another thread; the next round must not notice.
void test_cancel(const Options& options, int rounds) {
  Fixture fixture(options);
  Random random(4);
  int num_released = 0;
  if (fixture.controls != nullptr) fixture.controls->set_kernel_ns("test_", 30'000);
  for (const BuildMode mode : {BuildMode::kGraph, BuildMode::kLaunches}) {
    HandOffs hand_offs(fixture, mode);
    for (int round = 0; round < rounds; ++round) {
      const int delay_us = random.below(150);
      std::atomic<bool> go{false};
      std::thread canceller([&] {
        while (!go.load()) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        hand_offs.executable->release();
      });
      Words words = start_value();
      fixture.put(words);
      go.store(round % 4 != 0);
      const bool finished = hand_offs.run(fixture, words, kMaxRows);
      go.store(true);
      if (!finished) {
        ++num_released;
        hand_offs.executable->wait();
      }
      canceller.join();
      words = start_value();
      fixture.put(words);
      hand_offs.executable->release();  // no round: it must have no effect
      EXPECT(hand_offs.run(fixture, words, kMaxRows));
      EXPECT(fixture.get() == words);
    }
    hand_offs.executable->run();  // and destroyed while it waits for the host
  }
  std::fprintf(stderr, "%d of %d rounds were released\n", num_released, 2 * rounds);
  EXPECT(num_released > 0);
}

// Executables built on another thread while rounds run, and swapped in between.
void test_swap(const Options& options, int rounds) {
  const Fixture fixture(options);
  struct Built {
    std::unique_ptr<Executable> executable;
    int num_launches;
  };
  const auto build = [&](int num_launches) {
    CommandList list;
    fixture.begin(list);
    for (int i = 0; i < num_launches; ++i) fixture.launch_constant(list, Branch::kCompute, i);
    return Built{fixture.device->build(list, BuildMode::kGraph), num_launches};
  };
  std::mutex mutex;
  Built next = build(1);
  std::atomic<bool> stop{false};
  std::thread builder([&] {
    Random random(5);
    while (!stop.load()) {
      Built made = build(1 + random.below(Fixture::kNumConstants));
      const std::lock_guard lock(mutex);
      std::swap(next, made);
    }
  });
  Built current;
  int num_swaps = 0;
  for (int round = 0; round < rounds; ++round) {
    {
      const std::lock_guard lock(mutex);
      if (next.executable) {
        current = std::move(next);
        next = {};
        ++num_swaps;
      }
    }
    Words expected = start_value();
    fixture.put(expected);
    for (int i = 0; i < current.num_launches; ++i) Fixture::apply_constant(expected, i);
    current.executable->run();
    current.executable->wait();
    EXPECT(fixture.get() == expected);
  }
  stop.store(true);
  builder.join();
  EXPECT(num_swaps > 1);
}

void test_budget(const Options& options, int) {
  const Fixture fixture(options);
  Device& device = *fixture.device;
  const DeviceMemory before = device.memory();
  EXPECT(before.left + before.context + before.modules + before.ranges + before.executables ==
         before.budget);
  {
    const DeviceRange range = device.allocate(1 << 20, "a test");
    EXPECT(device.memory().ranges == before.ranges + (1 << 20));
    EXPECT(range.address() % 256 == 0);
    DeviceRange moved;
    moved = device.allocate(1 << 10, "a test");
  }
  EXPECT(device.memory().ranges == before.ranges);
  const std::string text =
      failure_of([&] { device.allocate(before.left + 1, "the resident weights"); });
  EXPECT(contains(text, "the resident weights") && contains(text, "budget"));
  EXPECT(device.memory().ranges == before.ranges);
  if (!options.cuda) {
    Words words(64);
    const DeviceRange range = device.allocate(256, "a test");
    device.download(words.data(), range.address(), 256);
    EXPECT(std::ranges::all_of(words, [](uint32_t word) { return word == 0xFFFFFFFF; }));
    // Freed memory is whole again.
    for (int i = 0; i < 3; ++i) device.allocate(device.memory().left - 4096, "all of it");
    VirtualOptions small = {.budget_bytes = 2 << 20, .context_bytes = 1 << 20};
    EXPECT(open_virtual_device(small)->memory().left == 1 << 20);
    small.context_bytes = 3 << 20;
    EXPECT(contains(failure_of([&] { open_virtual_device(small); }), "the driver's own data"));
  }
}

// A system that pins little: copies still work, across the borders of what is pinned.
void test_pinning(const Options& options, int) {
  constexpr uint64_t kPage = 4096, kPages = 5;
  Options poor = options;
  // The flags' block, both ranges of the fixture, and three pages.
  poor.of_virtual.pinnable_bytes = (32 << 10) + 2 * kPage + kValueBytes + 2 * kPage;
  const Fixture fixture(poor);
  Device& device = *fixture.device;
  const auto memory = platform::Mapping::anonymous(kPage * kPages, false, "a test");
  for (uint64_t at = 0; at < kPage * kPages; ++at) {
    memory.data()[at] = static_cast<std::byte>(at * 7 + at / 251);
  }
  const DeviceRange target = device.allocate(kPage * kPages, "a test");
  const auto expect_copies = [&](bool graph) {
    CommandList list;
    device.fill(target.address(), 0, target.bytes());
    list.copy_to_device(Branch::kCopy, target.address() + 100, memory.data() + 100,
                        kPage * kPages - 200);
    auto executable = device.build(list, BuildMode::kGraph);
    EXPECT(executable->is_graph() == graph);
    executable->run();
    executable->wait();
    std::vector<std::byte> got(kPage * kPages);
    device.download(got.data(), target.address(), got.size());
    EXPECT(std::memcmp(got.data() + 100, memory.data() + 100, kPage * kPages - 200) == 0);
    EXPECT(got[99] == std::byte{0} && got[got.size() - 100] == std::byte{0});
    std::vector<std::byte> back(got.size());
    CommandList to_host;
    to_host.copy_to_host(Branch::kCompute, back.data(), target.address(), back.size());
    executable.reset();  // there is memory for the flags of one
    executable = device.build(to_host, BuildMode::kLaunches);
    executable->run();
    executable->wait();
    EXPECT(back == got);
  };
  expect_copies(false);
  const auto first = device.pin(memory.data(), kPage * 2);
  EXPECT(first.has_value());
  expect_copies(false);
  const auto second = device.pin(memory.data() + kPage * 2, kPage * 3);
  EXPECT(second.has_value() == options.cuda);
  expect_copies(options.cuda);
  const std::string too_large =
      failure_of([&] { device.pin(memory.data(), kMaxPinnedBytes + kPage); });
  EXPECT(contains(too_large, "pinning"));
  if (!options.cuda) {
    const std::string refused = failure_of([&] { device.allocate_host(kPage * 3, "hand-offs"); });
    EXPECT(contains(refused, "hand-offs"));
  }
}

// A list whose flag never comes, and one that the device cannot run.
void test_mistakes(const Options& options, int) {
  const Fixture fixture(options);
  CommandList list;
  fixture.begin(list);
  list.signal(Branch::kCompute, kToHost, 1);
  const auto executable = fixture.device->build(list, BuildMode::kGraph);
  executable->run();
  EXPECT(contains(failure_of([&] { executable->run(); }), "before it was over"));
  EXPECT(executable->await(kToHost, 1));
  EXPECT(contains(failure_of([&] { executable->await(kToHost, 2); }), "without flag 0 reaching 2"));
  executable->wait();
  CommandList wrong;
  EXPECT(contains(failure_of([&] { wrong.signal(Branch::kCompute, kNumFlags, 1); }), "flag 32"));
  EXPECT(contains(failure_of([&] { wrong.wait_flag(Branch::kCompute, 0, 0); }), "= 0"));
  EXPECT(contains(failure_of([&] { wrong.wait_for(Branch::kCopy, 0); }), "point 0"));
  EXPECT(contains(failure_of([&] { wrong.transfer(Branch::kCopy, 0, 0, 3); }), "multiple of 4"));
  const auto empty = fixture.device->build(CommandList(), BuildMode::kGraph);
  empty->run();
  empty->wait();
  EXPECT(list.text() == "compute: transfer 16 bytes\ncompute: send 0 bytes, flag 0 = 1\n");
}

// A fault ends the waiting, and everything after says so.
void test_fault(const Options& options, int) {
  const Fixture fixture(options);
  CommandList list;
  fixture.begin(list);
  if (options.cuda) {
    fixture.launch(list, Branch::kCompute, DeviceAddress{64});  // nothing lies there
  } else {
    fixture.controls->fail_kernel("test_");
    fixture.launch_constant(list, Branch::kCompute, 0);
  }
  list.signal(Branch::kCompute, kToHost, 1);
  const auto executable = fixture.device->build(list, BuildMode::kGraph);
  const int64_t begin = now_ns();
  const std::string text = failure_of([&] {
    executable->run();  // a driver may tell of the fault before this returns
    executable->await(kToHost, 1);
  });
  EXPECT(now_ns() - begin < 10'000'000'000);
  std::fprintf(stderr, "%s\n", text.c_str());
  const char* failure = options.cuda ? "CUDA_ERROR" : "fault in kernel test_affine";
  EXPECT(contains(text, failure));
  EXPECT(contains(failure_of([&] { executable->wait(); }), failure));
  EXPECT(failure_of([&] { executable->run(); }) != "");
}

int64_t time_of(Executable& executable) {
  const int64_t begin = now_ns();
  executable.run();
  executable.wait();
  return now_ns() - begin;
}

// It never takes less than `expected_ns`, and sometimes hardly more: other programs may run beside it.
bool takes(Executable& executable, double expected_ns) {
  double best = 1e18;
  for (int i = 0; i < 100 && best > 1.8 * expected_ns; ++i) {
    best = std::min(best, static_cast<double>(time_of(executable)));
  }
  if (best >= 0.99 * expected_ns && best <= 1.8 * expected_ns) return true;
  std::fprintf(stderr, "%.0f ns, expected %.0f\n", best, expected_ns);
  return false;
}

// Scripted speeds.
void test_speeds(const Options& options, int) {
  constexpr uint64_t kBytes = 4 << 20;
  const Fixture fixture(options);
  const HostRange source = fixture.device->allocate_host(kBytes, "a copy");
  const DeviceRange target = fixture.device->allocate(kBytes, "a copy");
  CommandList copy;
  copy.copy_to_device(Branch::kCopy, target.address(), source.host(), kBytes);
  const auto copying = fixture.device->build(copy, BuildMode::kGraph);
  fixture.controls->set_link_rate(1e9, 1e9);
  EXPECT(takes(*copying, kBytes));
  fixture.controls->set_link_rate(0.5e9, 1e9);
  EXPECT(takes(*copying, 2.0 * kBytes));

  CommandList pageable;
  const std::vector<std::byte> unpinned(kBytes);
  pageable.copy_to_device(Branch::kCopy, target.address(), unpinned.data(), kBytes);
  EXPECT(takes(*fixture.device->build(pageable, BuildMode::kGraph), 4.0 * kBytes));

  CommandList two;  // one link, so beside each other they take as long as one after the other
  two.copy_to_device(Branch::kCopy, target.address(), source.host(), kBytes / 2);
  two.copy_to_device(Branch::kCopy2, target.address() + kBytes / 2, source.host(), kBytes / 2);
  EXPECT(takes(*fixture.device->build(two, BuildMode::kGraph), 2.0 * kBytes));

  CommandList launch;
  fixture.begin(launch);
  fixture.launch_constant(launch, Branch::kCompute, 0);
  const auto launching = fixture.device->build(launch, BuildMode::kGraph);
  fixture.controls->set_kernel_ns("test_", 3'000'000);
  EXPECT(takes(*launching, 3e6));
  fixture.controls->set_slowdown(2);
  EXPECT(takes(*launching, 6e6));
  fixture.controls->set_slowdown(1);
  fixture.controls->set_kernel_ns("test_", 0);
  int64_t best = time_of(*launching);
  for (int i = 0; i < 100 && best >= 3'000'000; ++i) best = std::min(best, time_of(*launching));
  EXPECT(best < 3'000'000);
}

// The device's clock on the host's.
void test_clock(const Options& options, int rounds) {
  const Fixture fixture(options);
  CommandList list;
  list.stamp(Branch::kCompute, 0);
  const auto executable = fixture.device->build(list, BuildMode::kGraph);
  const int64_t offset = fixture.device->clock_offset_ns();
  for (int round = 0; round < rounds; ++round) {
    const int64_t begin = now_ns();
    executable->run();
    executable->wait();
    const int64_t end = now_ns(), stamp = executable->stamp(0) + offset;
    constexpr int64_t kSlack = 50'000;
    EXPECT(begin - kSlack <= stamp && stamp <= end + kSlack);
  }
}

void run_once(const Fixture& fixture, const CommandList& list) {
  const auto executable = fixture.device->build(list, BuildMode::kGraph);
  executable->run();
  executable->wait();
}

void test_misuse_host_pointer(const Options& options, int) {
  const Fixture fixture(options);
  Words words(kWidth);
  CommandList list;
  fixture.begin(list);
  fixture.launch(list, Branch::kCompute, reinterpret_cast<DeviceAddress>(words.data()));
  run_once(fixture, list);
}

void test_misuse_freed(const Options& options, int) {
  const Fixture fixture(options);
  CommandList list;
  fixture.begin(list);
  fixture.launch(list, Branch::kCompute, fixture.device->allocate(kRowBytes, "x").address());
  run_once(fixture, list);
}

void test_misuse_past_end(const Options& options, int) {
  const Fixture fixture(options);
  CommandList list;
  list.copy_to_device(Branch::kCopy, fixture.params.address(), fixture.host_value.host(), 512);
  run_once(fixture, list);
}

void test_misuse_device_pointer(const Options& options, int) {
  const Fixture fixture(options);
  KernelArgs args{};
  args.in[3] = as_operand(fixture.value.address());
  fixture.device->check_host_args("layers.0.mlp", args);
}

// Which of a plan's binaries a GPU loads, and what is said when there is none.
void test_modules(const Options&, int) {
  const std::vector<ModuleEntry> modules = {
      {"a86", 0, 86, false}, {"a80", 0, 80, false}, {"a80p", 0, 80, true}, {"b75p", 1, 75, true},
      {"c90", 2, 90, false}};
  const auto choice = [&](int index, int sm) {
    return std::string(choose_module(modules, index, sm).file);
  };
  EXPECT(choice(0, 80) == "a80" && choice(0, 86) == "a86" && choice(0, 89) == "a86");
  EXPECT(choice(0, 90) == "a80p" && choice(0, 120) == "a80p" && choice(1, 80) == "b75p");
  const auto refusal = [&](int index, int sm) {
    return failure_of([&] { choose_module(modules, index, sm); });
  };
  EXPECT(contains(refusal(0, 75), "is for compute capability 86, 80, 80 (PTX), this GPU has 75"));
  EXPECT(contains(refusal(2, 120), "is for compute capability 90, this GPU has 120"));
  EXPECT(contains(refusal(3, 120), "none"));
  EXPECT(cuda::cuda_version_for_ptx("//\n.version 7.8\n.target") == 11080);
  EXPECT(cuda::cuda_version_for_ptx(".version 8.5\n") == 12050);
  EXPECT(cuda::cuda_version_for_ptx(".version 8.7\n") == 12080);
  EXPECT(cuda::cuda_version_for_ptx(".version 9.0\n") == 13000);
  EXPECT(cuda::cuda_version_for_ptx("") == 0);
}

using Test = void (*)(const Options&, int);

const std::map<std::string, Test>& tests() {
  static const std::map<std::string, Test> all = {
      {"order", test_order},
      {"hand_offs", test_hand_offs},
      {"launches", test_launches},
      {"synchronous", test_synchronous},
      {"no_graphs", test_no_graphs},
      {"slots", test_slots},
      {"cancel", test_cancel},
      {"swap", test_swap},
      {"budget", test_budget},
      {"pinning", test_pinning},
      {"mistakes", test_mistakes},
      {"fault", test_fault},
      {"speeds", test_speeds},
      {"clock", test_clock},
      {"modules", test_modules},
      {"misuse_host_pointer", test_misuse_host_pointer},
      {"misuse_freed", test_misuse_freed},
      {"misuse_past_end", test_misuse_past_end},
      {"misuse_device_pointer", test_misuse_device_pointer},
  };
  return all;
}

int run(int argc, char** argv) {
  if (argc < 4 || !tests().contains(argv[2])) {
    std::fprintf(stderr, "usage: device_test virtual|cuda TEST ROUNDS [MODULES SM]\n");
    return 2;
  }
  Options options;
  options.cuda = std::string(argv[1]) == "cuda";
  if (argc > 5) read_modules(options, argv[4], argv[5]);
  tests().at(argv[2])(options, std::atoi(argv[3]));
  std::printf("fine\n");
  return 0;
}

}  // namespace
}  // namespace atsc::testing

int main(int argc, char** argv) {
  try {
    return atsc::testing::run(argc, argv);
  } catch (const atsc::Failure& failure) {
    std::fprintf(stderr, "failed: %s\n", failure.what());
    return 1;
  }
}
