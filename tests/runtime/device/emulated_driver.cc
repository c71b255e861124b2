// A libcuda.so.1 on the CPU, for the part of CUDA that the device layer uses: enough to run the
// tests of the CUDA device, under sanitizers too, where there is no GPU. Streams are threads; a
// graph runs on its stream, each node once all before it are done. It knows two kernels, by name: a
// module's image is the name of its only kernel. Memory that nobody allocated or pinned is a fault,
// as is a copy across the border of pinned memory. EMULATED_WITHOUT_WAITS in the environment:
// graphs that wait for memory are refused, as some drivers do.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_driver.h"
#include "fixture.h"

namespace {

using namespace atsc::cuda;
using atsc::DeviceArgs;
using atsc::HandOffArgs;
using Work = std::function<bool()>;  // false: not yet, ask again

constexpr Result kInvalidValue = static_cast<Result>(1), kFault = static_cast<Result>(700);
constexpr Result kNotSupported = static_cast<Result>(801);
constexpr size_t kTotalBytes = size_t{1} << 30;

std::atomic<bool> has_faulted{false};
Result outcome() { return has_faulted ? kFault : kSuccess; }

// What a kernel or a copy may touch.
class Ranges {
 public:
  void add(const void* begin, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(begin)] = bytes;
  }
  size_t remove(const void* begin) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(reinterpret_cast<uintptr_t>(begin));
    if (found == ranges_.end()) return 0;
    const size_t bytes = found->second;
    ranges_.erase(found);
    return bytes;
  }
  bool hold(const void* memory, size_t bytes) const { return reach(memory, bytes) == bytes; }
  bool touch(const void* memory, size_t bytes) const { return reach(memory, bytes) != 0; }
  size_t sum() const {
    const std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (const auto& [begin, bytes] : ranges_) sum += bytes;
    return sum;
  }

 private:
  // Bytes of the range from its start (or from where a pinned range begins in it) in one range.
  size_t reach(const void* memory, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(memory), end = begin + bytes;
    const std::lock_guard lock(mutex_);
    for (const auto& [first, size] : ranges_) {
      const uintptr_t low = std::max(first, begin), high = std::min(first + size, end);
      if (low < high) return high - low;
    }
    return 0;
  }

  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

Ranges device_memory, pinned_memory;

bool may_touch(const void* memory, size_t bytes) {
  if (bytes == 0) return true;
  if (device_memory.hold(memory, bytes) || pinned_memory.hold(memory, bytes)) return true;
  has_faulted = true;
  return false;
}

void run_affine(const DeviceArgs& args) {
  const size_t bytes = atsc::testing::kRowBytes * static_cast<size_t>(args.round->rows[0]);
  if (!may_touch(args.in[0], bytes) || !may_touch(args.out[0], bytes) ||
      !may_touch(args.in[1], atsc::testing::kRowBytes)) {
    return;
  }
  atsc::KernelArgs on_cpu{};
  std::copy(std::begin(args.in), std::end(args.in), on_cpu.in);
  std::copy(std::begin(args.out), std::end(args.out), on_cpu.out);
  atsc::testing::affine(on_cpu, 0, args.round->rows[0]);
}

void run_hand_off(const HandOffArgs& args) {
  if (args.awaited) {
    const std::atomic_ref word(*const_cast<unsigned*>(args.awaited));
    while (static_cast<int>(word.load(std::memory_order_acquire) - args.awaited_value) < 0) {
      std::this_thread::yield();
    }
  }
  if (!may_touch(args.source, args.bytes) || !may_touch(args.target, args.bytes)) return;
  if (args.stamp_before) *args.stamp_before = atsc::platform::now_ns();
  if (args.bytes > 0) std::memcpy(args.target, args.source, args.bytes);
  if (args.stamp_after) *args.stamp_after = atsc::platform::now_ns();
  if (args.flag) std::atomic_ref(*args.flag).store(args.value, std::memory_order_release);
}

const char kAffine[] = "test_affine", kHandOff[] = "atsc_hand_off";

Work kernel_work(Function function, void** params) {
  if (reinterpret_cast<const char*>(function) == kAffine) {
    return [args = *static_cast<DeviceArgs*>(params[0])] { return run_affine(args), true; };
  }
  return [args = *static_cast<HandOffArgs*>(params[0])] { return run_hand_off(args), true; };
}

class FakeStream {
 public:
  FakeStream() : thread_([this] { work(); }) {}
  ~FakeStream() {
    {
      const std::lock_guard lock(mutex_);
      quit_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void add(Work work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return queue_.empty();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.empty(); });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return quit_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const Work& now = queue_.front();
      lock.unlock();
      while (!has_faulted && !now()) std::this_thread::yield();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool quit_ = false;
  std::thread thread_;
};

struct FakeEvent {
  std::atomic<int> recorded{0}, passed{0};
};

struct FakeNode {
  Work work;
  std::vector<FakeNode*> after;
  bool is_done = false;
};

struct FakeGraph {
  std::vector<std::unique_ptr<FakeNode>> nodes;
};

// An executable graph owns copies of the nodes; a launch runs those that are ready, in any order.
struct FakeExec {
  std::vector<FakeNode> nodes;
  std::vector<std::vector<size_t>> after;

  void begin() {
    for (FakeNode& node : nodes) node.is_done = false;
  }
  bool advance() {
    bool all_done = true;
    for (size_t i = nodes.size(); i-- > 0;) {
      FakeNode& node = nodes[i];
      const bool ready =
          std::ranges::all_of(after[i], [&](size_t before) { return nodes[before].is_done; });
      if (!node.is_done && ready) node.is_done = node.work();
      all_done &= node.is_done;
    }
    return all_done;
  }
};

template <class Fake, class Handle>
Fake* fake(Handle handle) {
  return reinterpret_cast<Fake*>(handle);
}

Result copy(Stream stream, void* target, const void* source, size_t bytes, const void* host) {
  if (pinned_memory.touch(host, bytes) && !pinned_memory.hold(host, bytes)) return kInvalidValue;
  const void* on_device = host == target ? source : target;
  if (!device_memory.hold(on_device, bytes)) return kInvalidValue;
  fake<FakeStream>(stream)->add([=] { return std::memcpy(target, source, bytes), true; });
  return outcome();
}

Result add_node(GraphNode* node, Graph graph, const GraphNode* after, size_t num, Work work) {
  auto made = std::make_unique<FakeNode>();
  made->work = std::move(work);
  for (size_t i = 0; i < num; ++i) made->after.push_back(fake<FakeNode>(after[i]));
  *node = reinterpret_cast<GraphNode>(made.get());
  fake<FakeGraph>(graph)->nodes.push_back(std::move(made));
  return outcome();
}

Work wait_work(const MemOp& op) {
  auto* word = reinterpret_cast<uint32_t*>(op.wait.address);
  return [word, value = static_cast<uint32_t>(op.wait.value)] {
    const uint32_t now = std::atomic_ref(*word).load(std::memory_order_acquire);
    return static_cast<int32_t>(now - value) >= 0;
  };
}

Result copy_node(GraphNode* node, Graph graph, const GraphNode* after, size_t num,
                 const CopyParams* params, Context) {
  const bool to_device = params->target.type == kDeviceMemory;
  void* target = to_device ? reinterpret_cast<void*>(params->target.device) : params->target.host;
  const void* source =
      to_device ? params->source.host : reinterpret_cast<void*>(params->source.device);
  const size_t bytes = params->width_bytes;
  if (!pinned_memory.hold(to_device ? source : target, bytes)) return kInvalidValue;
  return add_node(node, graph, after, num,
                  [=] { return std::memcpy(target, source, bytes), true; });
}

Result instantiate(GraphExec* exec, Graph graph, unsigned long long) {
  auto* made = new FakeExec;
  std::map<const FakeNode*, size_t> index;
  for (const auto& node : fake<FakeGraph>(graph)->nodes) {
    std::vector<size_t> after;
    for (const FakeNode* before : node->after) after.push_back(index.at(before));
    index[node.get()] = made->nodes.size();
    made->nodes.push_back({node->work, {}, false});
    made->after.push_back(std::move(after));
  }
  *exec = reinterpret_cast<GraphExec>(made);
  return outcome();
}

Result load_module(Module* module, const void* image, unsigned, int*, void**) {
  *module = reinterpret_cast<Module>(new std::string(static_cast<const char*>(image)));
  return outcome();
}

Result get_function(Function* function, Module module, const char* symbol) {
  if (*fake<std::string>(module) != symbol) return kNotFound;
  const char* name = std::strcmp(symbol, kAffine) == 0 ? kAffine : kHandOff;
  *function = reinterpret_cast<Function>(const_cast<char*>(name));
  return outcome();
}

Result allocate(DevicePtr* address, size_t bytes) {
  if (bytes > kTotalBytes - device_memory.sum()) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0xFF, bytes);
  device_memory.add(memory, bytes);
  *address = reinterpret_cast<DevicePtr>(memory);
  return outcome();
}

Result free_memory(DevicePtr address) {
  auto* memory = reinterpret_cast<void*>(address);
  if (device_memory.remove(memory) == 0) return kInvalidValue;
  std::free(memory);
  return outcome();
}

template <class Function>
void* erase(Function function) {
  void* erased;
  static_assert(sizeof erased == sizeof function);
  std::memcpy(&erased, &function, sizeof erased);
  return erased;
}

// Assigning to a member of Driver checks each signature.
Driver memory_functions() {
  Driver d{};
  d.cuMemGetInfo = [](size_t* free, size_t* total) {
    *total = kTotalBytes;
    *free = kTotalBytes - device_memory.sum();
    return outcome();
  };
  d.cuMemAlloc = allocate;
  d.cuMemFree = free_memory;
  d.cuMemHostRegister = [](void* memory, size_t bytes, unsigned) {
    if (pinned_memory.touch(memory, bytes)) return kInvalidValue;
    pinned_memory.add(memory, bytes);
    return outcome();
  };
  d.cuMemHostUnregister = [](void* memory) {
    return pinned_memory.remove(memory) ? outcome() : kInvalidValue;
  };
  d.cuMemHostGetDevicePointer = [](DevicePtr* address, void* memory, unsigned) {
    *address = reinterpret_cast<DevicePtr>(memory);
    return outcome();
  };
  d.cuMemcpyHtoDAsync = [](DevicePtr target, const void* source, size_t bytes, Stream stream) {
    return copy(stream, reinterpret_cast<void*>(target), source, bytes, source);
  };
  d.cuMemcpyDtoHAsync = [](void* target, DevicePtr source, size_t bytes, Stream stream) {
    return copy(stream, target, reinterpret_cast<void*>(source), bytes, target);
  };
  d.cuMemcpyAsync = [](DevicePtr target, DevicePtr source, size_t bytes, Stream stream) {
    auto* to = reinterpret_cast<void*>(target);
    const auto* from = reinterpret_cast<const void*>(source);
    return copy(stream, to, from, bytes, device_memory.hold(to, bytes) ? from : to);
  };
  d.cuMemsetD8Async = [](DevicePtr target, unsigned char byte, size_t bytes, Stream stream) {
    auto* memory = reinterpret_cast<void*>(target);
    if (!device_memory.hold(memory, bytes)) return kInvalidValue;
    fake<FakeStream>(stream)->add([=] { return std::memset(memory, byte, bytes), true; });
    return outcome();
  };
  return d;
}

void add_device_functions(Driver& d) {
  d.cuInit = [](unsigned) { return kSuccess; };
  d.cuDriverGetVersion = [](int* version) { return *version = 12040, kSuccess; };
  d.cuGetErrorName = [](Result result, const char** text) {
    *text = result == kFault ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
    return kSuccess;
  };
  d.cuGetErrorString = [](Result, const char** text) { return *text = "emulated", kSuccess; };
  d.cuDeviceGetCount = [](int* count) { return *count = 1, kSuccess; };
  d.cuDeviceGet = [](DeviceId* device, int) { return *device = 0, kSuccess; };
  d.cuDeviceGetName = [](char* name, int, DeviceId) {
    return std::strcpy(name, "the emulated GPU"), kSuccess;
  };
  d.cuDeviceGetAttribute = [](int* value, Attribute attribute, DeviceId) {
    *value = attribute == kSmMajor ? 9 : attribute == kSmMinor ? 0 : 1;
    return kSuccess;
  };
  d.cuDeviceGetPCIBusId = [](char* id, int, DeviceId) { return std::strcpy(id, "none"), kSuccess; };
  d.cuDevicePrimaryCtxRetain = [](Context* context, DeviceId) {
    *context = nullptr;
    return outcome();
  };
  d.cuDevicePrimaryCtxRelease = [](DeviceId) { return outcome(); };
  d.cuCtxPushCurrent = [](Context) { return outcome(); };
  d.cuCtxPopCurrent = [](Context*) { return outcome(); };
  d.cuModuleLoadDataEx = load_module;
  d.cuModuleUnload = [](Module module) { return delete fake<std::string>(module), outcome(); };
  d.cuModuleGetFunction = get_function;
  d.cuFuncSetAttribute = [](Function, int, int) { return outcome(); };
  d.cuFuncGetAttribute = [](int* value, int, Function) { return *value = 1, outcome(); };
  d.cuFuncLoad = [](Function) { return outcome(); };
}

void add_stream_functions(Driver& d) {
  d.cuLaunchKernel = [](Function function, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, Stream stream, void** params, void**) {
    fake<FakeStream>(stream)->add(kernel_work(function, params));
    return outcome();
  };
  d.cuStreamCreateWithPriority = [](Stream* stream, unsigned, int) {
    *stream = reinterpret_cast<Stream>(new FakeStream);
    return outcome();
  };
  d.cuStreamDestroy = [](Stream stream) { return delete fake<FakeStream>(stream), outcome(); };
  d.cuStreamQuery = [](Stream stream) {
    // Of a fault one hears when nothing runs any more: what the stream read may go then.
    return fake<FakeStream>(stream)->is_idle() ? outcome() : kNotReady;
  };
  d.cuStreamSynchronize = [](Stream stream) {
    return fake<FakeStream>(stream)->wait(), outcome();
  };
  d.cuStreamWaitEvent = [](Stream stream, Event handle, unsigned) {
    auto* event = fake<FakeEvent>(handle);
    fake<FakeStream>(stream)->add(
        [event, number = event->recorded.load()] { return event->passed >= number; });
    return outcome();
  };
  d.cuEventCreate = [](Event* event, unsigned) {
    *event = reinterpret_cast<Event>(new FakeEvent);
    return outcome();
  };
  d.cuEventDestroy = [](Event event) { return delete fake<FakeEvent>(event), outcome(); };
  d.cuEventRecord = [](Event handle, Stream stream) {
    auto* event = fake<FakeEvent>(handle);
    const int number = ++event->recorded;
    fake<FakeStream>(stream)->add([event, number] { return event->passed = number, true; });
    return outcome();
  };
}

void add_graph_functions(Driver& d) {
  d.cuGraphCreate = [](Graph* graph, unsigned) {
    *graph = reinterpret_cast<Graph>(new FakeGraph);
    return outcome();
  };
  d.cuGraphDestroy = [](Graph graph) { return delete fake<FakeGraph>(graph), outcome(); };
  d.cuGraphAddKernelNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t num,
                              const KernelNodeParams* params) {
    return add_node(node, graph, after, num, kernel_work(params->function, params->params));
  };
  d.cuGraphAddMemcpyNode = copy_node;
  d.cuGraphAddBatchMemOpNode = [](GraphNode* node, Graph graph, const GraphNode* after, size_t num,
                                  const MemOpNodeParams* params) {
    if (std::getenv("EMULATED_WITHOUT_WAITS") != nullptr) return kNotSupported;
    return add_node(node, graph, after, num, wait_work(params->ops[0]));
  };
  d.cuGraphInstantiate = instantiate;
  d.cuGraphExecDestroy = [](GraphExec exec) { return delete fake<FakeExec>(exec), outcome(); };
  d.cuGraphUpload = [](GraphExec, Stream) { return outcome(); };
  d.cuGraphLaunch = [](GraphExec handle, Stream stream) {
    auto* exec = fake<FakeExec>(handle);
    fake<FakeStream>(stream)->add([exec] { return exec->begin(), true; });
    fake<FakeStream>(stream)->add([exec] { return exec->advance(); });
    return outcome();
  };
}

std::map<std::string, void*> functions() {
  Driver d = memory_functions();
  add_device_functions(d);
  add_stream_functions(d);
  add_graph_functions(d);
  std::map<std::string, void*> all;
#define ATSC_FUNCTION(name) all[#name] = erase(d.name);
  ATSC_DRIVER_FUNCTIONS(ATSC_FUNCTION)
#undef ATSC_FUNCTION
  return all;
}

}  // namespace

extern "C" [[gnu::visibility("default")]] int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}

extern "C" [[gnu::visibility("default")]] int cuGetProcAddress_v2(const char* symbol,
                                                                  void** function, int, uint64_t,
                                                                  int*) {
  static const std::map<std::string, void*> all = functions();
  const auto found = all.find(symbol);
  if (found == all.end()) return 1;
  *function = found->second;
  return 0;
}
