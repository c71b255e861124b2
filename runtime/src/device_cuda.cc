#include "device_cuda.h"

#include <algorithm>
#include <utility>

#include "cuda_device.h"
#include "cuda_rounds.h"
#include "failure.h"

namespace atsc {
namespace {

using platform::now_ns;

constexpr size_t kLogBytes = 4096;
constexpr int kClockTries = 20;

uint64_t difference(uint64_t before, uint64_t after) { return before > after ? before - after : 0; }

std::string first_line(const char* text) {
  const std::string all(text);
  return all.substr(0, all.find('\n'));
}

}  // namespace

CudaContext::CudaContext(int ordinal) : driver_(&cuda::driver()) {
  info_.driver_version = cuda::driver_version();
  int count = 0;
  check(driver_->cuDeviceGetCount(&count), "counting GPUs");
  if (ordinal < 0 || ordinal >= count) {
    fail(ATSC_DEVICE_ERROR, "there is no GPU %d: this machine has %d, numbered from 0", ordinal,
         count);
  }
  check(driver_->cuDeviceGet(&device_, ordinal), "opening the GPU");
  char name[256] = "", pci_bus_id[32] = "";
  check(driver_->cuDeviceGetName(name, sizeof name, device_), "asking for the GPU's name");
  driver_->cuDeviceGetPCIBusId(pci_bus_id, sizeof pci_bus_id, device_);
  info_.name = name;
  info_.sm = 10 * attribute(cuda::kSmMajor) + attribute(cuda::kSmMinor);
  info_.num_sms = attribute(cuda::kNumSms);
  can_register_ = attribute(cuda::kHostRegisterSupported) != 0;

  const uint64_t free_before = cuda::free_bytes_without_context(pci_bus_id);
  check(driver_->cuDevicePrimaryCtxRetain(&context_, device_), "opening the GPU");
  const uint64_t free_after = cuda::free_bytes_without_context(pci_bus_id);
  bytes_ = difference(free_before, free_after);
  const Current current(*this);
  size_t free = 0, total = 0;
  driver_->cuMemGetInfo(&free, &total);
  info_.free_bytes = free;
  info_.total_bytes = total;
}

CudaContext::CudaContext(CudaContext&& other) noexcept
    : driver_(other.driver_),
      device_(other.device_),
      context_(std::exchange(other.context_, nullptr)),
      info_(std::move(other.info_)),
      bytes_(other.bytes_),
      can_register_(other.can_register_) {}

CudaContext::~CudaContext() {
  if (context_ != nullptr) driver_->cuDevicePrimaryCtxRelease(device_);
}

int CudaContext::attribute(cuda::Attribute attribute) const {
  int value = 0;
  driver_->cuDeviceGetAttribute(&value, attribute, device_);
  return value;
}

void CudaContext::check(cuda::Result result, const char* doing) const {
  if (result == cuda::kSuccess) return;
  fail(ATSC_DEVICE_ERROR, "%s: %s failed with %s", info_.name.c_str(), doing,
       cuda::describe(result).c_str());
}

CudaDevice::CudaDevice(CudaContext context, uint64_t budget_bytes)
    : Device(budget_bytes), context_(std::move(context)) {
  info_ = context_.info();
  charge(Use::kContext, context_.bytes(), "the driver's own data");
  const CudaContext::Current current(context_);
  for (int branch = 0; branch < kNumBranches; ++branch) {
    // Stamps tell when something happened: they go before other kernels.
    const bool is_urgent = static_cast<Branch>(branch) == Branch::kStamps;
    streams_[branch] = make_stream(is_urgent ? cuda::kFirstPriority : 0);
  }
  side_stream_ = make_stream(0);
  page_ = allocate_host(1, "the device's clock");
  info_.has_stream_waits = graph_can_wait();
  info_.has_graphs = true;  // every driver that cuda_driver.cc accepts
}

CudaDevice::~CudaDevice() {
  launcher_.reset();
  page_ = {};
  drop_spare_controls();
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  for (cuda::Module module : modules_) driver.cuModuleUnload(module);
  for (cuda::Stream stream : streams_) driver.cuStreamDestroy(stream);
  driver.cuStreamDestroy(side_stream_);
}

cuda::Stream CudaDevice::make_stream(int priority) const {
  cuda::Stream stream = nullptr;
  const cuda::Driver& driver = context_.driver();
  context_.check(driver.cuStreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, priority),
                 "making a stream");
  return stream;
}

// Tries it, since no attribute tells: some drivers refuse.
bool CudaDevice::graph_can_wait() {
  const cuda::Driver& driver = context_.driver();
  cuda::Graph graph = nullptr;
  cuda::GraphExec exec = nullptr;
  cuda::GraphNode node = nullptr;
  cuda::MemOp op{};
  op.wait = {cuda::kOpWaitValue32, page_.address(), 0, cuda::kWaitUntilReached, 0};
  const cuda::MemOpNodeParams wait = {context_.handle(), 1, &op, 0};
  bool can = driver.cuGraphCreate(&graph, 0) == cuda::kSuccess &&
             driver.cuGraphAddBatchMemOpNode(&node, graph, nullptr, 0, &wait) == cuda::kSuccess &&
             driver.cuGraphInstantiate(&exec, graph, 0) == cuda::kSuccess &&
             driver.cuGraphLaunch(exec, side_stream_) == cuda::kSuccess;
  can = driver.cuStreamSynchronize(side_stream_) == cuda::kSuccess && can;
  if (exec != nullptr) driver.cuGraphExecDestroy(exec);
  if (graph != nullptr) driver.cuGraphDestroy(graph);
  return can;
}

uint64_t CudaDevice::free_bytes() const {
  const CudaContext::Current current(context_);
  size_t free = 0, total = 0;
  context_.check(context_.driver().cuMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

DeviceAddress CudaDevice::allocate_raw(uint64_t bytes) {
  const CudaContext::Current current(context_);
  cuda::DevicePtr address = 0;
  const cuda::Result result = context_.driver().cuMemAlloc(&address, bytes);
  if (result == cuda::kOutOfMemory) return 0;
  context_.check(result, "allocating memory");
  return address;
}

void CudaDevice::free_raw(DeviceAddress address, uint64_t) noexcept {
  const CudaContext::Current current(context_);
  context_.driver().cuMemFree(address);
}

DeviceAddress CudaDevice::pin_raw(void* memory, uint64_t bytes) {
  if (!context_.can_register()) return 0;
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  const unsigned flags = cuda::kHostRegisterPortable | cuda::kHostRegisterMapped;
  if (driver.cuMemHostRegister(memory, bytes, flags) != cuda::kSuccess) return 0;
  cuda::DevicePtr address = 0;
  if (driver.cuMemHostGetDevicePointer(&address, memory, 0) == cuda::kSuccess) return address;
  driver.cuMemHostUnregister(memory);
  return 0;
}

void CudaDevice::unpin_raw(void* memory, uint64_t) noexcept {
  const CudaContext::Current current(context_);
  context_.driver().cuMemHostUnregister(memory);
}

void CudaDevice::upload(DeviceAddress target, const void* source, uint64_t bytes) {
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  const auto* from = static_cast<const std::byte*>(source);
  for (const Piece& piece : pieces_of(source, bytes)) {
    context_.check(driver.cuMemcpyHtoDAsync(target + piece.offset, from + piece.offset, piece.bytes,
                                            side_stream_),
                   "copying to it");
  }
  context_.check(driver.cuStreamSynchronize(side_stream_), "copying to it");
}

void CudaDevice::download(void* target, DeviceAddress source, uint64_t bytes) {
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  auto* to = static_cast<std::byte*>(target);
  for (const Piece& piece : pieces_of(target, bytes)) {
    context_.check(driver.cuMemcpyDtoHAsync(to + piece.offset, source + piece.offset, piece.bytes,
                                            side_stream_),
                   "copying from it");
  }
  context_.check(driver.cuStreamSynchronize(side_stream_), "copying from it");
}

void CudaDevice::fill(DeviceAddress target, uint8_t byte, uint64_t bytes) {
  if (bytes == 0) return;
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  context_.check(driver.cuMemsetD8Async(target, byte, bytes, side_stream_), "filling memory");
  context_.check(driver.cuStreamSynchronize(side_stream_), "filling memory");
}

const ModuleEntry& choose_module(std::span<const ModuleEntry> modules, int index, int sm) {
  const ModuleEntry* best = nullptr;
  std::string compiled;
  for (const ModuleEntry& entry : modules) {
    if (entry.index != index) continue;
    compiled += (compiled.empty() ? "" : ", ") + std::to_string(entry.sm);
    if (entry.is_ptx) compiled += " (PTX)";
    const bool runs = entry.sm <= sm && (entry.is_ptx || entry.sm / 10 == sm / 10);
    if (!runs) continue;
    const auto rank = [](const ModuleEntry& e) { return std::pair(!e.is_ptx, e.sm); };
    if (best == nullptr || rank(entry) > rank(*best)) best = &entry;
  }
  if (best != nullptr) return *best;
  fail(ATSC_PLAN_ERROR,
       "the plan's GPU code is for compute capability %s, this GPU has %d: compile the model on "
       "this machine, or with a target that describes it",
       compiled.empty() ? "none" : compiled.c_str(), sm);
}

void CudaDevice::load_modules(std::span<const ModuleEntry> modules,
                              const std::function<std::string(const char*)>& read) {
  int count = 0;
  for (const ModuleEntry& entry : modules) count = std::max(count, entry.index + 1);
  const CudaContext::Current current(context_);
  for (int index = 0; index < count; ++index) {
    const ModuleEntry& entry = choose_module(modules, index, info_.sm);
    load_module(entry, read(entry.file));
    if (hand_off_ != nullptr) continue;
    cuda::Function found = nullptr;
    const cuda::Result result =
        context_.driver().cuModuleGetFunction(&found, modules_.back(), "atsc_hand_off");
    if (result == cuda::kNotFound) continue;
    context_.check(result, "looking for the hand-off kernel");
    load_function(found);
    hand_off_ = found;
  }
}

void CudaDevice::load_module(const ModuleEntry& entry, const std::string& image) {
  const uint64_t before = free_bytes();
  char log[kLogBytes] = "";
  int options[] = {cuda::kJitErrorLog, cuda::kJitErrorLogBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  cuda::Module module = nullptr;
  const cuda::Result result =
      context_.driver().cuModuleLoadDataEx(&module, image.c_str(), 2, options, values);
  if (result == cuda::kUnsupportedPtxVersion || result == cuda::kJitCompilerNotFound) {
    const int needed = cuda::cuda_version_for_ptx(image), version = info_.driver_version;
    fail(ATSC_DEVICE_ERROR,
         "%s is no binary for this GPU (compute capability %d), and its PTX needs a driver for "
         "CUDA %d.%d; this one is for %d.%d: update the driver, or compile the model on this "
         "machine",
         entry.file, info_.sm, needed / 1000, needed % 1000 / 10, version / 1000,
         version % 1000 / 10);
  }
  if (result == cuda::kOutOfMemory) {
    fail(ATSC_DEVICE_ERROR, "%s has no memory left for %s: close other programs that use it",
         info_.name.c_str(), entry.file);
  }
  if (result != cuda::kSuccess) {
    fail(ATSC_DEVICE_ERROR, "%s: loading %s failed with %s %s", info_.name.c_str(), entry.file,
         cuda::describe(result).c_str(), first_line(log).c_str());
  }
  modules_.push_back(module);
  charge(Use::kModules, difference(before, free_bytes()), "the kernels");
}

// Drivers load a function when it is first launched, unless told to before: memory would grow and
// the first round would stall.
void CudaDevice::load_function(cuda::Function function) const {
  const cuda::Driver& driver = context_.driver();
  int registers = 0;
  context_.check(driver.cuFuncLoad != nullptr
                     ? driver.cuFuncLoad(function)
                     : driver.cuFuncGetAttribute(&registers, cuda::kNumRegisters, function),
                 "loading a kernel");
}

KernelHandle CudaDevice::kernel_of(const NodeEntry& node, bool few_rows) {
  const DeviceKernel* table = few_rows ? node.device_few_rows : node.device_many_rows;
  if (table == nullptr) return {};
  const std::lock_guard lock(kernels_mutex_);
  std::unique_ptr<Kernel>& kernel = kernels_[table];
  if (kernel) return {table->symbol, kernel.get()};
  const CudaContext::Current current(context_);
  const cuda::Driver& driver = context_.driver();
  const uint64_t before = free_bytes();
  const auto module = static_cast<size_t>(table->module);
  cuda::Function function = nullptr;
  if (module >= modules_.size() ||
      driver.cuModuleGetFunction(&function, modules_[module], table->symbol) != cuda::kSuccess) {
    fail(ATSC_PLAN_ERROR, "module %d of the plan has no kernel %s: compile the model again",
         table->module, table->symbol);
  }
  if (table->shared_bytes > 0) {
    context_.check(
        driver.cuFuncSetAttribute(function, cuda::kMaxDynamicSharedBytes, table->shared_bytes),
        table->symbol);
  }
  load_function(function);
  charge(Use::kModules, difference(before, free_bytes()), "the kernels");
  kernel = std::make_unique<Kernel>(Kernel{table, function});
  return {table->symbol, kernel.get()};
}

uint64_t CudaDevice::scratch_bytes(KernelHandle kernel, const LaunchShape& shape) {
  LaunchShape here = shape;
  here.num_sms = info_.num_sms;
  return static_cast<const Kernel*>(kernel.entry)->table->scratch_bytes(here);
}

std::unique_ptr<Executable> CudaDevice::build(const CommandList& list, BuildMode mode) {
  return make_cuda_round(*this, list, mode_of(list, mode));
}

CudaLauncher& CudaDevice::launcher() {
  const std::lock_guard lock(launcher_mutex_);
  if (!launcher_) launcher_ = std::make_unique<CudaLauncher>(*this);
  return *launcher_;
}

// The try that took least time bounds the offset best.
int64_t CudaDevice::clock_offset_ns() {
  int64_t best_ns = INT64_MAX, offset = 0;
  for (int i = 0; i < kClockTries; ++i) {
    const int64_t begin = now_ns();
    const int64_t stamp = stamp_once();
    const int64_t end = now_ns();
    if (end - begin >= best_ns) continue;
    best_ns = end - begin;
    offset = begin + (end - begin) / 2 - stamp;
  }
  return offset;
}

int64_t CudaDevice::stamp_once() {
  if (hand_off_ == nullptr) fail(ATSC_INTERNAL_ERROR, "a device's clock was asked before modules");
  const CudaContext::Current current(context_);
  HandOffArgs args{};
  args.stamp_after = static_cast<long long*>(as_operand(page_.address() + 64));
  void* params[] = {&args};
  const cuda::Driver& driver = context_.driver();
  context_.check(
      driver.cuLaunchKernel(hand_off_, 1, 1, 1, 32, 1, 1, 0, side_stream_, params, nullptr),
      "reading its clock");
  context_.check(driver.cuStreamSynchronize(side_stream_), "reading its clock");
  return *reinterpret_cast<const volatile int64_t*>(page_.host() + 64);
}

std::unique_ptr<Device> open_cuda_device(const CudaOptions& options) {
  CudaContext context(options.ordinal);
  const uint64_t budget = options.budget_bytes != 0
                              ? options.budget_bytes
                              : context.bytes() + context.info().free_bytes;
  return std::make_unique<CudaDevice>(std::move(context), budget);
}

}  // namespace atsc
