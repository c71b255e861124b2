#include "rungs.h"

#include <algorithm>

#include "device_cuda.h"
#include "failure.h"
#include "residency.h"

namespace atsc {
namespace {

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::string format(const char* pattern, auto... values) {
  char text[ATSC_MESSAGE_BYTES];
  std::snprintf(text, sizeof text, pattern, values...);
  return text;
}

uint64_t budget_of(const Plan& plan, const DeviceWishes& wishes) {
  return wishes.vram_bytes > 0 ? wishes.vram_bytes : plan.device.budget_bytes;
}

void open_virtual(const Plan& plan, const DeviceWishes& wishes, OpenedDevice& opened) {
  VirtualOptions options = wishes.virtual_device;
  options.budget_bytes = budget_of(plan, wishes);
  if (options.budget_bytes <= wishes.occupied_bytes + options.context_bytes) {
    fail(ATSC_DEVICE_ERROR, "the virtual device has no memory left");
  }
  options.budget_bytes -= wishes.occupied_bytes;
  auto device = open_virtual_device(options);
  opened.controls = device.get();
  opened.device = std::move(device);
}

void open_cuda(const Plan& plan, const DeviceWishes& wishes, OpenedDevice& opened) {
  const std::string kernels = wishes.directory + "/";
  opened.device = open_cuda_device({wishes.ordinal, budget_of(plan, wishes)});
  const DeviceEntry& entry = plan.device;
  opened.device->load_modules({entry.modules, static_cast<size_t>(entry.num_modules)},
                              [&](const char* name) {
                                const auto file = platform::File::open_to_read(kernels + name);
                                std::string content(file.bytes(), '\0');
                                file.read_at(0, content.data(), content.size());
                                return content;
                              });
}

Placement nothing_on_device(const Plan& plan) {
  Placement placement;
  placement.on_device.resize(static_cast<size_t>(plan.num_units));
  return placement;
}

// A rung, with what it needs: as the compiler predicted it, or more if more sessions are wanted.
Placement placement_of(const Plan& plan, int rung, Device& device, int sessions) {
  Placement placement;
  placement.rung = rung;
  const RungEntry& entry = plan.device.rungs[rung];
  placement.on_device.assign(entry.on_device, entry.on_device + plan.num_units);
  placement.slot_bytes = entry.slot_bytes;
  placement.num_slots = entry.num_slots;
  placement.required_bytes =
      std::max(entry.required_bytes,
               device_bytes(plan, device, placement, sessions) + plan.device.headroom_bytes);
  return placement;
}

// A rung's requirement counts the driver's context and the head-room. What is free no longer
// holds the context.
uint64_t available_bytes(const Device& device) {
  const DeviceMemory memory = device.memory();
  return std::min(memory.budget, device.info().free_bytes + memory.context);
}

void choose(const Plan& plan, const DeviceWishes& wishes, OpenedDevice& opened) {
  const int num_rungs = plan.device.num_rungs;
  const uint64_t available = available_bytes(*opened.device);
  uint64_t wanted = 0;
  for (int rung = num_rungs - 1; rung >= 0; --rung) {
    opened.placement = placement_of(plan, rung, *opened.device, wishes.sessions);
    if (rung == num_rungs - 1) wanted = opened.placement.required_bytes;
    if (opened.placement.required_bytes > available) continue;
    if (rung == num_rungs - 1) return;
    opened.notice = format("%s has %.1f MiB for this plan instead of %.1f: using placement %d of %d, "
                           "which is slower; free device memory, or compile for less",
                           opened.device->info().name.c_str(), mib(available), mib(wanted), rung + 1,
                           num_rungs);
    if (wishes.strict) fail(ATSC_DEVICE_ERROR, "%s", opened.notice.c_str());
    return;
  }
  fail(ATSC_DEVICE_ERROR, "%s has %.1f MiB for this plan, and its smallest placement needs %.1f: "
                          "free device memory, or compile for less",
       opened.device->info().name.c_str(), mib(available), mib(opened.placement.required_bytes));
}

// The given units, with the largest slots of any rung.
void override_units(const Plan& plan, const DeviceWishes& wishes, OpenedDevice& opened) {
  Placement& placement = opened.placement;
  placement.on_device = wishes.on_device;
  for (int rung = 0; rung < plan.device.num_rungs; ++rung) {
    const RungEntry& entry = plan.device.rungs[rung];
    if (entry.slot_bytes <= placement.slot_bytes) continue;
    placement.slot_bytes = entry.slot_bytes;
    placement.num_slots = entry.num_slots;
  }
  placement.required_bytes = device_bytes(plan, *opened.device, placement, wishes.sessions) +
                             plan.device.headroom_bytes;
}

}  // namespace

OpenedDevice open_device(const Plan& plan, const DeviceWishes& wishes) {
  OpenedDevice opened;
  opened.placement = nothing_on_device(plan);
  if (plan.device.kind == DeviceKind::kNone || !wishes.use_device) return opened;
  try {
    if (plan.device.kind == DeviceKind::kVirtual) open_virtual(plan, wishes, opened);
    if (plan.device.kind == DeviceKind::kCuda) open_cuda(plan, wishes, opened);
    if (plan.device.num_rungs > 0) choose(plan, wishes, opened);
  } catch (const Failure& failure) {
    if (wishes.strict || failure.status != ATSC_DEVICE_ERROR) throw;
    opened = {};
    opened.placement = nothing_on_device(plan);
    opened.notice = std::string(failure.what()) + kOnCpu;
    return opened;
  }
  if (!wishes.on_device.empty() && plan.device.num_rungs > 0) override_units(plan, wishes, opened);
  return opened;
}

}  // namespace atsc
