// The kernel that device_test.cc runs on a GPU; there it has the same on the CPU.
//   y u32 [rows][256] = 3 * x u32 [rows][256] + w u32 [256]
#include "device_kernel.h"

extern "C" __global__ void test_affine(atsc::DeviceArgs args) {
  const int row = blockIdx.x, i = threadIdx.x;
  if (row >= args.round->rows[args.rows_of]) return;
  const auto* x = static_cast<const unsigned*>(args.in[0]) + row * 256;
  const auto* w = static_cast<const unsigned*>(args.in[1]);
  static_cast<unsigned*>(args.out[0])[row * 256 + i] = 3 * x[i] + w[i];
}
