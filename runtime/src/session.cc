#include "session.h"

#include <algorithm>
#include <cstring>

#include "checksum.h"
#include "failure.h"

namespace atsc {
namespace {

constexpr size_t kPage = 4096;
constexpr char kMagic[8] = {'a', 't', 's', 'c', 's', 'e', 's', 's'};
constexpr uint32_t kStateVersion = 1;

size_t round_to_page(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

size_t bytes_of(const CacheEntry& cache) {
  return sizeof(uint16_t) * static_cast<size_t>(cache.kv_heads) * cache.capacity * cache.head_size;
}

}  // namespace

// The beginning of a saved session; the ranges of the caches follow, then the logits of the last
// row (if any), then a crc32 of everything before it.
struct Session::Header {
  char magic[8];
  uint32_t version;
  uint32_t num_caches;
  char plan_id[128];
  int64_t position;
  int64_t written;
  uint64_t sampler_state;
  SamplingOptions sampling;
  int32_t pending;
  int32_t has_logits;
};

uint64_t session_cache_bytes(const Plan& plan) {
  uint64_t bytes = 0;
  for (int i = 0; i < plan.num_caches; ++i) bytes += 2 * round_to_page(bytes_of(plan.caches[i]));
  return bytes;
}

Session::Session(const Plan& plan, const SessionPlace* place) : plan_(plan), place_(place) {
  if (place != nullptr) {
    logits_ = reinterpret_cast<float*>(place->logits.host());
  } else {
    const size_t row = sizeof(float) * static_cast<size_t>(plan.vocab_size);
    logits_memory_ = platform::Mapping::anonymous(row * plan.max_logit_rows, false, "logits");
    logits_ = reinterpret_cast<float*>(logits_memory_.data());
  }
  memory_ = platform::Mapping::anonymous(session_cache_bytes(plan), false, "KV caches");
  std::byte* at = memory_.data();
  for (int cache = 0; cache < plan.num_caches; ++cache) {
    const size_t bytes = round_to_page(cache_bytes(cache));
    caches_.push_back({at, at + bytes});
    at += 2 * bytes;
  }
}

size_t Session::cache_bytes(int cache) const { return bytes_of(plan_.caches[cache]); }

void Session::check_room(int64_t num_tokens) const {
  if (num_tokens <= plan_.context_length - position_) return;
  fail(ATSC_CONTEXT_FULL,
       "%lld tokens more do not fit: the context holds %d and %lld are taken; rewind, or compile "
       "with a larger --ctx",
       static_cast<long long>(num_tokens), plan_.context_length, static_cast<long long>(position_));
}

void Session::check_token(int64_t token) const {
  if (token >= 0 && token < plan_.vocab_size) return;
  fail(ATSC_INVALID_ARGUMENT, "token %lld is not in the vocabulary of %d tokens",
       static_cast<long long>(token), plan_.vocab_size);
}

void Session::run(const std::function<bool(const Round&)>& execute, const int32_t* tokens,
                  int64_t num_tokens, const int32_t* logit_rows, int64_t num_logit_rows) {
  num_logit_rows_ = 0;
  if (cancelled.load()) {
    cancelled = false;
    fail(ATSC_CANCELLED, "cancelled");
  }
  const Round round{tokens,  num_tokens,     position_,  logit_rows, num_logit_rows,
                    logits_, caches_.data(), &cancelled, written_};
  written_ = std::max(written_, position_ + num_tokens);
  if (!execute(round)) {
    cancelled = false;
    fail(ATSC_CANCELLED, "cancelled at token %lld", static_cast<long long>(position_));
  }
  position_ += num_tokens;
  num_logit_rows_ = num_logit_rows;
}

void Session::set_sampler(const SamplingOptions& options, uint64_t seed,
                          std::vector<int32_t> stop_tokens) {
  sampler_ = Sampler(options, seed);
  stop_tokens_ = std::move(stop_tokens);
}

int32_t Session::choose() {
  if (num_logit_rows_ == 0) {
    fail(ATSC_INVALID_ARGUMENT, "there are no logits to choose from: prefill or decode first");
  }
  return sampler_.choose(logits() + (num_logit_rows_ - 1) * plan_.vocab_size, plan_.vocab_size);
}

bool Session::is_stop(int32_t token) const {
  return std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end();
}

void Session::check_memory_reaches(int64_t position) const {
  for (int index = 0; index < plan_.num_caches; ++index) {
    const CacheEntry& cache = plan_.caches[index];
    const int64_t oldest = written_ - cache.capacity;  // tokens before it are overwritten
    const int64_t needed = cache.window > 0 ? position - cache.window + 1 : 0;
    if (oldest <= 0 || position == 0 || std::max<int64_t>(0, needed) >= oldest) continue;
    fail(ATSC_INVALID_ARGUMENT,
         "cannot rewind from %lld to %lld tokens: a layer with a window of %d remembers the tokens "
         "from %lld on; rewind to 0 and prefill again",
         static_cast<long long>(position_), static_cast<long long>(position), cache.window,
         static_cast<long long>(oldest));
  }
}

void Session::rewind(int64_t position) {
  if (position < 0 || position > position_) {
    fail(ATSC_INVALID_ARGUMENT, "cannot rewind to %lld: the session holds %lld tokens",
         static_cast<long long>(position), static_cast<long long>(position_));
  }
  check_memory_reaches(position);
  cancelled = false;
  pending = kNoToken;
  if (position < position_) num_logit_rows_ = 0;
  position_ = position;
  if (position == 0) written_ = 0;
}

Session::Header Session::header() const {
  Header made{};
  std::memcpy(made.magic, kMagic, sizeof kMagic);
  made.version = kStateVersion;
  made.num_caches = static_cast<uint32_t>(plan_.num_caches);
  std::strncpy(made.plan_id, plan_.plan_id, sizeof made.plan_id - 1);
  made.position = position_;
  made.written = written_;
  made.sampler_state = sampler_.state();
  made.sampling = sampler_.options();
  made.pending = pending;
  made.has_logits = num_logit_rows_ > 0;
  return made;
}

// The parts of the caches that hold tokens: of each head the first ones.
std::vector<Session::Range> Session::ranges(const Header& header) const {
  std::vector<Range> found;
  for (int index = 0; index < plan_.num_caches; ++index) {
    const CacheEntry& cache = plan_.caches[index];
    const size_t head = cache_bytes(index) / cache.kv_heads;
    const int64_t tokens = std::min(header.written, cache.capacity);
    const size_t used = head / cache.capacity * tokens;
    for (int32_t part = 0; part < 2 * cache.kv_heads; ++part) {
      const bool is_k = part < cache.kv_heads;
      const size_t offset = static_cast<size_t>(part % cache.kv_heads) * head;
      if (is_on_device(index)) {
        const SessionPlace::Cache& there = place_->caches[index];
        found.push_back({nullptr, (is_k ? there.k : there.v) + offset, used});
      } else {
        void* const base = is_k ? caches_[index].k : caches_[index].v;
        found.push_back({static_cast<std::byte*>(base) + offset, 0, used});
      }
    }
  }
  return found;
}

void Session::save(const std::string& path) const {
  const std::string temporary = path + ".part";
  try {
    const auto file = platform::File::create(temporary);
    uint32_t crc = 0;
    const auto put = [&](const void* data, size_t bytes) {
      crc = crc32(crc, data, bytes);
      file.append(data, bytes);
    };
    const Header made = header();
    put(&made, sizeof made);
    std::vector<std::byte> copy;
    for (const Range& range : ranges(made)) {
      if (range.data == nullptr) {
        copy.resize(range.bytes);
        place_->device->download(copy.data(), range.address, range.bytes);
      }
      put(range.data != nullptr ? range.data : copy.data(), range.bytes);
    }
    const size_t row = static_cast<size_t>(plan_.vocab_size);
    if (made.has_logits) put(logits() + (num_logit_rows_ - 1) * row, sizeof(float) * row);
    file.append(&crc, sizeof crc);
    file.flush_to_disk();
    platform::rename_over(temporary, path);
  } catch (...) {
    platform::remove_quietly(temporary);
    throw;
  }
}

void Session::restore(const std::string& path) {
  const platform::Mapping file = platform::File::open_to_read(path).map();
  const auto refuse = [&](const char* why) {
    fail(ATSC_PLAN_ERROR, "%s: %s", path.c_str(), why);
  };
  Header saved;
  if (file.bytes() < sizeof saved + 4) refuse("no saved session, or cut short");
  std::memcpy(&saved, file.data(), sizeof saved);
  if (std::memcmp(saved.magic, kMagic, sizeof kMagic) != 0) refuse("no saved session");
  if (saved.version != kStateVersion) refuse("saved by another version of atsc: prefill again");
  if (std::strncmp(saved.plan_id, plan_.plan_id, sizeof saved.plan_id - 1) != 0) {
    refuse("saved from another plan: prefill again");
  }
  uint32_t crc;
  std::memcpy(&crc, file.data() + file.bytes() - 4, 4);
  if (crc != crc32(0, file.data(), file.bytes() - 4)) refuse("damaged (crc32 differs): save it again");
  if (saved.num_caches != static_cast<uint32_t>(plan_.num_caches) || saved.position < 0 ||
      saved.position > saved.written || saved.written > plan_.context_length) {
    refuse("damaged: save it again");
  }
  const std::vector<Range> targets = ranges(saved);
  const size_t row = saved.has_logits ? sizeof(float) * plan_.vocab_size : 0;
  size_t expected = sizeof saved + row + 4;
  for (const Range& range : targets) expected += range.bytes;
  if (file.bytes() != expected) refuse("damaged (its size is wrong): save it again");

  const std::byte* at = file.data() + sizeof saved;
  for (const Range& range : targets) {
    if (range.data == nullptr) {
      place_->device->upload(range.address, at, range.bytes);
    } else {
      std::memcpy(range.data, at, range.bytes);
    }
    at += range.bytes;
  }
  std::memcpy(logits_, at, row);
  num_logit_rows_ = saved.has_logits ? 1 : 0;
  position_ = saved.position;
  written_ = saved.written;
  pending = saved.pending;
  cancelled = false;
  sampler_ = Sampler(saved.sampling, saved.sampler_state);
}

}  // namespace atsc
