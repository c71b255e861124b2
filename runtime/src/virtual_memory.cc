#include "virtual_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace atsc {
namespace {

constexpr uint64_t kDeviceTag = 0xA75C'0000'0000'0000, kMappedTag = 0xA75D'0000'0000'0000;
constexpr uint64_t kTagMask = 0xFFFF'0000'0000'0000;
constexpr uint64_t kAlignment = 256, kPage = 4096;

uint64_t round_up(uint64_t bytes, uint64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

[[noreturn]] void stop(const char* who, OperandName operand, const void* pointer,
                       const char* problem) {
  char index[16] = "";
  if (operand.index >= 0) std::snprintf(index, sizeof index, "[%d]", operand.index);
  std::fprintf(stderr, "virtual device: %s, operand %s%s: %p is %s\n", who, operand.name, index,
               pointer, problem);
  std::abort();
}

}  // namespace

VirtualMemory::VirtualMemory(uint64_t bytes)
    : arena_(platform::Mapping::anonymous(round_up(bytes, kAlignment), false, "a virtual device")),
      next_mapped_(kMappedTag + kPage) {}

DeviceAddress VirtualMemory::allocate(uint64_t bytes) {
  bytes = round_up(bytes, kAlignment);
  const std::lock_guard lock(mutex_);
  uint64_t begin = 0;  // of the first gap that is large enough
  for (const auto& [address, range] : device_) {
    const uint64_t used = address - kDeviceTag;
    if (used - begin >= bytes) break;
    begin = used + round_up(range.bytes, kAlignment);
  }
  if (arena_.bytes() - begin < bytes) return 0;
  std::byte* memory = arena_.data() + begin;
  std::memset(memory, 0xFF, bytes);
  device_.emplace(kDeviceTag + begin, Range{memory, bytes});
  return kDeviceTag + begin;
}

void VirtualMemory::free(DeviceAddress address) {
  const std::lock_guard lock(mutex_);
  device_.erase(address);
}

DeviceAddress VirtualMemory::map(void* memory, uint64_t bytes, uint64_t limit_bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > limit_bytes || mapped_bytes_ > limit_bytes - bytes) return 0;
  mapped_bytes_ += bytes;
  const DeviceAddress address = next_mapped_;
  next_mapped_ += round_up(bytes, kPage) + kPage;
  mapped_.emplace(address, Range{static_cast<std::byte*>(memory), bytes});
  return address;
}

void VirtualMemory::unmap(const void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(
      mapped_, [&](const auto& entry) { return entry.second.memory == memory; });
  if (found == mapped_.end()) return;
  mapped_bytes_ -= found->second.bytes;
  mapped_.erase(found);
}

std::byte* VirtualMemory::at(DeviceAddress address, uint64_t bytes, const char* who,
                             OperandName operand) const {
  const auto* pointer = as_operand(address);
  if (!is_handle(pointer)) stop(who, operand, pointer, "a host pointer, no device address");
  const std::lock_guard lock(mutex_);
  const auto& ranges = (address & kTagMask) == kDeviceTag ? device_ : mapped_;
  const auto next = ranges.upper_bound(address);
  if (next != ranges.begin()) {
    const auto& [begin, range] = *std::prev(next);
    const uint64_t offset = address - begin;
    if (offset < range.bytes) {
      if (bytes <= range.bytes - offset) return range.memory + offset;
      stop(who, operand, pointer, "in a range that ends before the operand does");
    }
  }
  stop(who, operand, pointer, "in no range: it was freed, or never allocated");
}

bool VirtualMemory::is_handle(const void* pointer) {
  const uint64_t tag = reinterpret_cast<uint64_t>(pointer) & kTagMask;
  return tag == kDeviceTag || tag == kMappedTag;
}

bool VirtualMemory::is_mapped(DeviceAddress address) { return (address & kTagMask) == kMappedTag; }

void VirtualMemory::check_host_pointer(const void* pointer, const char* who, OperandName operand) {
  if (is_handle(pointer)) stop(who, operand, pointer, "a device address, no host pointer");
}

}  // namespace atsc
