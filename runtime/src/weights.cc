#include "weights.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "checksum.h"
#include "failure.h"

namespace atsc {
namespace {

constexpr uint64_t kReadBytes = 8 << 20;

// Reads a unit (unless the file is mapped) and compares its checksum, piece by piece in the cache.
void take_in(const UnitEntry& unit, const std::string& path, const platform::File* file,
             std::byte* weights) {
  uint32_t crc = 0;
  for (uint64_t done = 0; done < unit.bytes; done += kReadBytes) {
    const uint64_t size = std::min(kReadBytes, unit.bytes - done);
    std::byte* target = weights + unit.offset + done;
    if (file != nullptr) file->read_at(unit.offset + done, target, size);
    crc = crc32(crc, target, size);
  }
  if (crc != unit.crc32) {
    fail(ATSC_PLAN_ERROR, "%s: unit %s is damaged (crc32 %08x instead of %08x): copy the plan again",
         path.c_str(), unit.name, crc, unit.crc32);
  }
}

}  // namespace

platform::Mapping load_weights(const Plan& plan, const std::string& path, WeightsMode mode,
                               Pool& pool) {
  const auto file = platform::File::open_to_read(path);
  if (file.bytes() != plan.weights_bytes) {
    fail(ATSC_PLAN_ERROR, "%s has %llu bytes instead of %llu: copy the plan again", path.c_str(),
         static_cast<unsigned long long>(file.bytes()),
         static_cast<unsigned long long>(plan.weights_bytes));
  }
  const bool read = mode == WeightsMode::kRead;
  auto weights = read ? platform::Mapping::anonymous(plan.weights_bytes, true, "weights")
                      : file.map();
  if (mode == WeightsMode::kMap) return weights;

  std::atomic<int> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  pool.run([&](int) {
    for (int unit = next.fetch_add(1); unit < plan.num_units; unit = next.fetch_add(1)) {
      try {
        take_in(plan.units[unit], path, read ? &file : nullptr, weights.data());
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
        next = plan.num_units;
      }
    }
  });
  if (failure) std::rethrow_exception(failure);
  return weights;
}

}  // namespace atsc
