// Opening the plan's device, and the choice among the plan's rungs when it is opened.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "device_virtual.h"
#include "tables.h"

namespace atsc {

inline constexpr int kNoRung = -1;
inline constexpr const char* kOnCpu = "; running on the CPU alone";  // how such a notice ends

struct DeviceWishes {
  uint64_t vram_bytes = 0;     // 0: what the plan was compiled for
  int ordinal = 0;             // of several GPUs
  bool use_device = true;      // false: everything on the host
  int sessions = 1;
  bool strict = false;         // fail rather than run slower than planned
  std::string directory;       // of the plan, for its device binaries
  VirtualOptions virtual_device;
  uint64_t occupied_bytes = 0;       // of the virtual device, by others
  std::vector<uint8_t> on_device{};  // a byte a unit instead of the rung's; empty: the rung's
};

// Which units live on the device, and what promotions may use.
struct Placement {
  int rung = kNoRung;
  std::vector<uint8_t> on_device;  // a byte a unit
  uint64_t slot_bytes = 0;         // of each slot
  int num_slots = 0;
  uint64_t required_bytes = 0;     // predicted, head-room included
};

struct OpenedDevice {
  std::unique_ptr<Device> device;          // null: everything runs on the host
  VirtualControls* controls = nullptr;     // of a virtual device
  Placement placement;
  std::string notice;  // one line for a person where this is less than was planned
};

// Raises Failure(ATSC_DEVICE_ERROR) under `strict`, where less than planned is to be had.
OpenedDevice open_device(const Plan& plan, const DeviceWishes& wishes);

}  // namespace atsc
