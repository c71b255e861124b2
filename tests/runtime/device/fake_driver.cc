// A libcuda.so.1 that is too old (FAKE_VERSION below 12000), or finds no GPU: every function that
// it hands out fails as cuInit does then.
#include <cstdint>

extern "C" int cuDriverGetVersion(int* version) {
  *version = FAKE_VERSION;
  return 0;
}

static int no_device() { return 100; }

extern "C" int cuGetProcAddress_v2(const char*, void** function, int, uint64_t, int*) {
  *function = reinterpret_cast<void*>(no_device);
  return 0;
}
