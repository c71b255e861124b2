// The part of the CUDA driver API that device_cuda.cc uses, declared here and loaded from the
// driver at run time. Types and functions are those of CUDA 12.0, which each later driver serves
// too; tests/runtime/test_device_cuda_abi.py compares them with cuda.h where there is one.
//
// Names follow CUDA's, without the prefix CU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace atsc::cuda {

inline constexpr int kApiVersion = 12000;

enum Result : int {
  kSuccess = 0,
  kOutOfMemory = 2,
  kNoDevice = 100,
  kJitCompilerNotFound = 221,
  kUnsupportedPtxVersion = 222,
  kNotFound = 500,
  kNotReady = 600,
};

enum Attribute : int {
  kNumSms = 16,
  kSmMajor = 75,
  kSmMinor = 76,
  kHostRegisterSupported = 99,
};

enum : int { kMaxDynamicSharedBytes = 8, kNumRegisters = 4 };          // of functions
enum : int { kJitErrorLog = 5, kJitErrorLogBytes = 6 };                // options of a module
enum : unsigned { kHostRegisterPortable = 1, kHostRegisterMapped = 2 };
inline constexpr int kFirstPriority = -1000;  // the driver takes the first one that it has
enum : unsigned { kStreamNonBlocking = 1, kEventWithoutTiming = 2, kWaitUntilReached = 0 };
enum : unsigned { kOpWaitValue32 = 1 };
enum MemoryType : unsigned { kHostMemory = 1, kDeviceMemory = 2 };

using DevicePtr = unsigned long long;
using DeviceId = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Graph = struct GraphTag*;
using GraphNode = struct GraphNodeTag*;
using GraphExec = struct GraphExecTag*;

struct KernelNodeParams {
  Function function;
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void** params;
  void** extra;
  void* kernel;
  Context context;
};

struct CopyParams {
  struct Side {
    size_t x_bytes, y, z, lod;
    MemoryType type;
    void* host;
    DevicePtr device;
    void* array;
    void* reserved;
    size_t pitch, height;
  };
  Side source, target;
  size_t width_bytes, height, depth;
};

union MemOp {
  struct {
    unsigned operation;
    DevicePtr address;
    uint64_t value;
    unsigned flags;
    DevicePtr alias;
  } wait;
  uint64_t pad[6];
};

struct MemOpNodeParams {
  Context context;
  unsigned count;
  MemOp* ops;
  unsigned flags;
};

// Members are named as the driver names its functions.
struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuDriverGetVersion)(int* version);
  Result (*cuGetErrorName)(Result result, const char** text);
  Result (*cuGetErrorString)(Result result, const char** text);
  Result (*cuDeviceGetCount)(int* count);
  Result (*cuDeviceGet)(DeviceId* device, int ordinal);
  Result (*cuDeviceGetName)(char* name, int bytes, DeviceId device);
  Result (*cuDeviceGetAttribute)(int* value, Attribute attribute, DeviceId device);
  Result (*cuDeviceGetPCIBusId)(char* id, int bytes, DeviceId device);
  Result (*cuDevicePrimaryCtxRetain)(Context* context, DeviceId device);
  Result (*cuDevicePrimaryCtxRelease)(DeviceId device);
  Result (*cuCtxPushCurrent)(Context context);
  Result (*cuCtxPopCurrent)(Context* context);
  Result (*cuMemGetInfo)(size_t* free, size_t* total);
  Result (*cuMemAlloc)(DevicePtr* address, size_t bytes);
  Result (*cuMemFree)(DevicePtr address);
  Result (*cuMemHostRegister)(void* memory, size_t bytes, unsigned flags);
  Result (*cuMemHostUnregister)(void* memory);
  Result (*cuMemHostGetDevicePointer)(DevicePtr* address, void* memory, unsigned flags);
  Result (*cuMemcpyHtoDAsync)(DevicePtr target, const void* source, size_t bytes, Stream stream);
  Result (*cuMemcpyDtoHAsync)(void* target, DevicePtr source, size_t bytes, Stream stream);
  Result (*cuMemcpyAsync)(DevicePtr target, DevicePtr source, size_t bytes, Stream stream);
  Result (*cuMemsetD8Async)(DevicePtr target, unsigned char byte, size_t bytes, Stream stream);
  Result (*cuModuleLoadDataEx)(Module* module, const void* image, unsigned num_options,
                               int* options, void** values);
  Result (*cuModuleUnload)(Module module);
  Result (*cuModuleGetFunction)(Function* function, Module module, const char* symbol);
  Result (*cuFuncSetAttribute)(Function function, int attribute, int value);
  Result (*cuFuncGetAttribute)(int* value, int attribute, Function function);
  Result (*cuFuncLoad)(Function function);  // null before 12.4
  Result (*cuLaunchKernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                           unsigned block_x, unsigned block_y, unsigned block_z,
                           unsigned shared_bytes, Stream stream, void** params, void** extra);
  Result (*cuStreamCreateWithPriority)(Stream* stream, unsigned flags, int priority);
  Result (*cuStreamDestroy)(Stream stream);
  Result (*cuStreamQuery)(Stream stream);
  Result (*cuStreamSynchronize)(Stream stream);
  Result (*cuStreamWaitEvent)(Stream stream, Event event, unsigned flags);
  Result (*cuEventCreate)(Event* event, unsigned flags);
  Result (*cuEventDestroy)(Event event);
  Result (*cuEventRecord)(Event event, Stream stream);
  Result (*cuGraphCreate)(Graph* graph, unsigned flags);
  Result (*cuGraphDestroy)(Graph graph);
  Result (*cuGraphAddKernelNode)(GraphNode* node, Graph graph, const GraphNode* after, size_t num,
                                 const KernelNodeParams* params);
  Result (*cuGraphAddMemcpyNode)(GraphNode* node, Graph graph, const GraphNode* after, size_t num,
                                 const CopyParams* params, Context context);
  Result (*cuGraphAddBatchMemOpNode)(GraphNode* node, Graph graph, const GraphNode* after,
                                     size_t num, const MemOpNodeParams* params);
  Result (*cuGraphInstantiate)(GraphExec* exec, Graph graph, unsigned long long flags);
  Result (*cuGraphExecDestroy)(GraphExec exec);
  Result (*cuGraphUpload)(GraphExec exec, Stream stream);
  Result (*cuGraphLaunch)(GraphExec exec, Stream stream);
};

// Each member of Driver.
#define ATSC_DRIVER_FUNCTIONS(X)                                                                  \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString) X(cuDeviceGetCount)       \
  X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetAttribute) X(cuDeviceGetPCIBusId)                \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxPushCurrent)                    \
  X(cuCtxPopCurrent) X(cuMemGetInfo) X(cuMemAlloc) X(cuMemFree) X(cuMemHostRegister)              \
  X(cuMemHostUnregister) X(cuMemHostGetDevicePointer) X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync)   \
  X(cuMemcpyAsync) X(cuMemsetD8Async) X(cuModuleLoadDataEx) X(cuModuleUnload)                     \
  X(cuModuleGetFunction) X(cuFuncSetAttribute) X(cuFuncGetAttribute) X(cuFuncLoad)                \
  X(cuLaunchKernel) X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamQuery)             \
  X(cuStreamSynchronize) X(cuStreamWaitEvent)                                                     \
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuGraphCreate) X(cuGraphDestroy)          \
  X(cuGraphAddKernelNode) X(cuGraphAddMemcpyNode) X(cuGraphAddBatchMemOpNode)                     \
  X(cuGraphInstantiate) X(cuGraphExecDestroy) X(cuGraphUpload) X(cuGraphLaunch)

// The process's driver, loaded and initialised once; it stays loaded. Raises Failure: no driver,
// one older than kApiVersion, or no GPU.
const Driver& driver();

int driver_version();  // 13000: CUDA 13.0

// "CUDA_ERROR_X (what it means)".
std::string describe(Result result);

// Free memory of a GPU as the system's management library counts it, without a context; 0 if there
// is no such library.
uint64_t free_bytes_without_context(const char* pci_bus_id);

// The CUDA version whose driver compiles such PTX, 12080 for 12.8; 0 if it does not say.
int cuda_version_for_ptx(const std::string& ptx);

}  // namespace atsc::cuda
