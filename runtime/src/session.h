// One conversation: KV caches, the number of tokens in them, the latest logits, and the sampler.
//
// A cache is fp16 [kv_heads][capacity][head_size], K and V; token t lies at t % capacity, so layers
// with an attention window keep their latest `capacity` tokens. What a rewind may go back to follows
// from the furthest token ever written since the session was empty.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "executor.h"
#include "platform.h"
#include "residency.h"
#include "sampler.h"
#include "tables.h"

namespace atsc {

class Session {
 public:
  // With a `place`, some caches lie on its device and the logits in its pinned memory.
  explicit Session(const Plan& plan, const SessionPlace* place = nullptr);

  int64_t position() const { return position_; }
  void check_room(int64_t num_tokens) const;  // fails if the context cannot hold so many more
  // Fails unless the token is one of the vocabulary.
  void check_token(int64_t token) const;

  // Runs one round at the present position. `logit_rows` are indices into `tokens`.
  // `execute` returns false if it was cancelled. Fails with ATSC_CANCELLED.
  void run(const std::function<bool(const Round&)>& execute, const int32_t* tokens,
           int64_t num_tokens, const int32_t* logit_rows, int64_t num_logit_rows);

  const float* logits() const { return logits_; }
  int64_t num_logit_rows() const { return num_logit_rows_; }

  void set_sampler(const SamplingOptions& options, uint64_t seed, std::vector<int32_t> stop_tokens);
  int32_t choose();  // fails without logits
  bool is_stop(int32_t token) const;

  void rewind(int64_t position);
  void save(const std::string& path) const;
  void restore(const std::string& path);

  // Chosen, but not in the caches yet; kNoToken: none.
  static constexpr int32_t kNoToken = -1;
  int32_t pending = kNoToken;

  std::atomic<bool> cancelled{false};
  std::atomic<bool> busy{false};

 private:
  struct Header;
  struct Range {
    std::byte* data;        // null: on the device
    DeviceAddress address;
    size_t bytes;
  };

  size_t cache_bytes(int cache) const;  // of K or of V
  void check_memory_reaches(int64_t position) const;
  Header header() const;
  std::vector<Range> ranges(const Header& header) const;

  bool is_on_device(int cache) const {
    if (place_ == nullptr) return false;
    return place_->caches[cache].k != 0 && !place_->caches[cache].has_retreated;
  }

  const Plan& plan_;
  const SessionPlace* place_;
  platform::Mapping memory_, logits_memory_;
  float* logits_;
  std::vector<CacheView> caches_;  // out of use while on the device
  int64_t position_ = 0;
  int64_t written_ = 0;  // tokens below this may have been written, also by a cancelled round
  int64_t num_logit_rows_ = 0;
  Sampler sampler_;
  std::vector<int32_t> stop_tokens_;
};

// Bytes of the caches of one session.
uint64_t session_cache_bytes(const Plan& plan);

}  // namespace atsc
