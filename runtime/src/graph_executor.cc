#include "graph_executor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <string>

#include "failure.h"

namespace atsc {
namespace {

constexpr uint64_t kAlignment = 64;
// Elements of a chunk at least: less would not pay for claiming it.
constexpr int64_t kChunkElements = 8192;
constexpr int64_t kChunksOfThread = 6;

// The highest of the allowed levels that kernels of general graphs know.
int level_of(uint32_t isa_levels) {
  const uint32_t known = isa_levels & ((1u << kNumGraphLevels) - 1);
  return known == 0 ? 0 : std::bit_width(known) - 1;
}

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

std::string names_of(const GraphTensor* tensors, int count) {
  std::string names;
  for (int i = 0; i < count; ++i) names += (i > 0 ? ", " : "") + std::string(tensors[i].name);
  return names;
}

int find(const GraphTensor* tensors, int count, const char* name) {
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(tensors[i].name, name) == 0) return i;
  }
  return -1;
}

}  // namespace

GraphExecutor::GraphExecutor(const GraphTables& graph, const std::byte* weights,
                             uint32_t isa_levels, Pool& pool)
    : graph_(graph),
      weights_(weights),
      level_(level_of(isa_levels)),
      pool_(pool),
      symbols_(static_cast<size_t>(graph.num_symbols)),
      sizes_(static_cast<size_t>(graph.num_sizes)),
      offsets_(static_cast<size_t>(graph.num_buffers)),
      inputs_(static_cast<size_t>(graph.num_inputs)),
      operands_(static_cast<size_t>(graph.num_calls)),
      dims_(static_cast<size_t>(graph.num_calls)),
      chunks_(static_cast<size_t>(graph.num_calls)),
      ends_(static_cast<size_t>(graph.num_calls)) {
  for (int call = 0; call < graph.num_calls; ++call) {
    operands_[call].resize(static_cast<size_t>(graph.calls[call].num_operands));
    dims_[call].resize(static_cast<size_t>(graph.calls[call].num_dims));
  }
}

void GraphExecutor::run(const std::vector<atsc_tensor>& inputs, std::vector<atsc_tensor>& outputs) {
  bind_inputs(inputs);
  if (!is_planned_ || symbols_ != planned_symbols_) plan_memory();
  std::vector<const void*> targets(static_cast<size_t>(graph_.num_outputs));
  bool is_whole = true;
  for (atsc_tensor& output : outputs) {
    const int index = output.name == nullptr
                          ? -1
                          : find(graph_.outputs, graph_.num_outputs, output.name);
    if (index < 0) {
      fail(ATSC_INVALID_ARGUMENT, "no output is called %s: the model has %s",
           output.name == nullptr ? "NULL" : output.name,
           names_of(graph_.outputs, graph_.num_outputs).c_str());
    }
    const GraphTensor& tensor = graph_.outputs[index];
    describe(tensor, output);
    is_whole = is_whole && output.data != nullptr;
    if (output.data == nullptr) continue;
    const auto bytes = static_cast<uint64_t>(elements_of(tensor, false) * tensor.element_bytes);
    if (output.bytes < bytes) {
      fail(ATSC_INVALID_ARGUMENT, "output %s has room for %llu bytes and needs %llu", tensor.name,
           static_cast<unsigned long long>(output.bytes), static_cast<unsigned long long>(bytes));
    }
    targets[index] = output.data;
  }
  if (!is_whole) return;
  bind_operands(targets);
  execute();
  for (int index = 0; index < graph_.num_outputs; ++index) {
    if (targets[index] == nullptr || is_aligned(targets[index])) continue;
    const auto bytes = elements_of(graph_.outputs[index], false) * graph_.outputs[index].element_bytes;
    std::memcpy(const_cast<void*>(targets[index]),
                staged_.data() + staging_[graph_.num_inputs + index], static_cast<size_t>(bytes));
  }
}

void GraphExecutor::bind_inputs(const std::vector<atsc_tensor>& inputs) {
  symbol_owners_.assign(symbols_.size(), -1);
  std::fill(inputs_.begin(), inputs_.end(), nullptr);
  std::vector<bool> given(inputs_.size());
  for (const atsc_tensor& input : inputs) {
    const int index = input.name == nullptr ? -1
                                            : find(graph_.inputs, graph_.num_inputs, input.name);
    if (index < 0) {
      fail(ATSC_INVALID_ARGUMENT, "no input is called %s: the model takes %s",
           input.name == nullptr ? "NULL" : input.name,
           names_of(graph_.inputs, graph_.num_inputs).c_str());
    }
    const GraphTensor& wanted = graph_.inputs[index];
    if (given[index]) fail(ATSC_INVALID_ARGUMENT, "input %s is given twice", wanted.name);
    given[index] = true;
    if (input.type != wanted.type) {
      fail(ATSC_INVALID_ARGUMENT, "input %s has elements of ONNX type %d, expected %d", wanted.name,
           input.type, wanted.type);
    }
    if (input.rank != wanted.rank) {
      fail(ATSC_INVALID_ARGUMENT, "input %s has %d dimensions, expected %d", wanted.name,
           input.rank, wanted.rank);
    }
    uint64_t bytes = static_cast<uint64_t>(wanted.element_bytes);
    for (int axis = 0; axis < wanted.rank; ++axis) {
      const int64_t size = input.shape[axis], expected = wanted.shape[axis];
      if (size < 0 || (expected >= 0 && size != expected)) {
        fail(ATSC_INVALID_ARGUMENT, "input %s has size %lld in dimension %d, expected %lld",
             wanted.name, static_cast<long long>(size), axis,
             static_cast<long long>(std::max<int64_t>(expected, 0)));
      }
      if (expected < 0) bind_symbol(static_cast<int>(-1 - expected), size, wanted, axis);
      if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) {
        fail(ATSC_INVALID_ARGUMENT, "input %s is too large", wanted.name);
      }
    }
    if (input.bytes < bytes || (bytes > 0 && input.data == nullptr)) {
      fail(ATSC_INVALID_ARGUMENT, "input %s has %llu bytes, its shape needs %llu", wanted.name,
           static_cast<unsigned long long>(input.bytes), static_cast<unsigned long long>(bytes));
    }
    inputs_[index] = input.data;
  }
  for (int index = 0; index < graph_.num_inputs; ++index) {
    if (!given[index]) {
      fail(ATSC_INVALID_ARGUMENT, "input %s is missing: the model takes %s",
           graph_.inputs[index].name, names_of(graph_.inputs, graph_.num_inputs).c_str());
    }
  }
}

void GraphExecutor::bind_symbol(int symbol, int64_t size, const GraphTensor& input, int axis) {
  int& owner = symbol_owners_[symbol];
  if (owner >= 0 && symbols_[symbol] != size) {
    fail(ATSC_INVALID_ARGUMENT, "input %s has size %lld in dimension %d (%s), and input %s has %lld",
         input.name, static_cast<long long>(size), axis, graph_.symbols[symbol],
         graph_.inputs[owner].name, static_cast<long long>(symbols_[symbol]));
  }
  owner = static_cast<int>(&input - graph_.inputs);
  symbols_[symbol] = size;
}

void GraphExecutor::plan_memory() {
  is_planned_ = false;  // whatever fails below: plan anew next time
  graph_.evaluate(symbols_.data(), sizes_.data());
  for (int index = 0; index < graph_.num_checks; ++index) {
    const GraphCheck& check = graph_.checks[index];
    const auto left = static_cast<long long>(sizes_[check.left]);
    const auto right = static_cast<long long>(sizes_[check.right]);
    if (check.is_least ? left >= right : left == right) continue;
    if (check.is_least) {
      fail(ATSC_INVALID_ARGUMENT, "node %s (%s) is %lld, and must be at least %lld", check.what,
           check.left_text, left, right);
    }
    fail(ATSC_INVALID_ARGUMENT, "node %s: %s is %lld and %s is %lld, and they must be equal",
         check.what, check.left_text, left, check.right_text, right);
  }
  for (int index = 0; index < graph_.num_buffers; ++index) {
    if (sizes_[graph_.buffers[index].elements] < 0) {
      fail(ATSC_INVALID_ARGUMENT, "the inputs are too small for the model: node %s would make a "
                                  "tensor of negative size",
           graph_.calls[graph_.buffers[index].first_call].node);
    }
  }
  place_buffers();
  uint64_t workspace = 0;
  for (int index = 0; index < graph_.num_calls; ++index) {
    const GraphCall& call = graph_.calls[index];
    for (int place = 0; place < call.num_dims; ++place) {
      dims_[index][place] = sizes_[call.dims[place]];
    }
    const int64_t grid = std::max<int64_t>(sizes_[call.grid], 0);
    const int64_t least = kChunkElements / std::max<int64_t>(sizes_[call.item_cost], 1);
    const int64_t share = grid / (pool_.num_threads() * kChunksOfThread);
    chunks_[index] = {grid, std::max<int64_t>({least, share, 1})};
    workspace = std::max(workspace, static_cast<uint64_t>(sizes_[call.workspace_bytes]));
  }
  const auto is_small = [&](int call) { return chunks_[call].grid <= chunks_[call].grain; };
  for (int index = graph_.num_calls - 1; index >= 0; --index) {
    const bool goes_on = index + 1 < graph_.num_calls && is_small(index) && is_small(index + 1);
    ends_[index] = goes_on ? ends_[index + 1] : index + 1;
  }
  workspace_stride_ = aligned(workspace);
  const uint64_t needed = workspace_stride_ * static_cast<uint64_t>(pool_.num_threads());
  if (needed > workspaces_.bytes()) {
    workspaces_ = {};
    workspaces_ = platform::Mapping::anonymous(needed, false, "workspaces");
  }
  planned_symbols_ = symbols_;
  is_planned_ = true;
}

// The largest first, each at the lowest place that is free during its life.
void GraphExecutor::place_buffers() {
  const auto count = static_cast<size_t>(graph_.num_buffers);
  const auto bytes_of = [&](size_t index) {
    const GraphBuffer& buffer = graph_.buffers[index];
    return aligned(static_cast<uint64_t>(sizes_[buffer.elements]) *
                   static_cast<uint64_t>(buffer.element_bytes));
  };
  std::vector<size_t> order(count), placed, beside;
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes_of(a) > bytes_of(b); });
  arena_used_ = 0;
  for (const size_t index : order) {
    const GraphBuffer& buffer = graph_.buffers[index];
    beside.clear();
    for (const size_t other : placed) {
      const GraphBuffer& life = graph_.buffers[other];
      if (life.first_call <= buffer.last_call && buffer.first_call <= life.last_call) {
        beside.push_back(other);
      }
    }
    std::sort(beside.begin(), beside.end(),
              [&](size_t a, size_t b) { return offsets_[a] < offsets_[b]; });
    uint64_t offset = 0;
    for (const size_t other : beside) {
      if (offset + bytes_of(index) <= offsets_[other]) break;
      offset = std::max(offset, offsets_[other] + bytes_of(other));
    }
    offsets_[index] = offset;
    arena_used_ = std::max(arena_used_, offset + bytes_of(index));
    placed.push_back(index);
  }
  if (arena_used_ > arena_.bytes()) {
    arena_ = {};  // first, so that both are never held
    arena_ = platform::Mapping::anonymous(arena_used_, true, "activations");
  }
}

int64_t GraphExecutor::elements_of(const GraphTensor& tensor, bool is_input) const {
  int64_t count = 1;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    const int64_t entry = tensor.shape[axis];
    count *= !is_input ? sizes_[entry] : entry >= 0 ? entry : symbols_[-1 - entry];
  }
  return count;
}

void GraphExecutor::describe(const GraphTensor& tensor, atsc_tensor& output) const {
  output.type = tensor.type;
  output.rank = tensor.rank;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    output.shape[axis] = sizes_[tensor.shape[axis]];
    if (output.shape[axis] < 0) {
      fail(ATSC_INVALID_ARGUMENT, "the inputs are too small for the model: output %s would have a "
                                  "negative size", tensor.name);
    }
  }
}

// Kernels want their tensors aligned: what the caller's memory is not goes through our own.
void GraphExecutor::bind_operands(const std::vector<const void*>& outputs) {
  std::vector<std::byte*> ends(static_cast<size_t>(graph_.num_inputs + graph_.num_outputs));
  staging_.assign(ends.size(), 0);
  uint64_t staged = 0;
  const auto reserve = [&](int place, const GraphTensor& tensor, bool is_input) {
    staging_[place] = staged;
    staged += aligned(static_cast<uint64_t>(elements_of(tensor, is_input) * tensor.element_bytes));
  };
  for (int i = 0; i < graph_.num_inputs; ++i) {
    if (!is_aligned(inputs_[i])) reserve(i, graph_.inputs[i], true);
  }
  for (int i = 0; i < graph_.num_outputs; ++i) {
    if (outputs[i] == nullptr || !is_aligned(outputs[i])) {
      reserve(graph_.num_inputs + i, graph_.outputs[i], false);
    }
  }
  if (staged > staged_.bytes()) {
    staged_ = {};
    staged_ = platform::Mapping::anonymous(staged, false, "inputs and outputs");
  }
  const auto own = [&](int place) { return staged_.data() + staging_[place]; };
  for (int i = 0; i < graph_.num_inputs; ++i) {
    ends[i] = static_cast<std::byte*>(const_cast<void*>(inputs_[i]));
    if (is_aligned(inputs_[i])) continue;
    const int64_t bytes = elements_of(graph_.inputs[i], true) * graph_.inputs[i].element_bytes;
    ends[i] = own(i);
    if (bytes > 0) std::memcpy(ends[i], inputs_[i], static_cast<size_t>(bytes));
  }
  for (int i = 0; i < graph_.num_outputs; ++i) {
    const bool is_direct = outputs[i] != nullptr && is_aligned(outputs[i]);
    ends[graph_.num_inputs + i] =
        is_direct ? static_cast<std::byte*>(const_cast<void*>(outputs[i])) : own(graph_.num_inputs + i);
  }
  for (int index = 0; index < graph_.num_calls; ++index) {
    const GraphCall& call = graph_.calls[index];
    for (int place = 0; place < call.num_operands; ++place) {
      const GraphOperand& operand = call.operands[place];
      std::byte* data = nullptr;
      switch (operand.memory) {
        case GraphMemory::kInput: data = ends[operand.index]; break;
        case GraphMemory::kOutput: data = ends[graph_.num_inputs + operand.index]; break;
        case GraphMemory::kConstant: data = const_cast<std::byte*>(weights_) + operand.index; break;
        case GraphMemory::kBuffer: data = arena_.data() + offsets_[operand.index]; break;
      }
      operands_[index][place] = data;
    }
  }
}

void GraphExecutor::execute() {
  next_chunk_.store(0, std::memory_order_relaxed);
  failed_call_.store(-1, std::memory_order_relaxed);
  stop_ = false;
  pool_.run([&](int thread) { work(thread); });
  const int failed = failed_call_.load(std::memory_order_relaxed);
  if (failed < 0) return;
  fail(ATSC_INVALID_ARGUMENT, "node %s: an index that an input holds is out of range",
       graph_.calls[failed].node);
}

void GraphExecutor::work(int thread) {
  std::byte* const workspace = workspaces_.data() + workspace_stride_ * static_cast<size_t>(thread);
  for (int index = 0; index < graph_.num_calls; index = ends_[index]) {
    const auto [grid, grain] = chunks_[index];
    if (ends_[index] > index + 1) {
      if (next_chunk_.fetch_add(1, std::memory_order_relaxed) == 0) {
        for (int call = index; call < ends_[index] && failed_call_ < 0; ++call) {
          work_on(call, 0, chunks_[call].grid, workspace);
        }
      }
    } else {
      for (;;) {
        const int64_t begin = next_chunk_.fetch_add(1, std::memory_order_relaxed) * grain;
        if (begin >= grid) break;
        work_on(index, begin, std::min(begin + grain, grid), workspace);
      }
    }
    if (ends_[index] == graph_.num_calls) return;  // the pool's own barrier follows
    pool_.barrier([&] {
      next_chunk_.store(0, std::memory_order_relaxed);
      stop_ = failed_call_.load(std::memory_order_relaxed) >= 0;
    });
    if (stop_) return;
  }
}

void GraphExecutor::work_on(int call, int64_t begin, int64_t end, std::byte* workspace) {
  if (begin >= end) return;
  const int32_t failed = graph_.calls[call].run[level_](operands_[call].data(), dims_[call].data(),
                                                        workspace, begin, end);
  if (failed != 0) failed_call_.store(call, std::memory_order_relaxed);
}

}  // namespace atsc
