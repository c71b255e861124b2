// The virtual device: device.h in host memory, to test every path of the executor without a GPU.
//
// Its memory is an arena whose addresses are handles, no pointers: each use translates them and
// aborts the process with one line (kernel and operand) if a host pointer, a freed range or an
// address past its range's end got there; a CPU that reads through one crashes. Branches are
// threads, copies take the time that the link's rate gives them, and a link carries one copy at a
// time. Kernels are the plan's CPU kernels on one thread of their own; RoundParams are read when a
// kernel starts, as on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device.h"

namespace atsc {

struct VirtualOptions {
  uint64_t budget_bytes = 64 << 20;
  uint64_t context_bytes = 0;           // counted as if a driver held it
  uint64_t graph_bytes = 0;             // counted for each graph
  uint64_t pinnable_bytes = ~0ull;      // the system refuses to pin more
  uint32_t isa_levels = 1;              // bit i: kernels of level i may be used
  bool has_graphs = true;               // false: rounds are launches, as on a poor driver
  double link_bytes_per_s = 0;          // each direction; 0: as fast as memory. Half if not pinned
};

// Changes how fast the device is, from any thread and while rounds run. Times are of the wall
// clock: a command that is done earlier waits.
class VirtualControls {
 public:
  virtual ~VirtualControls() = default;
  virtual void set_link_rate(double to_device_bytes_per_s, double to_host_bytes_per_s) = 0;
  // Least time of a launch whose kernel's name has this prefix; 0 takes it back.
  virtual void set_kernel_ns(const std::string& prefix, int64_t ns) = 0;
  // Multiplies the time of each launch, that of set_kernel_ns too; at least 1.
  virtual void set_slowdown(double factor) = 0;
  // Multiplies the time of each segment that the host computes beside the device; at least 1.
  virtual void set_host_slowdown(double factor) = 0;
  // From the rise of a flag, or the end of a copy, to the end of the compute branch's wait for it.
  virtual void set_wake_ns(int64_t ns) = 0;
  // The next launch of such a kernel faults, as if it had read outside of memory.
  virtual void fail_kernel(const std::string& prefix) = 0;
  // The upload after so many others fails; nothing else does.
  virtual void fail_upload(int after) = 0;
};

class VirtualDevice : public Device, public VirtualControls {
 protected:
  using Device::Device;
};

std::unique_ptr<VirtualDevice> open_virtual_device(const VirtualOptions& options);

}  // namespace atsc
