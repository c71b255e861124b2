// What the machine allows: how fast the CPU reads, how fast weights cross to the first GPU, each
// alone and beside the other, and how fast the GPU's memory is.
//
//     gpu_limits THREADS MIB
//
// Prints one JSON object of bytes a second. `vram` is a copy within VRAM, bytes read and written
// counted; without a GPU, the figures that need one are null. The driver is loaded at run time, so
// that a C++ compiler is all that building takes.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <type_traits>
#include <vector>

#include "plain_read.h"

namespace {

constexpr std::size_t kLine = 64;
constexpr double kSeconds = 1.0;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Bytes a second that threads read, each its own part of the buffer again and again.
double cpu_rate(const std::byte* buffer, std::size_t bytes, int threads) {
  std::atomic<std::uint64_t> sink{0}, read{0};
  std::vector<std::thread> workers;
  const Clock::time_point begin = Clock::now();
  for (int t = 0; t < threads; ++t) {
    const std::size_t first = bytes / kLine / threads * t * kLine;
    const std::size_t last = bytes / kLine / threads * (t + 1) * kLine;
    workers.emplace_back([=, &sink, &read] {
      while (seconds_since(begin) < kSeconds) {
        constexpr std::size_t kPiece = std::size_t{16} << 20;
        for (std::size_t at = first; at < last; at += kPiece) {
          const std::size_t end = at + kPiece < last ? at + kPiece : last;
          sink += read_once(buffer + at, buffer + end);
          read += end - at;
          if (seconds_since(begin) >= kSeconds) break;
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double elapsed = seconds_since(begin);
  volatile std::uint64_t keep = sink;
  (void)keep;
  return static_cast<double>(read) / elapsed;
}

// The few functions of the CUDA driver API that copies take.
struct Gpu {
  using Pointer = unsigned long long;

  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*retain)(void**, int);
  int (*set_current)(void*);
  int (*allocate)(Pointer*, std::size_t);
  int (*allocate_host)(void**, std::size_t);
  int (*to_device)(Pointer, const void*, std::size_t, void*);
  int (*within)(Pointer, Pointer, std::size_t, void*);
  int (*synchronize)();

  Pointer memory = 0;
  void* context = nullptr;

  bool open(std::size_t bytes) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return false;
    bool whole = true;
    const auto take = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          dlsym(library, name));
      whole = whole && function != nullptr;
    };
    take(init, "cuInit");
    take(device_get, "cuDeviceGet");
    take(retain, "cuDevicePrimaryCtxRetain");
    take(set_current, "cuCtxSetCurrent");
    take(allocate, "cuMemAlloc_v2");
    take(allocate_host, "cuMemAllocHost_v2");
    take(to_device, "cuMemcpyHtoDAsync_v2");
    take(within, "cuMemcpyDtoDAsync_v2");
    take(synchronize, "cuCtxSynchronize");
    int device = 0;
    return whole && init(0) == 0 && device_get(&device, 0) == 0 &&
           retain(&context, device) == 0 && set_current(context) == 0 &&
           allocate(&memory, 2 * bytes) == 0;
  }
};

// Bytes a second of copies from pinned memory, until `stop` or for a second.
double copy_rate(const Gpu& gpu, const void* pinned, std::size_t bytes,
                 const std::atomic<bool>* stop) {
  gpu.set_current(gpu.context);
  gpu.to_device(gpu.memory, pinned, bytes, nullptr);
  gpu.synchronize();
  std::size_t copied = 0;
  const Clock::time_point begin = Clock::now();
  while (stop != nullptr ? !stop->load() : seconds_since(begin) < kSeconds) {
    constexpr std::size_t kPiece = std::size_t{64} << 20;
    const std::size_t piece = bytes < kPiece ? bytes : kPiece;
    for (int i = 0; i < 2; ++i, copied += piece) {
      const std::size_t at = copied % (bytes / piece * piece);
      const auto* from = static_cast<const std::byte*>(pinned) + at;
      if (gpu.to_device(gpu.memory + at, from, piece, nullptr) != 0) return 0;
    }
    if (gpu.synchronize() != 0) return 0;
  }
  return static_cast<double>(copied) / seconds_since(begin);
}

double vram_rate(const Gpu& gpu, std::size_t bytes) {
  gpu.within(gpu.memory + bytes, gpu.memory, bytes, nullptr);
  gpu.synchronize();
  std::size_t moved = 0;
  const Clock::time_point begin = Clock::now();
  while (seconds_since(begin) < kSeconds) {
    for (int i = 0; i < 8; ++i, moved += 2 * bytes) {
      if (gpu.within(gpu.memory + bytes, gpu.memory, bytes, nullptr) != 0) return 0;
    }
    if (gpu.synchronize() != 0) return 0;
  }
  return static_cast<double>(moved) / seconds_since(begin);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int threads = std::atoi(argv[1]);
  const std::size_t bytes = std::strtoull(argv[2], nullptr, 10) << 20;
  if (threads < 1 || bytes == 0) return 2;
  Gpu gpu{};
  void* memory = nullptr;
  const bool has_gpu = gpu.open(bytes) && gpu.allocate_host(&memory, bytes) == 0;
  if (!has_gpu) memory = std::aligned_alloc(kLine, bytes);
  if (memory == nullptr) return 1;
  auto* buffer = static_cast<std::byte*>(memory);
  for (std::size_t i = 0; i < bytes; ++i) buffer[i] = static_cast<std::byte>(i * 31);
  const double alone = cpu_rate(buffer, bytes, threads);
  if (!has_gpu) {
    std::printf("{\"cpu\": %.4g, \"cpu_beside_h2d\": null, \"h2d\": null, "
                "\"h2d_beside_cpu\": null, \"vram\": null}\n", alone);
    return 0;
  }
  const double h2d = copy_rate(gpu, memory, bytes, nullptr);
  std::atomic<bool> stop{false};
  double h2d_beside = 0;
  std::thread copier([&] { h2d_beside = copy_rate(gpu, memory, bytes, &stop); });
  const double beside = cpu_rate(buffer, bytes, threads);
  stop = true;
  copier.join();
  std::printf("{\"cpu\": %.4g, \"cpu_beside_h2d\": %.4g, \"h2d\": %.4g, "
              "\"h2d_beside_cpu\": %.4g, \"vram\": %.4g}\n",
              alone, beside, h2d, h2d_beside, vram_rate(gpu, bytes));
}
