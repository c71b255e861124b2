// Executables of a CUDA GPU: one graph, or launches that a thread of the device issues.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "device.h"

namespace atsc {

class CudaDevice;
class CudaLaunches;

// `mode`: one that the device and the list allow.
std::unique_ptr<Executable> make_cuda_round(CudaDevice& device, const CommandList& list,
                                            BuildMode mode);

// The thread that issues launches. The thread that runs a round must not: a stream's queue holds
// about a thousand commands, and when it is full behind a wait, a launch blocks until that wait is
// over, which may be for the same thread to bring about.
class CudaLauncher {
 public:
  explicit CudaLauncher(CudaDevice& device);
  ~CudaLauncher();

  void issue(CudaLaunches& round);

 private:
  void work();

  CudaDevice& device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  CudaLaunches* round_ = nullptr;
  bool quit_ = false;
  std::thread thread_;
};

}  // namespace atsc
