// The CUDA implementation of Device: what device_cuda.cc and cuda_rounds.cc share.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "device_cuda.h"

namespace atsc {

class CudaLauncher;

// The primary context of one GPU, held for the life of the object.
class CudaContext {
 public:
  explicit CudaContext(int ordinal);
  ~CudaContext();
  CudaContext(CudaContext&& other) noexcept;

  // Makes the context current for the calling thread, and the one before again at the end.
  class Current {
   public:
    explicit Current(const CudaContext& context) : driver_(*context.driver_) {
      driver_.cuCtxPushCurrent(context.context_);
    }
    ~Current() {
      cuda::Context before = nullptr;
      driver_.cuCtxPopCurrent(&before);
    }
    Current(const Current&) = delete;

   private:
    const cuda::Driver& driver_;
  };

  const cuda::Driver& driver() const { return *driver_; }
  cuda::Context handle() const { return context_; }
  const DeviceInfo& info() const { return info_; }
  uint64_t bytes() const { return bytes_; }  // of device memory that it took; 0: not known
  bool can_register() const { return can_register_; }

  // Raises Failure unless the call went well: "doing: error".
  void check(cuda::Result result, const char* doing) const;

 private:
  int attribute(cuda::Attribute attribute) const;

  const cuda::Driver* driver_;
  cuda::DeviceId device_ = 0;
  cuda::Context context_ = nullptr;
  DeviceInfo info_;
  uint64_t bytes_ = 0;
  bool can_register_ = false;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(CudaContext context, uint64_t budget_bytes);
  ~CudaDevice() override;

  void upload(DeviceAddress target, const void* source, uint64_t bytes) override;
  void download(void* target, DeviceAddress source, uint64_t bytes) override;
  void fill(DeviceAddress target, uint8_t byte, uint64_t bytes) override;
  void load_modules(std::span<const ModuleEntry> modules,
                    const std::function<std::string(const char* file)>& read) override;
  KernelHandle kernel_of(const NodeEntry& node, bool few_rows) override;
  uint64_t scratch_bytes(KernelHandle kernel, const LaunchShape& shape) override;
  std::unique_ptr<Executable> build(const CommandList& list, BuildMode mode) override;
  int64_t clock_offset_ns() override;

  // What KernelHandle::entry points to.
  struct Kernel {
    const DeviceKernel* table;
    cuda::Function function;
  };

  // For its executables.
  const CudaContext& context() const { return context_; }
  cuda::Stream stream(Branch branch) const { return streams_[static_cast<int>(branch)]; }
  cuda::Stream side_stream() const { return side_stream_; }  // never holds a round
  cuda::Function hand_off() const { return hand_off_; }
  CudaLauncher& launcher();
  using Device::pieces_of;
  using Device::Piece;
  uint64_t free_bytes() const;
  void charge_executable(uint64_t bytes) { charge(Use::kExecutables, bytes, "rounds"); }
  void refund_executable(uint64_t bytes) { refund(Use::kExecutables, bytes); }

 private:
  DeviceAddress allocate_raw(uint64_t bytes) override;
  void free_raw(DeviceAddress address, uint64_t bytes) noexcept override;
  DeviceAddress pin_raw(void* memory, uint64_t bytes) override;
  void unpin_raw(void* memory, uint64_t bytes) noexcept override;

  cuda::Stream make_stream(int priority) const;
  bool graph_can_wait();
  void load_module(const ModuleEntry& entry, const std::string& image);
  void load_function(cuda::Function function) const;
  int64_t stamp_once();

  CudaContext context_;
  cuda::Stream streams_[kNumBranches] = {};
  cuda::Stream side_stream_ = nullptr;
  HostRange page_;  // for stamp_once and graph_can_wait
  std::vector<cuda::Module> modules_;
  cuda::Function hand_off_ = nullptr;
  std::mutex kernels_mutex_;
  std::map<const DeviceKernel*, std::unique_ptr<Kernel>> kernels_;
  std::mutex launcher_mutex_;
  std::unique_ptr<CudaLauncher> launcher_;
};

}  // namespace atsc
