// What of a plan lies where: device memory, and host memory that the device can read.
//
//     device    units of the placement and shared tables | KV caches of the attention nodes that run
//               there, for every session | an arena with the host's offsets, logits, numbers of the
//               round, kernels' scratch | slots for promoted units
//     host      weights.bin at its own offsets, but only the units that the host reads are in memory
//               (the rest costs nothing), pinned in pieces so that they can be promoted; what retreats
//               from the device is read when it first does
//
// A node runs on the device if its unit lives there, its kernels exist there and all its weights are
// there; attention also needs its cache there. Which caches have a place there is decided once; while
// attention retreats to the host, the session's own memory holds the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device.h"
#include "pool.h"
#include "rungs.h"
#include "tables.h"

namespace atsc {

inline constexpr uint64_t kNowhere = ~0ull;

// Which nodes, units and caches belong to the device, and offsets in its regions. No memory yet.
struct DeviceShare {
  DeviceShare(const Plan& plan, Device& device, const Placement& placement);

  KernelHandle kernel(int node, bool few_rows) const {
    return few_rows ? few_kernels[node] : many_kernels[node];
  }
  bool has_kernels(int node) const { return few_kernels[node].entry && many_kernels[node].entry; }
  uint64_t scratch_of(KernelHandle kernel, int64_t kv_capacity) const;  // kNowhere: needs none
  // What a unit takes in the region of weights.
  static uint64_t room_of(const UnitEntry& unit);
  // The unit whose range in weights.bin holds an offset.
  int unit_at(uint64_t offset) const;

  std::vector<KernelHandle> few_kernels, many_kernels;  // of nodes; null: host only
  std::vector<uint8_t> node_on_device;
  std::vector<uint8_t> cache_on_device;
  std::vector<uint8_t> unit_on_device, unit_on_host;  // whether its weights are needed there

  std::vector<uint64_t> unit_offsets;   // in the region of weights
  uint64_t weights_bytes = 0;
  std::vector<uint64_t> cache_offsets;  // of K, in a session's part; V follows
  std::vector<uint64_t> cache_bytes;    // of K or of V
  uint64_t session_bytes = 0;
  uint64_t logit_rows_offset = 0, token_ids_offset = 0, round_bytes = 0;  // after RoundParams
  uint64_t logits_bytes = 0, scratch_bytes = 0;

 private:
  void find_kernels(Device& device);
  void assign(const Placement& placement);
  bool reaches_weights(const NodeEntry& node) const;
  void lay_out(Device& device);
  void add_scratch(Device& device, int node, bool few_rows, int num_sms);

  struct Scratch {
    const void* entry;
    int64_t kv_capacity;
    uint64_t offset, bytes;
  };
  const Plan& plan_;
  std::vector<int> by_offset_;  // units, ascending
  std::vector<Scratch> scratch_;
};

// The device memory that a placement takes, the driver's and the modules' included.
uint64_t device_bytes(const Plan& plan, Device& device, const Placement& placement, int sessions);

// The part of device and pinned memory that belongs to one session at a time.
struct SessionPlace {
  struct Cache {
    DeviceAddress k = 0, v = 0;  // 0: it has no place on the device
    // Its tokens are on the host at present. Only the session's own rounds change it, between two.
    bool has_retreated = false;
  };
  int index = 0;
  Device* device = nullptr;
  std::vector<Cache> caches;  // one a cache of the plan
  HostRange logits;           // [max_logit_rows][vocab_size]
};

// A host-resident unit in the region of the device's weights, where units that retreat had theirs.
struct Advance {
  int unit;
  uint64_t offset;

  bool operator==(const Advance&) const = default;
};

class Residency {
 public:
  // Where the host's part lies; must outlive the residency.
  struct HostMemory {
    std::byte* weights;  // anonymous memory for all of weights.bin
    std::byte* arena;    // page-aligned
    uint64_t reserve_bytes = 256 << 20;  // of memory that are left when units retreat
  };

  // Takes the memory, reads, checks and uploads weights.bin, and pins the host's arena and what can
  // be promoted. Raises Failure: not enough memory, a damaged file, or the arena cannot be pinned.
  Residency(const Plan& plan, Device& device, const Placement& placement, int sessions,
            const HostMemory& host, const std::string& weights_path, Pool& pool);

  Device& device() const { return device_; }
  const DeviceShare& share() const { return share_; }
  const std::byte* weights() const { return weights_; }
  const std::string& notice() const { return notice_; }  // what could not be pinned; may be empty

  int num_slots() const { return num_slots_; }
  uint64_t slot_bytes() const { return slot_bytes_; }
  DeviceAddress slot(int index) const { return slots_.address() + slot_bytes_ * index; }
  DeviceAddress unit(int index) const { return place(share_.unit_offsets[index]); }
  DeviceAddress place(uint64_t offset) const { return units_.address() + offset; }
  DeviceAddress arena() const { return arena_.address(); }
  DeviceAddress round() const { return round_.address(); }
  DeviceAddress logit_rows() const { return round_.address() + share_.logit_rows_offset; }
  DeviceAddress token_ids() const { return round_.address() + share_.token_ids_offset; }
  DeviceAddress logits() const { return logits_.address(); }
  DeviceAddress scratch(KernelHandle kernel, int64_t kv_capacity) const;  // 0: none

  // Reads the weights of device-resident units into the host's part, where they stay, so that the
  // host can compute these units. One thread at a time, beside rounds that do not compute them.
  // Returns the bytes that were read. Raises Failure: not enough memory, a damaged file.
  uint64_t hold_on_host(std::span<const int> units);

  // Puts these units, and no others that are strangers there, into the region of the device's weights:
  // between two rounds, of which the next one has them as its advances. Whose place gets free again is
  // restored from the host's part; so hold there whatever retreats. False: there was nothing to do.
  bool exchange(std::span<const Advance> advances);

  // The host's arena as the device sees it: calls use(address, offset, bytes), mostly once.
  template <class Use>
  void host_arena(uint64_t offset, uint64_t bytes, Use&& use) const {
    while (bytes > 0) {
      const uint64_t inside = offset % kMaxPinnedBytes;
      const uint64_t part = std::min(bytes, kMaxPinnedBytes - inside);
      use(host_arena_[offset / kMaxPinnedBytes].address() + inside, offset, part);
      offset += part;
      bytes -= part;
    }
  }

  // Host side of the numbers of a round: RoundParams, logit rows and token ids at the same offsets.
  const HostRange& staging() const { return staging_; }

  int num_places() const { return static_cast<int>(places_.size()); }
  SessionPlace* take_place();
  void give_back(SessionPlace* place);

 private:
  void read_units(Pool& pool);
  void read_unit(int unit);
  void read_to_host(const UnitEntry& entry);
  std::vector<int> missing_units(std::span<const int> units) const;
  bool is_taken(int resident, std::span<const Advance> advances) const;
  void pin_arena(std::byte* arena);
  void pin_units();
  void make_places(int sessions);

  const Plan& plan_;
  Device& device_;
  const DeviceShare share_;
  std::byte* weights_;
  const uint64_t reserve_bytes_;
  const std::string weights_path_;
  const platform::File weights_file_;  // open, for the folder may be exchanged for another plan's
  std::vector<uint8_t> is_on_host_;    // a unit: its weights are in the host's part
  std::vector<Advance> advanced_;      // what has taken the place of residents
  bool is_torn_ = false;               // an exchange failed: what lies there is not known
  std::vector<HostRange> pinned_;
  std::string notice_;
  DeviceRange units_, caches_, arena_, round_, logits_, scratch_, slots_;
  HostRange staging_;
  std::vector<HostRange> host_arena_;
  int num_slots_;
  uint64_t slot_bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<SessionPlace>> places_;
  std::vector<SessionPlace*> free_places_;
};

}  // namespace atsc
