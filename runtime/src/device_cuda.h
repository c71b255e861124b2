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

// Raises Failure: no driver, a driver too old, no such GPU, or a budget that the context exceeds.
std::unique_ptr<Device> open_cuda_device(const CudaOptions& options);

}  // namespace atsc
