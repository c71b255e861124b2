// The constant tables of a plan: what no placement and no choice changes. codegen/tables.py writes
// one translation unit that defines `kPlan`; everything here is plain data.
#pragma once

#include <cstdint>

#include "graph_tables.h"
#include "kernel.h"

namespace atsc {

inline constexpr int kNumIsaLevels = 5;  // order of codegen/cpu.py ISA_LEVELS, lowest first

enum class OperandKind : uint8_t { kNone, kValue, kWeight, kTokenIds, kLogits };

// A value's index in Plan::values, or a weight part's offset in weights.bin.
struct Operand {
  OperandKind kind;
  uint64_t index;
};

enum class RowsOf : uint8_t { kTokens, kLogitRows };

enum class ValueType : uint8_t { kF32, kQ8 };

// A value's place in the activation arena, for the largest chunk.
struct ValueEntry {
  uint64_t offset;
  uint64_t bytes;
  uint64_t private_offset;  // in each thread's private arena (rounds of few rows); kNotPrivate: none
  ValueType type = ValueType::kF32;
  int64_t width = 0;        // of a row
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

// The numbers that a device kernel's launch depends on (codegen/cuda.py).
struct LaunchShape {
  int64_t rows;
  int64_t kv_capacity;
  int64_t num_sms;
};

// A kernel of one of the plan's device modules, and how to launch it.
struct DeviceKernel {
  const char* symbol;
  int32_t module;        // index into Plan::modules
  int32_t block;         // threads of a block
  int32_t shared_bytes;  // dynamic shared memory
  void (*grid)(const LaunchShape& shape, uint32_t grid[3]);
  uint64_t (*scratch_bytes)(const LaunchShape& shape);
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
  const DeviceKernel* device_few_rows = nullptr;   // null: the node runs on the host only
  const DeviceKernel* device_many_rows = nullptr;
};

// The highest of the CPU's levels with a kernel of its own for so many rows; -1: there is none.
inline int highest_level(const NodeEntry& node, bool few_rows, uint32_t isa_levels) {
  const CpuKernel* const* kernels = few_rows ? node.few_rows : node.many_rows;
  int level = kNumIsaLevels - 1;
  while (level >= 0 && (!(isa_levels >> level & 1) || kernels[level] == nullptr)) --level;
  return level;
}

// What a unit is: passes/partition.py UnitKind.
enum class UnitKind : uint8_t { kShared, kHost, kKvCache, kWeights };

// Time of a unit's nodes in one round, as profiling found it.
struct UnitTimes {
  int64_t cpu_ns;
  int64_t gpu_ns;
};

struct UnitEntry {
  const char* name;
  uint64_t offset;  // in weights.bin, a multiple of 4096
  uint64_t bytes;
  uint32_t crc32;   // of the range, as zlib computes it
  UnitKind kind = UnitKind::kWeights;
  UnitTimes decode = {};    // one token at half the context
  UnitTimes prefill = {};   // a whole chunk
  int64_t transfer_ns = 0;  // from pinned host memory to the device
};

struct CacheEntry {
  int32_t kv_heads;
  int32_t head_size;
  int32_t window;        // tokens that attention sees, 0: all
  int64_t capacity;      // tokens that the cache holds
};

// Device binaries of the plan, in kernels/: the loader takes the set of the device's own compute
// capability, or else PTX.
struct ModuleEntry {
  const char* file;   // relative to the plan's folder
  int32_t index;      // which DeviceKernel::module it serves
  int32_t sm;         // compute capability, 90 for sm_90
  bool is_ptx;        // for this and all later ones
};

// One placement: which units live in device memory if so much of it is free.
struct RungEntry {
  uint64_t required_bytes;   // of device memory, everything counted
  uint64_t resident_bytes;   // units, KV caches of all sessions among them
  uint64_t slot_bytes;       // of each promotion slot
  int32_t num_slots;
  const uint8_t* on_device;  // a byte a unit: 1 if it lives there
};

enum class DeviceKind : uint8_t { kNone, kCuda, kVirtual };

// What the plan knows of the device that it was made for; all zero without one.
struct DeviceEntry {
  DeviceKind kind;
  uint64_t budget_bytes;           // --vram
  uint64_t headroom_bytes;         // kept free of it
  int64_t hand_off_ns;             // latency of activations crossing, predicted
  double link_bytes_per_s;         // host to device, beside the CPU's computation
  int64_t stream_from_rows;        // rounds of at least so many rows stream all host units; 0: none
  int32_t num_modules, num_rungs;
  const ModuleEntry* modules;
  const RungEntry* rungs;          // ascending required_bytes; the first needs the least
  double cpu_share = 1;            // the CPU's speed beside copies to the device
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
  DeviceEntry device = {};
  const GraphTables* graph = nullptr;  // of a general graph: then there are no nodes and no caches
};

inline constexpr uint32_t kAbiVersion = 5;

extern const Plan kPlan;

}  // namespace atsc
