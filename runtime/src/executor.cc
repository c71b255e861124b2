#include "executor.h"

#include <x86intrin.h>

#include <algorithm>
#include <cstring>

#include "failure.h"
#include "isa.h"

namespace atsc {
namespace {

static_assert(kNumIsaLevels == ATSC_NUM_ISA_LEVELS);

// Chunks that a thread gets of a node on average: enough to even out their speeds, few enough that
// claiming does not show in short nodes (SmolLM2, 2 to 8 threads: 4 beats 6 by up to 15 % in decode,
// 6 beats 2 by 25 % in prefill).
constexpr int64_t kChunksOfFewRows = 4, kChunksOfManyRows = 6;

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

}  // namespace

Executor::Executor(const Plan& plan, const std::byte* weights, uint32_t isa_levels, Pool& pool)
    : plan_(plan),
      weights_(weights),
      isa_levels_(isa_levels),
      pool_(pool),
      private_stride_(round_up(plan.private_arena_bytes, 4096) + 64) {
  using platform::Mapping;
  const auto threads = static_cast<size_t>(pool.num_threads());
  // Huge pages are for what large rounds fill; private arenas are small and read by one core.
  arena_ = Mapping::anonymous(round_up(plan.arena_bytes, 64) + 64, true, "activations");
  private_arenas_ = Mapping::anonymous(private_stride_ * threads, false, "activations");
  token_ids_ = Mapping::anonymous(sizeof(int32_t) * plan.chunk, false, "token ids");
  logit_rows_ = Mapping::anonymous(sizeof(int32_t) * plan.max_logit_rows, false, "row numbers");
  steps_.reserve(static_cast<size_t>(plan.num_nodes));
  for (int index = 0; index < plan.num_nodes; ++index) {
    kernel_of(plan.nodes[index], Amount::kFew);  // fails if there is none
    kernel_of(plan.nodes[index], Amount::kMany);
  }
}

const CpuKernel* Executor::kernel_of(const NodeEntry& node, Amount amount) {
  const bool few_rows = amount == Amount::kFew;
  if (const int level = highest_level(node, few_rows, isa_levels_); level >= 0) {
    if (level > highest_isa_level_) highest_isa_level_ = level;  // by the constructor, for all
    return (few_rows ? node.few_rows : node.many_rows)[level];
  }
  fail(ATSC_PLAN_ERROR, "node %s (%s) has no kernel for this CPU: compile the model again",
       node.name, node.op);
}

const void* Executor::place(const Operand& operand, const std::vector<bool>& is_private) {
  switch (operand.kind) {
    case OperandKind::kNone: return nullptr;
    case OperandKind::kWeight: return weights_ + operand.index;
    case OperandKind::kTokenIds: return token_ids_.data();
    case OperandKind::kLogits: return nullptr;  // the round's; bound later
    case OperandKind::kValue: break;
  }
  const ValueEntry& value = plan_.values[operand.index];
  if (is_private[operand.index]) return private_arenas_.data() + value.private_offset;
  return arena_.data() + value.offset;
}

Executor::Scratch Executor::scratch_for(const CpuKernel* kernel, const NodeEntry& node,
                                        bool replicated) {
  if (kernel->scratch_bytes == nullptr) return {};
  const int64_t capacity = node.layer >= 0 ? plan_.caches[node.layer].capacity : 0;
  // What a kernel counts in its scratch lies where its capacity puts it: share only between equals.
  for (const Scratch& known : scratch_) {
    if (known.kernel == kernel && known.kv_capacity == capacity && known.replicated == replicated) {
      return known;
    }
  }
  const int64_t max_rows = std::max(plan_.chunk, plan_.max_logit_rows);
  const int32_t threads = pool_.num_threads();
  const size_t bytes = kernel->scratch_bytes(max_rows, capacity, replicated ? 1 : threads);
  const size_t stride = replicated ? round_up(bytes, 128) : 0;
  const size_t total = replicated ? stride * static_cast<size_t>(threads) : bytes;
  scratch_memory_.push_back(platform::Mapping::anonymous(total, false, "kernel scratch"));
  scratch_.push_back({kernel, capacity, replicated, scratch_memory_.back().data(), stride});
  return scratch_.back();
}

Executor::Instruction Executor::make_instruction(const NodeEntry& node, Amount amount,
                                                 std::vector<bool>& is_private,
                                                 const Splits* splits) {
  Instruction made{};
  made.node = &node;
  made.kernel = kernel_of(node, amount);
  const bool few = amount == Amount::kFew;
  const bool aligned = (node.flags & kAligned) != 0;
  bool replicated = few && !aligned && (node.flags & kReplicate) != 0;
  for (const Operand& out : node.out) {
    const bool value = out.kind == OperandKind::kValue;
    if (out.kind == OperandKind::kLogits) replicated = false;
    if (value && plan_.values[out.index].private_offset == kNotPrivate) replicated = false;
    if (value && splits != nullptr && splits->crosses[out.index]) replicated = false;
  }
  made.role = replicated ? Role::kReplicated : aligned ? Role::kAligned : Role::kClaimed;
  for (int slot = 0; slot < kMaxInputs; ++slot) {
    const Operand& in = node.in[slot];
    made.args.in[slot] = place(in, is_private);
    if (in.kind == OperandKind::kValue && is_private[in.index]) made.private_inputs |= 1u << slot;
  }
  for (int slot = 0; slot < kMaxOutputs; ++slot) {
    const Operand& out = node.out[slot];
    if (out.kind == OperandKind::kValue) is_private[out.index] = replicated;
    if (out.kind == OperandKind::kValue && replicated) made.private_outputs |= 1u << slot;
    made.args.out[slot] = const_cast<void*>(place(out, is_private));
  }
  const Scratch scratch = scratch_for(made.kernel, node, replicated);
  made.args.scratch = scratch.data;
  made.scratch_stride = scratch.stride;
  made.args.num_threads = replicated ? 1 : pool_.num_threads();
  made.args.logit_rows = reinterpret_cast<const int32_t*>(logit_rows_.data());
  if (node.layer >= 0) made.args.kv_capacity = plan_.caches[node.layer].capacity;
  return made;
}

Executor::Program Executor::make_program(Amount tokens, Amount logits, const Splits* splits) {
  Program program;
  std::vector<bool> is_private(static_cast<size_t>(plan_.num_values));
  const Instruction* before = nullptr;
  bool before_few = false;
  program.instructions.reserve(static_cast<size_t>(plan_.num_nodes));
  const auto begin_segment = [&] {
    program.segments.push_back(static_cast<int>(program.instructions.size()));
    before = nullptr;
  };
  const auto add = [&](int index) {
    const NodeEntry& node = plan_.nodes[index];
    const Amount amount = node.rows == RowsOf::kTokens ? tokens : logits;
    if (amount == Amount::kNone) return;
    Instruction made = make_instruction(node, amount, is_private, splits);
    const bool few = amount == Amount::kFew;
    const bool same_group = before != nullptr && before->node->group == node.group;
    const bool after_replicated = same_group && before->role == Role::kReplicated;
    const bool follows = same_group && before_few == few && before->node->rows == node.rows &&
                         before->role != Role::kReplicated;
    if (made.role == Role::kAligned && !follows) made.role = Role::kClaimed;
    made.may_open_step = !(after_replicated || made.role == Role::kAligned);
    program.instructions.push_back(made);
    before = &program.instructions.back();
    before_few = few;
  };
  if (splits == nullptr) {
    begin_segment();
    for (int index = 0; index < plan_.num_nodes; ++index) add(index);
    return program;
  }
  for (const HostSegment& segment : splits->segments) {
    begin_segment();
    for (const int index : segment.nodes) add(index);
  }
  return program;
}

Executor::Amount Executor::amount_of(int64_t rows) {
  return rows == 0 ? Amount::kNone : rows <= kFewRows ? Amount::kFew : Amount::kMany;
}

Executor::Program& Executor::program_for(const Round& round) {
  const Amount tokens = amount_of(round.num_tokens), logits = amount_of(round.num_logit_rows);
  auto& program = programs_[static_cast<int>(tokens)][static_cast<int>(logits)];
  if (!program) program = std::make_unique<Program>(make_program(tokens, logits, nullptr));
  return *program;
}

std::unique_ptr<Executor::Program> Executor::compile(int64_t num_tokens, int64_t num_logit_rows,
                                                     const Splits& splits) {
  const std::lock_guard lock(compile_mutex_);
  return std::make_unique<Program>(
      make_program(amount_of(num_tokens), amount_of(num_logit_rows), &splits));
}

void Executor::set_numbers(Instruction& instruction, const Round& round) const {
  const NodeEntry& node = *instruction.node;
  KernelArgs& args = instruction.args;
  args.rows = node.rows == RowsOf::kTokens ? round.num_tokens : round.num_logit_rows;
  args.position = round.position;
  if (node.layer >= 0) {
    args.k_cache = round.caches[node.layer].k;
    args.v_cache = round.caches[node.layer].v;
  }
  for (int slot = 0; slot < kMaxOutputs; ++slot) {
    if (node.out[slot].kind == OperandKind::kLogits) args.out[slot] = round.logits;
  }
  instruction.domain = instruction.kernel->domain(args);
}

// Puts the round's numbers into the instructions, and packs them into steps.
void Executor::bind(Program& program, const Round& round) {
  std::memcpy(token_ids_.data(), round.token_ids, sizeof(int32_t) * round.num_tokens);
  if (round.num_logit_rows > 0) {
    std::memcpy(logit_rows_.data(), round.logit_rows, sizeof(int32_t) * round.num_logit_rows);
  }
  steps_.clear();
  segment_ends_.clear();
  const int count = static_cast<int>(program.instructions.size());
  size_t segment = 0;
  for (int index = 0; index <= count; ++index) {
    bool opens = false;
    for (; segment < program.segments.size() && program.segments[segment] == index; ++segment) {
      if (segment > 0) segment_ends_.push_back(static_cast<int>(steps_.size()));
      opens = true;
    }
    if (index == count) break;
    Instruction& now = program.instructions[index];
    set_numbers(now, round);
    opens = opens || now.may_open_step;
    if (now.role == Role::kAligned && !opens) opens = now.domain != steps_.back().domain;
    if (opens) steps_.push_back({index, index, index, 0, 1});
    Step& step = steps_.back();
    step.end = index + 1;
    if (now.role == Role::kReplicated) {
      step.claimed = step.end;
    } else if (step.claimed == index) {
      step.domain = now.domain;
      const int64_t each = now.args.rows <= kFewRows ? kChunksOfFewRows : kChunksOfManyRows;
      const int64_t chunks = each * pool_.num_threads();
      step.grain = std::max<int64_t>(1, (now.domain + chunks - 1) / chunks);
    }
  }
  segment_ends_.push_back(static_cast<int>(steps_.size()));
}

void Executor::run_items(const Instruction& instruction, int thread, int64_t begin,
                         int64_t end) const {
  const size_t shift = private_stride_ * static_cast<size_t>(thread);
  const size_t scratch_shift = instruction.scratch_stride * static_cast<size_t>(thread);
  const uint32_t inputs = instruction.private_inputs, outputs = instruction.private_outputs;
  if ((shift | scratch_shift) == 0 || ((inputs | outputs) == 0 && scratch_shift == 0)) {
    instruction.kernel->run(instruction.args, begin, end);
    return;
  }
  KernelArgs args = instruction.args;
  for (uint32_t bits = inputs; bits != 0; bits &= bits - 1) {
    const int slot = __builtin_ctz(bits);
    args.in[slot] = static_cast<const std::byte*>(args.in[slot]) + shift;
  }
  for (uint32_t bits = outputs; bits != 0; bits &= bits - 1) {
    const int slot = __builtin_ctz(bits);
    args.out[slot] = static_cast<std::byte*>(args.out[slot]) + shift;
  }
  if (scratch_shift != 0) args.scratch = static_cast<std::byte*>(args.scratch) + scratch_shift;
  instruction.kernel->run(args, begin, end);
}

void Executor::work(const Program& program, int segment, int thread,
                    const std::atomic<bool>& cancelled) {
  const bool alone = pool_.num_threads() == 1;
  const Instruction* instructions = program.instructions.data();
  const Step* const last = steps_.data() + segment_ends_[segment] - 1;
  for (const Step* at = steps_.data() + (segment > 0 ? segment_ends_[segment - 1] : 0); at <= last;
       ++at) {
    const Step& step = *at;
    for (int index = step.first; index < step.claimed; ++index) {
      run_items(instructions[index], thread, 0, instructions[index].domain);
    }
    const auto run_claimed = [&](int64_t begin, int64_t end) {
      for (int index = step.claimed; index < step.end; ++index) {
        run_items(instructions[index], thread, begin, end);
      }
    };
    if (alone) {
      if (step.domain > 0) run_claimed(0, step.domain);
    } else {
      for (;;) {
        const int64_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
        const int64_t begin = chunk * step.grain;
        if (begin >= step.domain) break;
        run_claimed(begin, std::min(begin + step.grain, step.domain));
      }
    }
    if (at == last) return;  // the pool's own barrier follows
    pool_.barrier([&] {
      next_chunk_.store(0, std::memory_order_relaxed);
      stop_ = cancelled.load(std::memory_order_relaxed);
    });
    if (stop_) return;
    // One thread's view, or the vector would travel from core to core; and the core's counter, which
    // costs less than the system's clock.
    if (thread == 0 && step_ticks_ != nullptr) step_ticks_->push_back(__rdtsc());
  }
}

bool Executor::run_steps(const Program& program, int segment,
                         const std::atomic<bool>& cancelled) {
  if (segment_ends_[segment] == (segment > 0 ? segment_ends_[segment - 1] : 0)) return true;
  next_chunk_.store(0, std::memory_order_relaxed);
  stop_ = false;
  pool_.run([&](int thread) { work(program, segment, thread, cancelled); });
  return !stop_;
}

bool Executor::run(const Round& round, std::vector<StepTime>* times) {
  if (round.cancelled->load(std::memory_order_relaxed)) return false;
  Program& program = program_for(round);
  bind(program, round);
  if (times == nullptr) return run_steps(program, 0, *round.cancelled);
  std::vector<uint64_t> ticks;
  ticks.reserve(steps_.size() + 1);  // the threads allocate nothing
  step_ticks_ = &ticks;
  const int64_t begin_ns = platform::now_ns();
  ticks.push_back(__rdtsc());
  const bool is_whole = run_steps(program, 0, *round.cancelled);
  ticks.push_back(__rdtsc());  // the last step's barrier is the pool's
  const int64_t end_ns = platform::now_ns();
  step_ticks_ = nullptr;
  if (!is_whole) return false;
  // Where counters of cores differ, times are shifted, but stay in order and inside of the round.
  const auto all = static_cast<double>(ticks.back() - ticks.front());
  int64_t before_ns = begin_ns;
  times->reserve(steps_.size());
  for (size_t index = 0; index < steps_.size(); ++index) {
    const Step& step = steps_[index];
    const auto passed = static_cast<double>(ticks[index + 1] - ticks.front());
    const double share = std::clamp(passed / std::max(all, 1.0), 0.0, 1.0);
    const auto at_ns = begin_ns + static_cast<int64_t>(share * static_cast<double>(end_ns - begin_ns));
    const int64_t after_ns = std::max(before_ns, at_ns);
    times->push_back({program.instructions[step.first].node,
                      program.instructions[step.end - 1].node, before_ns, after_ns});
    before_ns = after_ns;
  }
  return true;
}

bool Executor::run_segment(const Program& program, int segment,
                           const std::atomic<bool>& cancelled) {
  if (cancelled.load(std::memory_order_relaxed)) return false;
  return run_steps(program, segment, cancelled);
}

}  // namespace atsc
