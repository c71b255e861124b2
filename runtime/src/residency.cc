#include "residency.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "failure.h"
#include "weights.h"

namespace atsc {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kPinnedReserve = 64 << 10;  // left to rounds where the system refuses to pin more

uint64_t round_up(uint64_t bytes, uint64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

DeviceShare::DeviceShare(const Plan& plan, Device& device, const Placement& placement)
    : plan_(plan) {
  for (int unit = 0; unit < plan.num_units; ++unit) {
    if (plan.units[unit].bytes > 0) by_offset_.push_back(unit);
  }
  std::ranges::sort(by_offset_, {}, [&](int unit) { return plan.units[unit].offset; });
  find_kernels(device);
  assign(placement);
  lay_out(device);
}

void DeviceShare::find_kernels(Device& device) {
  for (int node = 0; node < plan_.num_nodes; ++node) {
    few_kernels.push_back(device.kernel_of(plan_.nodes[node], true));
    many_kernels.push_back(device.kernel_of(plan_.nodes[node], false));
  }
}

uint64_t DeviceShare::room_of(const UnitEntry& unit) { return round_up(unit.bytes, kAlignment); }

int DeviceShare::unit_at(uint64_t offset) const {
  const auto after = std::ranges::upper_bound(by_offset_, offset, {}, [&](int unit) {
    return plan_.units[unit].offset;
  });
  if (after == by_offset_.begin()) fail(ATSC_PLAN_ERROR, "a weight at %llu belongs to no unit",
                                        static_cast<unsigned long long>(offset));
  return *std::prev(after);
}

bool DeviceShare::reaches_weights(const NodeEntry& node) const {
  return std::ranges::all_of(node.in, [&](const Operand& in) {
    return in.kind != OperandKind::kWeight || unit_on_device[unit_at(in.index)];
  });
}

void DeviceShare::assign(const Placement& placement) {
  unit_on_device = placement.on_device;
  for (int unit = 0; unit < plan_.num_units; ++unit) {
    if (plan_.units[unit].kind == UnitKind::kShared) unit_on_device[unit] = 1;
    if (plan_.units[unit].kind == UnitKind::kHost) unit_on_device[unit] = 0;
  }
  unit_on_host.resize(unit_on_device.size());
  cache_on_device.resize(static_cast<size_t>(plan_.num_caches));
  for (int index = 0; index < plan_.num_nodes; ++index) {
    const NodeEntry& node = plan_.nodes[index];
    const bool here = unit_on_device[node.unit] && has_kernels(index) && reaches_weights(node);
    node_on_device.push_back(here);
    if (node.layer >= 0) cache_on_device[node.layer] = here;
    if (here) continue;
    for (const Operand& in : node.in) {
      if (in.kind == OperandKind::kWeight) unit_on_host[unit_at(in.index)] = 1;
    }
  }
}

void DeviceShare::lay_out(Device& device) {
  unit_offsets.assign(unit_on_device.size(), kNowhere);
  // What may give its place to others lies together and in order: nothing small that stays splits the room.
  for (const bool may_move : {false, true}) {
    for (int unit = 0; unit < plan_.num_units; ++unit) {
      if (!unit_on_device[unit] || (plan_.units[unit].kind == UnitKind::kWeights) != may_move) continue;
      unit_offsets[unit] = weights_bytes;
      weights_bytes += room_of(plan_.units[unit]);
    }
  }
  for (int index = 0; index < plan_.num_caches; ++index) {
    const CacheEntry& cache = plan_.caches[index];
    const auto heads = static_cast<uint64_t>(cache.kv_heads) * cache.head_size;
    cache_bytes.push_back(round_up(sizeof(uint16_t) * heads * cache.capacity, kAlignment));
    cache_offsets.push_back(cache_on_device[index] ? session_bytes : kNowhere);
    if (cache_on_device[index]) session_bytes += 2 * cache_bytes.back();
  }
  logit_rows_offset = round_up(sizeof(RoundParams), kAlignment);
  token_ids_offset =
      logit_rows_offset + round_up(sizeof(int32_t) * plan_.max_logit_rows, kAlignment);
  round_bytes = token_ids_offset + round_up(sizeof(int32_t) * plan_.chunk, kAlignment);
  logits_bytes = sizeof(float) * plan_.vocab_size * static_cast<uint64_t>(plan_.max_logit_rows);
  const int num_sms = device.info().num_sms;
  for (const bool few_rows : {false, true}) {  // a kernel of both needs what many rows need
    for (int node = 0; node < plan_.num_nodes; ++node) {
      if (has_kernels(node)) add_scratch(device, node, few_rows, num_sms);
    }
  }
}

// What a kernel counts in its scratch lies where its capacity puts it: share only between equals.
void DeviceShare::add_scratch(Device& device, int node, bool few_rows, int num_sms) {
  const KernelHandle handle = kernel(node, few_rows);
  const int layer = plan_.nodes[node].layer;
  const int64_t capacity = layer >= 0 ? plan_.caches[layer].capacity : 0;
  const int64_t most = std::max<int64_t>({kFewRows, plan_.chunk, plan_.max_logit_rows});
  const int64_t rows = few_rows ? kFewRows : most;
  const uint64_t bytes = device.scratch_bytes(handle, {rows, capacity, num_sms});
  if (bytes == 0 || scratch_of(handle, capacity) != kNowhere) return;
  scratch_.push_back({handle.entry, capacity, scratch_bytes, bytes});
  scratch_bytes += round_up(bytes, kAlignment);
}

uint64_t DeviceShare::scratch_of(KernelHandle kernel, int64_t kv_capacity) const {
  for (const Scratch& known : scratch_) {
    if (known.entry == kernel.entry && known.kv_capacity == kv_capacity) return known.offset;
  }
  return kNowhere;
}

uint64_t device_bytes(const Plan& plan, Device& device, const Placement& placement, int sessions) {
  const DeviceShare share(plan, device, placement);
  const DeviceMemory memory = device.memory();
  return memory.context + memory.modules + share.weights_bytes + share.session_bytes * sessions +
         plan.arena_bytes + share.round_bytes + share.logits_bytes + share.scratch_bytes +
         placement.slot_bytes * placement.num_slots;
}

Residency::Residency(const Plan& plan, Device& device, const Placement& placement, int sessions,
                     const HostMemory& host, const std::string& weights_path, Pool& pool)
    : plan_(plan),
      device_(device),
      share_(plan, device, placement),
      weights_(host.weights),
      reserve_bytes_(host.reserve_bytes),
      weights_path_(weights_path),
      weights_file_(open_weights(plan, weights_path)),
      is_on_host_(share_.unit_on_host),
      units_(device.allocate(share_.weights_bytes, "weights")),
      caches_(device.allocate(share_.session_bytes * static_cast<uint64_t>(sessions), "KV caches")),
      arena_(device.allocate(plan.arena_bytes, "activations")),
      round_(device.allocate(share_.round_bytes, "the numbers of a round")),
      logits_(device.allocate(share_.logits_bytes, "logits")),
      scratch_(device.allocate(share_.scratch_bytes, "kernel scratch")),
      slots_(device.allocate(placement.slot_bytes * placement.num_slots, "slots")),
      staging_(device.allocate_host(share_.round_bytes, "the numbers of a round")),
      num_slots_(placement.slot_bytes > 0 ? placement.num_slots : 0),
      slot_bytes_(placement.slot_bytes / kAlignment * kAlignment) {
  if (caches_.bytes() > 0) device.fill(caches_.address(), 0, caches_.bytes());
  if (scratch_.bytes() > 0) device.fill(scratch_.address(), 0, scratch_.bytes());
  make_places(sessions);
  pin_arena(host.arena);
  read_units(pool);
  pin_units();
}

void Residency::pin_arena(std::byte* arena) {
  for (uint64_t at = 0; at < plan_.arena_bytes; at += kMaxPinnedBytes) {
    const uint64_t bytes = std::min(kMaxPinnedBytes, round_up(plan_.arena_bytes - at, kPage));
    std::optional<HostRange> range = device_.pin(arena + at, bytes);
    if (!range) {
      fail(ATSC_DEVICE_ERROR, "the system refuses to pin %.1f MiB of memory for activations: raise "
                              "the limit on locked memory (ulimit -l)",
           static_cast<double>(bytes) / (1 << 20));
    }
    host_arena_.push_back(std::move(*range));
  }
}

void Residency::read_units(Pool& pool) {
  std::atomic<int> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  pool.run([&](int) {
    for (int unit = next.fetch_add(1); unit < plan_.num_units; unit = next.fetch_add(1)) {
      try {
        read_unit(unit);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
        next = plan_.num_units;
      }
    }
  });
  if (failure) std::rethrow_exception(failure);
}

void Residency::read_unit(int unit) {
  const UnitEntry& entry = plan_.units[unit];
  if (share_.unit_on_host[unit]) {
    read_to_host(entry);
    if (share_.unit_on_device[unit]) {
      device_.upload(this->unit(unit), weights_ + entry.offset, entry.bytes);
    }
  } else if (share_.unit_on_device[unit]) {
    std::vector<std::byte> piece(std::min(entry.bytes, kReadBytes));
    read_checked(entry, weights_file_, weights_path_, [&](uint64_t) { return piece.data(); },
                 [&](uint64_t at, uint64_t bytes) {
                   device_.upload(this->unit(unit) + at, piece.data(), bytes);
                 });
  }
}

void Residency::read_to_host(const UnitEntry& entry) {
  std::byte* const target = weights_ + entry.offset;
  read_checked(entry, weights_file_, weights_path_, [&](uint64_t at) { return target + at; },
               [](auto...) {});
}

// Units with weights that nodes of `units` read and that are not on the host; ascending.
std::vector<int> Residency::missing_units(std::span<const int> units) const {
  std::vector<bool> computes(static_cast<size_t>(plan_.num_units));
  for (const int unit : units) computes[static_cast<size_t>(unit)] = true;
  std::vector<int> missing;
  for (int node = 0; node < plan_.num_nodes; ++node) {
    if (!computes[static_cast<size_t>(plan_.nodes[node].unit)]) continue;
    for (const Operand& in : plan_.nodes[node].in) {
      if (in.kind != OperandKind::kWeight) continue;
      const int unit = share_.unit_at(in.index);
      if (!is_on_host_[static_cast<size_t>(unit)]) missing.push_back(unit);
    }
  }
  std::ranges::sort(missing);
  missing.erase(std::ranges::unique(missing).begin(), missing.end());
  return missing;
}

uint64_t Residency::hold_on_host(std::span<const int> units) {
  const std::vector<int> missing = missing_units(units);
  if (missing.empty()) return 0;
  uint64_t bytes = 0;
  for (const int unit : missing) bytes += plan_.units[unit].bytes;
  const uint64_t available = platform::available_memory();
  if (available < reserve_bytes_ || available - reserve_bytes_ < bytes) {
    fail(ATSC_DEVICE_ERROR, "%.1f MiB of memory are left, too little for another %.1f MiB of weights",
         static_cast<double>(available) / (1 << 20), static_cast<double>(bytes) / (1 << 20));
  }
  for (const int unit : missing) {
    read_to_host(plan_.units[unit]);
    is_on_host_[static_cast<size_t>(unit)] = 1;
  }
  return bytes;
}

bool Residency::exchange(std::span<const Advance> advances) {
  if (!is_torn_ && std::ranges::equal(advances, advanced_)) return false;
  const bool was_torn = std::exchange(is_torn_, true);
  const std::vector<Advance> before = std::exchange(advanced_, {advances.begin(), advances.end()});
  for (int unit = 0; unit < plan_.num_units; ++unit) {
    const bool was_lent = was_torn ? is_on_host_[static_cast<size_t>(unit)] && share_.unit_on_device[unit]
                                   : is_taken(unit, before);
    if (!was_lent || is_taken(unit, advances)) continue;
    device_.upload(this->unit(unit), weights_ + plan_.units[unit].offset, plan_.units[unit].bytes);
  }
  for (const Advance& advance : advances) {
    if (!was_torn && std::ranges::find(before, advance) != before.end()) continue;
    const UnitEntry& entry = plan_.units[advance.unit];
    device_.upload(place(advance.offset), weights_ + entry.offset, entry.bytes);
  }
  is_torn_ = false;
  return true;
}

// Whether one of them has the place of a resident, or part of it.
bool Residency::is_taken(int resident, std::span<const Advance> advances) const {
  const uint64_t begin = share_.unit_offsets[static_cast<size_t>(resident)];
  if (begin == kNowhere) return false;
  const uint64_t end = begin + plan_.units[resident].bytes;
  return std::ranges::any_of(advances, [&](const Advance& advance) {
    return advance.offset < end && begin < advance.offset + plan_.units[advance.unit].bytes;
  });
}

// Neighbours in one request, in pieces that a refusal does not make useless.
void Residency::pin_units() {
  uint64_t refused = 0;
  const auto pin = [&](uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += kMaxPinnedBytes) {
      const uint64_t bytes = std::min(kMaxPinnedBytes, round_up(end - at, kPage));
      std::optional<HostRange> range = device_.pin(weights_ + at, bytes);
      if (range) {
        pinned_.push_back(std::move(*range));
      } else {
        refused += bytes;
      }
    }
  };
  uint64_t begin = 0, end = 0;
  for (int unit = 0; unit < plan_.num_units; ++unit) {
    const UnitEntry& entry = plan_.units[unit];
    const bool may_move = entry.kind == UnitKind::kWeights && !share_.unit_on_device[unit];
    if (!may_move || !share_.unit_on_host[unit] || entry.bytes == 0) continue;
    const uint64_t first = entry.offset / kPage * kPage;
    if (first > round_up(end, kPage)) {
      pin(begin, end);
      begin = first;
    }
    end = entry.offset + entry.bytes;
  }
  pin(begin, end);
  if (refused == 0) return;
  for (uint64_t freed = 0; freed < kPinnedReserve && !pinned_.empty(); pinned_.pop_back()) {
    freed += pinned_.back().bytes();
    refused += pinned_.back().bytes();
  }
  char text[256];
  std::snprintf(text, sizeof text,
                "the system refuses to pin %.1f MiB of weights, which makes their way to the device "
                "slower: raise the limit on locked memory (ulimit -l)",
                static_cast<double>(refused) / (1 << 20));
  notice_ = text;
}

void Residency::make_places(int sessions) {
  for (int index = 0; index < sessions; ++index) {
    auto place = std::make_unique<SessionPlace>();
    place->index = index;
    place->device = &device_;
    place->logits = device_.allocate_host(share_.logits_bytes, "logits");
    const DeviceAddress base = caches_.address() + share_.session_bytes * index;
    for (int cache = 0; cache < plan_.num_caches; ++cache) {
      SessionPlace::Cache found;
      if (share_.cache_on_device[cache]) {
        found.k = base + share_.cache_offsets[cache];
        found.v = found.k + share_.cache_bytes[cache];
      }
      place->caches.push_back(found);
    }
    free_places_.push_back(place.get());
    places_.push_back(std::move(place));
  }
}

SessionPlace* Residency::take_place() {
  const std::lock_guard lock(mutex_);
  if (free_places_.empty()) fail(ATSC_INTERNAL_ERROR, "more sessions than the plan was opened for");
  SessionPlace* place = free_places_.back();
  free_places_.pop_back();
  return place;
}

void Residency::give_back(SessionPlace* place) {
  const std::lock_guard lock(mutex_);
  free_places_.push_back(place);
}

DeviceAddress Residency::scratch(KernelHandle kernel, int64_t kv_capacity) const {
  const uint64_t offset = share_.scratch_of(kernel, kv_capacity);
  return offset == kNowhere ? 0 : scratch_.address() + offset;
}

}  // namespace atsc
