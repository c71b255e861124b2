// Compares what cuda_driver.h declares with the toolkit's cuda.h, at compile time.
#include <cuda.h>

#include <cstddef>

#include "cuda_driver.h"

namespace ours = atsc::cuda;

#define SAME_SIZE(mine, theirs) static_assert(sizeof(mine) == sizeof(theirs))
#define SAME_PLACE(mine, member, theirs, their_member) \
  static_assert(offsetof(mine, member) == offsetof(theirs, their_member))

SAME_SIZE(ours::KernelNodeParams, CUDA_KERNEL_NODE_PARAMS_v2);
SAME_PLACE(ours::KernelNodeParams, block_x, CUDA_KERNEL_NODE_PARAMS_v2, blockDimX);
SAME_PLACE(ours::KernelNodeParams, shared_bytes, CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes);
SAME_PLACE(ours::KernelNodeParams, params, CUDA_KERNEL_NODE_PARAMS_v2, kernelParams);
SAME_PLACE(ours::KernelNodeParams, context, CUDA_KERNEL_NODE_PARAMS_v2, ctx);

SAME_SIZE(ours::CopyParams, CUDA_MEMCPY3D);
SAME_PLACE(ours::CopyParams, source.type, CUDA_MEMCPY3D, srcMemoryType);
SAME_PLACE(ours::CopyParams, source.host, CUDA_MEMCPY3D, srcHost);
SAME_PLACE(ours::CopyParams, source.device, CUDA_MEMCPY3D, srcDevice);
SAME_PLACE(ours::CopyParams, target.type, CUDA_MEMCPY3D, dstMemoryType);
SAME_PLACE(ours::CopyParams, target.host, CUDA_MEMCPY3D, dstHost);
SAME_PLACE(ours::CopyParams, target.device, CUDA_MEMCPY3D, dstDevice);
SAME_PLACE(ours::CopyParams, width_bytes, CUDA_MEMCPY3D, WidthInBytes);
SAME_PLACE(ours::CopyParams, depth, CUDA_MEMCPY3D, Depth);

SAME_SIZE(ours::MemOp, CUstreamBatchMemOpParams);
SAME_PLACE(ours::MemOp, wait.address, CUstreamBatchMemOpParams, waitValue.address);
SAME_PLACE(ours::MemOp, wait.value, CUstreamBatchMemOpParams, waitValue.value);
SAME_PLACE(ours::MemOp, wait.flags, CUstreamBatchMemOpParams, waitValue.flags);
SAME_SIZE(ours::MemOpNodeParams, CUDA_BATCH_MEM_OP_NODE_PARAMS_v2);
SAME_PLACE(ours::MemOpNodeParams, ops, CUDA_BATCH_MEM_OP_NODE_PARAMS_v2, paramArray);
SAME_PLACE(ours::MemOpNodeParams, flags, CUDA_BATCH_MEM_OP_NODE_PARAMS_v2, flags);

#define SAME_VALUE(mine, theirs) static_assert(static_cast<long>(mine) == static_cast<long>(theirs))

SAME_VALUE(ours::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(ours::kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME_VALUE(ours::kJitCompilerNotFound, CUDA_ERROR_JIT_COMPILER_NOT_FOUND);
SAME_VALUE(ours::kUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME_VALUE(ours::kNotFound, CUDA_ERROR_NOT_FOUND);
SAME_VALUE(ours::kNotReady, CUDA_ERROR_NOT_READY);
SAME_VALUE(ours::kNumSms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(ours::kSmMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(ours::kSmMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_VALUE(ours::kHostRegisterSupported, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
SAME_VALUE(ours::kMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME_VALUE(ours::kNumRegisters, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME_VALUE(ours::kJitErrorLog, CU_JIT_ERROR_LOG_BUFFER);
SAME_VALUE(ours::kJitErrorLogBytes, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
SAME_VALUE(ours::kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
SAME_VALUE(ours::kHostRegisterMapped, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME_VALUE(ours::kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_VALUE(ours::kEventWithoutTiming, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(ours::kWaitUntilReached, CU_STREAM_WAIT_VALUE_GEQ);
SAME_VALUE(ours::kOpWaitValue32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME_VALUE(ours::kHostMemory, CU_MEMORYTYPE_HOST);
SAME_VALUE(ours::kDeviceMemory, CU_MEMORYTYPE_DEVICE);
