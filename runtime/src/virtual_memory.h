// The virtual device's memory: an arena, and handles in place of addresses. A handle has bits set
// that no pointer of a process has, so each side can tell what it was given.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "device.h"
#include "platform.h"

namespace atsc {

// Names an operand in messages: "scratch", or with an index "in[3]".
struct OperandName {
  OperandName(const char* what) : name(what) {}
  OperandName(const char* what, int number) : name(what), index(number) {}

  const char* name;
  int index = -1;
};

class VirtualMemory {
 public:
  explicit VirtualMemory(uint64_t bytes);

  // Filled with 0xFF; 0: no gap is large enough.
  DeviceAddress allocate(uint64_t bytes);
  void free(DeviceAddress address);

  // Gives mapped host memory a handle; 0: more than `limit_bytes` would be mapped.
  DeviceAddress map(void* memory, uint64_t bytes, uint64_t limit_bytes);
  void unmap(const void* memory);

  // Where a range of device or mapped host memory lies. Ends the process with a line that names
  // `who` (a kernel or "copy") and `operand` if it is none, or not all of it.
  std::byte* at(DeviceAddress address, uint64_t bytes, const char* who, OperandName operand) const;

  static bool is_handle(const void* pointer);
  static bool is_mapped(DeviceAddress address);  // host memory

  // Ends the process if `pointer` is a handle.
  static void check_host_pointer(const void* pointer, const char* who, OperandName operand);

 private:
  struct Range {
    std::byte* memory;
    uint64_t bytes;
  };

  mutable std::mutex mutex_;
  platform::Mapping arena_;
  std::map<DeviceAddress, Range> device_;  // by handle
  std::map<DeviceAddress, Range> mapped_;
  DeviceAddress next_mapped_;
  uint64_t mapped_bytes_ = 0;
};

}  // namespace atsc
