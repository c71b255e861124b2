// The constant tables of a plan: what no placement and no choice changes. codegen/tables.py writes
// one translation unit that defines `kPlan`; everything here is plain data.
#pragma once

#include <cstdint>

#include "kernel.h"

namespace atsc {

inline constexpr int kNumIsaLevels = 4;  // order of codegen/cpu.py ISA_LEVELS, lowest first

enum class OperandKind : uint8_t { kNone, kValue, kWeight, kTokenIds, kLogits };

// A value's index in Plan::values, or a weight part's offset in weights.bin.
struct Operand {
  OperandKind kind;
  uint64_t index;
};

enum class RowsOf : uint8_t { kTokens, kLogitRows };

// A value's place in the activation arena, for the largest chunk.
struct ValueEntry {
  uint64_t offset;
  uint64_t bytes;
  uint64_t private_offset;  // in each thread's private arena (rounds of few rows); kNotPrivate: none
};
inline constexpr uint64_t kNotPrivate = ~0ull;

enum NodeFlags : uint32_t {
  // Cheap and row-wise: in a round of few rows every thread computes it whole, into its private
  // arena, so that no barrier follows.
  kReplicate = 1,
  // Reads what the node before it wrote only at the same domain index: a thread may go on with the
  // same items without a barrier.
  kAligned = 2,
};

struct NodeEntry {
  const char* name;
  const char* op;
  const CpuKernel* few_rows[kNumIsaLevels];   // rounds of at most kFewRows rows
  const CpuKernel* many_rows[kNumIsaLevels];
  Operand in[kMaxInputs];
  Operand out[kMaxOutputs];
  RowsOf rows;
  uint32_t flags;
  int32_t group;   // nodes of one group run without a barrier between them in a round of few rows
  int32_t unit;    // index into Plan::units
  int32_t layer;   // attention: index into Plan::caches; else -1
};

struct UnitEntry {
  const char* name;
  uint64_t offset;  // in weights.bin, a multiple of 4096
  uint64_t bytes;
  uint32_t crc32;   // of the range, as zlib computes it
};

struct CacheEntry {
  int32_t kv_heads;
  int32_t head_size;
  int32_t window;        // tokens that attention sees, 0: all
  int64_t capacity;      // tokens that the cache holds
};

struct Plan {
  uint32_t abi_version;
  const char* model_name;
  const char* plan_id;            // sha256 of plan.json's content that identifies this build
  int32_t vocab_size;
  int32_t context_length;         // --ctx
  int32_t chunk;                  // most tokens of a prefill round
  int32_t max_logit_rows;         // most rows of logits of one round
  int32_t bos_token_id;           // -1: none
  int32_t num_eos_token_ids;
  const int32_t* eos_token_ids;
  uint64_t arena_bytes;
  uint64_t private_arena_bytes;   // of one thread
  uint64_t weights_bytes;
  int32_t num_values, num_nodes, num_units, num_caches;
  const ValueEntry* values;
  const NodeEntry* nodes;
  const UnitEntry* units;
  const CacheEntry* caches;
};

inline constexpr uint32_t kAbiVersion = 1;

extern const Plan kPlan;

}  // namespace atsc
