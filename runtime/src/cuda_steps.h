// What the executables of a CUDA GPU share: a list of commands as the driver takes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "cuda_device.h"

namespace atsc {

class CudaRound : public Executable {
 protected:
  // A command as the driver takes it.
  struct Step {
    enum class Kind : uint8_t {
      kKernel,
      kCopy,
      kMove,     // from an address of the device to another, one of them in mapped host memory
      kWaitFlag,
      kRecord,
      kWaitPoint,
      kSettle,   // the host waits for the stream and raises the flag
    };
    Kind kind;
    Branch branch;
    cuda::Function function = nullptr;
    uint32_t grid[3] = {1, 1, 1};
    unsigned block = 1, shared_bytes = 0;
    std::variant<DeviceArgs, HandOffArgs> args = {};
    bool to_device = false;
    std::byte* host = nullptr;
    cuda::DevicePtr device = 0, from = 0;
    uint64_t bytes = 0;
    int flag = 0;
    uint32_t value = 0;
    int point = 0;

    void* argument() {
      return std::visit([](auto& held) -> void* { return &held; }, args);
    }
  };

  CudaRound(CudaDevice& device, const CommandList& list, BuildMode mode);

  std::vector<Step> lower(const CommandList& list);

  // Whether all commands of a stream are over.
  bool is_idle(cuda::Stream stream) const;

  CudaDevice& gpu_;
  const CudaContext& context_;
  const BuildMode mode_;

 private:
  void lower(const Command& command, std::vector<Step>& steps);
  void add_hand_off(Branch branch, const HandOffArgs& args, uint32_t blocks, unsigned threads,
                    std::vector<Step>& steps) const;
  void add_copy(const Command& command, std::vector<Step>& steps) const;
  void add_hand_offs(const Command& command, const Command* wait, std::vector<Step>& steps) const;
  void add_plain_hand_offs(const Command& command, std::vector<Step>& steps) const;
};

std::unique_ptr<Executable> make_cuda_graph(CudaDevice& device, const CommandList& list);

// `mode`: kLaunches or kSynchronous.
std::unique_ptr<Executable> make_cuda_launches(CudaDevice& device, const CommandList& list,
                                               BuildMode mode);

}  // namespace atsc
