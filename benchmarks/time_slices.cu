// How late a GPU is for a process that hands work to it, while another process presses it.
//
//     nvcc -O2 -std=c++17 -arch=native benchmarks/time_slices.cu -o time_slices
//     sleep 60 | python -m atsc.compiler.commands.load gpu 0.6 -1 &     # it says when it is ready
//     CUDA_MODULE_LOADING=EAGER ./time_slices MODE CPU_US COUNT [WORK_NS]
//
// So many times the CPU is busy, then raises a flag in mapped memory, for which the GPU works a little
// and answers. Printed is the time from the flag to the answer. Modes: `yield`, a stream waits for the
// flag; `spin`, the working kernel polls it; `hold`, a stream waits, and a kernel on another one runs
// meanwhile. Modules are loaded eagerly: loading one would wait for the stream that waits.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Word = volatile unsigned;

constexpr double kCyclesPerNs = 1.7;  // about
constexpr unsigned kHeldTogether = 25;

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

template <class T>
T checked(T result) {
  if (static_cast<int>(result) != 0) {
    std::fprintf(stderr, "time_slices: CUDA error %d\n", static_cast<int>(result));
    std::exit(1);
  }
  return result;
}

__global__ void work(Word* flag, Word* answer, unsigned value, unsigned ns) {
  if (threadIdx.x != 0) return;
  while (flag != nullptr && *flag < value) {
  }
  const long long begin = clock64();
  while (clock64() - begin < static_cast<long long>(ns * kCyclesPerNs)) {
  }
  *answer = value;
  __threadfence_system();
}

__global__ void hold(Word* answer, unsigned value) {
  while (threadIdx.x == 0 && *answer < value) {
  }
}

unsigned* mapped_word() {
  unsigned* word = nullptr;
  checked(cudaHostAlloc(&word, 64, cudaHostAllocMapped));  // one address for both sides
  *word = 0;
  return word;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 64;
  const std::string mode = argv[1];
  const double cpu_us = std::atof(argv[2]);
  const auto count = static_cast<unsigned>(std::atoi(argv[3]));
  const auto work_ns = static_cast<unsigned>(argc > 4 ? std::atoi(argv[4]) : 100'000);
  checked(cudaFree(nullptr));
  using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  checked(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, 12000, cudaEnableDefault,
                                           &found));
  const auto wait_value = reinterpret_cast<WaitValue>(entry);
  cudaStream_t stream = nullptr, other = nullptr;
  checked(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  checked(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  unsigned *flag = mapped_word(), *answer = mapped_word();

  std::vector<double> taken_us;
  const Clock::time_point begin = Clock::now();
  for (unsigned value = 1; value <= count; ++value) {
    if (mode == "hold" && (value - 1) % kHeldTogether == 0) {
      hold<<<1, 32, 0, other>>>(answer, std::min(value + kHeldTogether - 1, count));
    }
    if (mode != "spin") {
      checked(wait_value(stream, reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WAIT_VALUE_GEQ));
    }
    work<<<1, 32, 0, stream>>>(mode == "spin" ? flag : nullptr, answer, value, work_ns);
    const Clock::time_point busy = Clock::now();
    while (us_since(busy) < cpu_us) {
    }
    const Clock::time_point raised = Clock::now();
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    while (__atomic_load_n(answer, __ATOMIC_ACQUIRE) < value) {
    }
    taken_us.push_back(us_since(raised));
  }
  const double total_us = us_since(begin);
  checked(cudaDeviceSynchronize());
  std::sort(taken_us.begin(), taken_us.end());
  double sum_us = 0;
  for (const double each : taken_us) sum_us += each;
  std::printf("%s after %.0f us: mean %.0f us, median %.0f, largest %.0f; %.2f ms each time\n",
              mode.c_str(), cpu_us, sum_us / count, taken_us[count / 2], taken_us.back(),
              total_us / count / 1e3);
}
