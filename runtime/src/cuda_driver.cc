#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "failure.h"

namespace atsc::cuda {
namespace {

using GetProcAddress = Result (*)(const char* symbol, void** function, int version, uint64_t flags,
                                  int* status);
using GetVersion = Result (*)(int* version);

constexpr uint64_t kLegacyStream = 1;  // not the stream of each thread

[[noreturn]] void fail_for_old_driver(int version) {
  fail(ATSC_DEVICE_ERROR,
       "the NVIDIA driver supports CUDA %d.%d, but atsc needs 12.0 or later: install driver 525.60 "
       "or later",
       version / 1000, version % 1000 / 10);
}

struct Loader {
  GetProcAddress get;
  int version;

  // dlsym would find the oldest version of a function; this asks for that of kApiVersion.
  template <class Function>
  void load(const char* name, Function& function) const {
    const bool is_optional = std::strcmp(name, "cuFuncLoad") == 0;
    void* found = nullptr;
    int status = 0;
    const int since = is_optional ? 12040 : kApiVersion;
    if (get(name, &found, since, kLegacyStream, &status) != kSuccess) found = nullptr;
    if (found == nullptr && !is_optional) {
      fail(ATSC_DEVICE_ERROR, "the NVIDIA driver (CUDA %d.%d) has no %s: install it anew",
           version / 1000, version % 1000 / 10, name);
    }
    std::memcpy(&function, &found, sizeof found);
  }
};

int version_of(void* library) {
  const auto get = reinterpret_cast<GetVersion>(dlsym(library, "cuDriverGetVersion"));
  int version = 0;
  if (get == nullptr || get(&version) != kSuccess) return 0;
  return version;
}

Driver load_functions(const Loader& loader) {
  Driver d{};
#define ATSC_LOAD(name) loader.load(#name, d.name);
  ATSC_DRIVER_FUNCTIONS(ATSC_LOAD)
#undef ATSC_LOAD
  return d;
}

Driver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail(ATSC_DEVICE_ERROR,
         "there is no NVIDIA driver: install one (%s)", dlerror());
  }
  const int version = version_of(library);
  if (version < kApiVersion) fail_for_old_driver(version);
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) fail_for_old_driver(version);
  return load_functions({get, version});
}

// A driver without a GPU refuses here; asked again each time, since a GPU may come later.
void initialise(const Driver& functions) {
  const Result result = functions.cuInit(0);
  int count = 0;
  if (result == kSuccess) functions.cuDeviceGetCount(&count);
  if (result == kNoDevice || (result == kSuccess && count == 0)) {
    fail(ATSC_DEVICE_ERROR,
         "the NVIDIA driver finds no GPU (is one hidden by CUDA_VISIBLE_DEVICES?): run on the CPU");
  }
  if (result != kSuccess) {
    const char* name = nullptr;
    functions.cuGetErrorName(result, &name);
    fail(ATSC_DEVICE_ERROR,
         "the NVIDIA driver does not start: error %d (%s); nvidia-smi may say why", result,
         name ? name : "unknown");
  }
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load_driver();
  initialise(loaded);
  return loaded;
}

int driver_version() {
  int version = 0;
  driver().cuDriverGetVersion(&version);
  return version;
}

std::string describe(Result result) {
  const Driver& functions = driver();
  const char *name = nullptr, *text = nullptr;
  functions.cuGetErrorName(result, &name);
  functions.cuGetErrorString(result, &text);
  if (name == nullptr || text == nullptr) return "error " + std::to_string(result);
  return std::string(name) + " (" + text + ")";
}

uint64_t free_bytes_without_context(const char* pci_bus_id) {
  struct Memory {
    unsigned long long total, free, used;
  };
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto end = reinterpret_cast<int (*)()>(dlsym(library, "nvmlShutdown"));
  const auto find = reinterpret_cast<int (*)(const char*, void**)>(
      dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
  const auto measure =
      reinterpret_cast<int (*)(void*, Memory*)>(dlsym(library, "nvmlDeviceGetMemoryInfo"));
  Memory memory{};
  if (init != nullptr && end != nullptr && find != nullptr && measure != nullptr && init() == 0) {
    void* device = nullptr;
    if (find(pci_bus_id, &device) != 0 || measure(device, &memory) != 0) memory.free = 0;
    end();
  }
  dlclose(library);
  return memory.free;
}

int cuda_version_for_ptx(const std::string& ptx) {
  const size_t at = ptx.find(".version ");
  int major = 0, minor = 0;
  if (at == std::string::npos ||
      std::sscanf(ptx.c_str() + at, ".version %d.%d", &major, &minor) != 2) {
    return 0;
  }
  // PTX 7.x, 8.x, 9.x came with CUDA 11, 12, 13; minors agree but for one that 12.6 did not raise.
  const bool after_gap = major == 8 && minor >= 6;
  return (major + 4) * 1000 + (minor + (after_gap ? 1 : 0)) * 10;
}

}  // namespace atsc::cuda
