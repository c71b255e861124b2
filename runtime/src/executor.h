// Runs rounds: nodes in order, each on all threads of the pool.
//
// A node has a domain of items, which threads claim in chunks. In a round of few rows a barrier costs
// as much as a small node, so what is cheap is computed by every thread for itself (kReplicate, into
// its private arena) and what follows item by item is done by the thread that has the items
// (kAligned). Nodes are packed into steps, with one barrier after each:
//
//     few rows    replicated nodes | one claimed node | aligned nodes     all of one group
//     many rows   one claimed node | aligned nodes of its group with an equal domain
//
// Few or many is asked of each node: a prefill of many tokens may want one row of logits. Where a
// value lies (shared or private) follows from that, so there is one program a combination, made when
// it is first needed.
//
// Where a device takes part, a program holds the host's nodes alone, in the segments of splits.h,
// which the caller runs one by one; what crosses to the device is never private.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "platform.h"
#include "pool.h"
#include "splits.h"
#include "tables.h"

namespace atsc {

// The K and V of one attention layer.
struct CacheView {
  void* k;
  void* v;
};

struct Round {
  const int32_t* token_ids;
  int64_t num_tokens;
  int64_t position;            // tokens before this round
  const int32_t* logit_rows;   // ascending; indices into token_ids
  int64_t num_logit_rows;
  float* logits;               // [num_logit_rows][vocab_size], 64-byte aligned
  const CacheView* caches;     // one a cache of the plan
  const std::atomic<bool>* cancelled;
  int64_t written = 0;         // tokens below this may be in the caches; at least `position`
};

class Executor {
 public:
  // `isa_levels` has bit i set for each level whose kernels may be used.
  Executor(const Plan& plan, const std::byte* weights, uint32_t isa_levels, Pool& pool);

  enum class Role : uint8_t { kReplicated, kClaimed, kAligned };

  struct Instruction {
    const CpuKernel* kernel;
    const NodeEntry* node;
    KernelArgs args;            // private operands point into the first thread's arena
    uint32_t private_inputs;    // bit i: args.in[i] is private
    uint32_t private_outputs;
    size_t scratch_stride;      // replicated: a thread's own scratch
    int64_t domain;             // of this round
    Role role;
    bool may_open_step;         // false: runs after the instruction before it, without a barrier
  };

  struct Program {
    std::vector<Instruction> instructions;
    std::vector<int> segments;  // the first instruction of each
  };

  // When a step ran, its barrier included, as the calling thread saw it.
  struct StepTime {
    const NodeEntry *first, *last;
    int64_t begin_ns, end_ns;
  };

  // False: cancelled between two steps; the caches then hold part of the round. Fills `times`, if it
  // is given and the round was whole.
  bool run(const Round& round, std::vector<StepTime>* times = nullptr);

  // The host's part of a round of so many rows. Any thread, also while a round runs.
  std::unique_ptr<Program> compile(int64_t num_tokens, int64_t num_logit_rows,
                                   const Splits& splits);
  // Before its segments: puts the round's numbers into the program.
  void bind(Program& program, const Round& round);
  // False: cancelled.
  bool run_segment(const Program& program, int segment, const std::atomic<bool>& cancelled);

  // The highest level of which a kernel is in use.
  int highest_isa_level() const { return highest_isa_level_; }

  std::byte* arena() const { return arena_.data(); }

 private:
  enum class Amount : uint8_t { kNone, kFew, kMany };

  // Instructions [first, claimed) replicated, then [claimed, end) on claimed items.
  struct Step {
    int first, claimed, end;
    int64_t domain, grain;
  };

  struct Scratch {
    const CpuKernel* kernel;
    int64_t kv_capacity;
    bool replicated;
    std::byte* data;
    size_t stride;
  };

  Program& program_for(const Round& round);
  static Amount amount_of(int64_t rows);
  Program make_program(Amount tokens, Amount logits, const Splits* splits);
  Instruction make_instruction(const NodeEntry& node, Amount amount,
                               std::vector<bool>& is_private, const Splits* splits);
  const CpuKernel* kernel_of(const NodeEntry& node, Amount amount);
  const void* place(const Operand& operand, const std::vector<bool>& is_private);
  Scratch scratch_for(const CpuKernel* kernel, const NodeEntry& node, bool replicated);
  void set_numbers(Instruction& instruction, const Round& round) const;
  bool run_steps(const Program& program, int segment, const std::atomic<bool>& cancelled);
  void work(const Program& program, int segment, int thread, const std::atomic<bool>& cancelled);
  void run_items(const Instruction& instruction, int thread, int64_t begin, int64_t end) const;

  const Plan& plan_;
  const std::byte* weights_;
  uint32_t isa_levels_;
  int highest_isa_level_ = 0;
  Pool& pool_;
  size_t private_stride_;
  platform::Mapping arena_, private_arenas_, token_ids_, logit_rows_;
  std::mutex compile_mutex_;  // guards the scratch that programs share
  std::vector<platform::Mapping> scratch_memory_;
  std::vector<Scratch> scratch_;
  std::unique_ptr<Program> programs_[3][3];
  std::vector<Step> steps_;
  std::vector<int> segment_ends_;  // in steps_
  std::vector<uint64_t>* step_ticks_ = nullptr;  // at the end of steps; null: nobody asks
  bool stop_ = false;
  alignas(64) std::atomic<int64_t> next_chunk_{0};
};

}  // namespace atsc
