#include "weights.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "failure.h"

namespace atsc {
namespace {

// Compares the checksum of a unit that is mapped, piece by piece in the cache.
void look_through(const UnitEntry& unit, const std::string& path, const std::byte* weights) {
  uint32_t crc = 0;
  for (uint64_t done = 0; done < unit.bytes; done += kReadBytes) {
    crc = crc32(crc, weights + unit.offset + done, std::min(kReadBytes, unit.bytes - done));
  }
  check_unit(unit, path, crc);
}

}  // namespace

void check_unit(const UnitEntry& unit, const std::string& path, uint32_t crc) {
  if (crc == unit.crc32) return;
  fail(ATSC_PLAN_ERROR, "%s: unit %s is damaged (crc32 %08x instead of %08x): copy the plan again",
       path.c_str(), unit.name, crc, unit.crc32);
}

platform::File open_weights(const Plan& plan, const std::string& path) {
  auto file = platform::File::open_to_read(path);
  if (file.bytes() != plan.weights_bytes) {
    fail(ATSC_PLAN_ERROR, "%s has %llu bytes instead of %llu: copy the plan again", path.c_str(),
         static_cast<unsigned long long>(file.bytes()),
         static_cast<unsigned long long>(plan.weights_bytes));
  }
  return file;
}

platform::Mapping load_weights(const Plan& plan, const std::string& path, WeightsMode mode,
                               Pool& pool) {
  const auto file = open_weights(plan, path);
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
        const UnitEntry& entry = plan.units[unit];
        if (read) {
          read_checked(entry, file, path,
                       [&](uint64_t at) { return weights.data() + entry.offset + at; },
                       [](uint64_t, uint64_t) {});
        } else {
          look_through(entry, path, weights.data());
        }
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
