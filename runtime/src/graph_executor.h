// Runs general graphs: kernel calls in order, each on all threads of the pool.
//
// Memory between calls is planned when the sizes are known, and kept as long as they stay the same:
// buffers whose lives do not overlap share places. A call's grid is claimed in chunks, and there is
// one barrier after each call; calls in a row that are too small to share are run by one thread, with
// one barrier after all of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "atsc.h"
#include "graph_tables.h"
#include "platform.h"
#include "pool.h"

namespace atsc {

class GraphExecutor {
 public:
  // `isa_levels` has a bit set for each level of isa.h whose kernels may be used.
  GraphExecutor(const GraphTables& graph, const std::byte* weights, uint32_t isa_levels, Pool& pool);

  // Reads the inputs, which are found by their names, and fills the outputs' types, ranks and shapes;
  // where all outputs wanted have memory, runs the graph into it. One thread at a time.
  // Fails: a name, type, rank or size that does not fit.
  void run(const std::vector<atsc_tensor>& inputs, std::vector<atsc_tensor>& outputs);

 private:
  struct Chunk {
    int64_t grid, grain;
  };

  void bind_inputs(const std::vector<atsc_tensor>& inputs);
  void bind_symbol(int symbol, int64_t size, const GraphTensor& input, int axis);
  void plan_memory();
  void place_buffers();
  void describe(const GraphTensor& tensor, atsc_tensor& output) const;
  void bind_operands(const std::vector<const void*>& outputs);
  void execute();
  void work(int thread);
  void work_on(int call, int64_t begin, int64_t end, std::byte* workspace);
  int64_t elements_of(const GraphTensor& tensor, bool is_input) const;

  const GraphTables& graph_;
  const std::byte* weights_;
  int level_;                          // of kernels: an index into GraphCall::run
  Pool& pool_;
  bool is_planned_ = false;            // for planned_symbols_, of which there may be none
  std::vector<int64_t> symbols_, sizes_, planned_symbols_;
  std::vector<int> symbol_owners_;     // the input that gave a symbol's value; -1: none yet
  std::vector<uint64_t> offsets_;      // of buffers in the arena
  std::vector<uint64_t> staging_;      // of inputs and outputs whose memory is not aligned
  uint64_t arena_used_ = 0, workspace_stride_ = 0;
  platform::Mapping arena_, staged_, workspaces_;
  std::vector<const void*> inputs_;
  std::vector<std::vector<void*>> operands_;
  std::vector<std::vector<int64_t>> dims_;
  std::vector<Chunk> chunks_;
  std::vector<int> ends_;              // of the calls that are run without a barrier, by the first
  bool stop_ = false;
  alignas(64) std::atomic<int64_t> next_chunk_{0};
  std::atomic<int> failed_call_{-1};
};

}  // namespace atsc
