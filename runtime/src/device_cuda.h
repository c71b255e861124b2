// A CUDA GPU as a Device, by the driver API: nothing of CUDA's is needed to build or to link this.
//
// It uses the device's primary context, so that an application which uses CUDA itself pays for one
// context and not for two.
#pragma once

#include <cstdint>
#include <memory>

#include "device.h"

namespace atsc {

struct CudaOptions {
  int ordinal = 0;
  uint64_t budget_bytes = 0;  // --vram, everything counted; 0: what is free
};

// Of the binaries of one module, the one that a GPU of compute capability `sm` loads: its own, else
// that of an earlier one of the same generation (80 runs on 86, not on 90), else PTX of an earlier
// one. Raises Failure if there is none.
const ModuleEntry& choose_module(std::span<const ModuleEntry> modules, int index, int sm);

// Raises Failure: no driver, a driver too old, no such GPU, or a budget that the context exceeds.
std::unique_ptr<Device> open_cuda_device(const CudaOptions& options);

}  // namespace atsc
