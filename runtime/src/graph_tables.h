// The constant tables of a plan whose model is a general graph: not a decoder, but tensors in and
// tensors out. codegen/graph/tables.py writes them. Sizes are computed at run time from the symbols
// of the inputs' shapes, by one generated function that fills an array, which all else points into.
#pragma once

#include <cstdint>

namespace atsc {

// codegen/tail.py says what it may rely on.
using GraphKernel = int32_t (*)(void* const* tensors, const int64_t* dims, void* workspace,
                                int64_t lo, int64_t hi);

// An input or output of the model.
struct GraphTensor {
  const char* name;
  int32_t type;           // TensorProto.DataType of ONNX
  int32_t element_bytes;
  int32_t rank;
  const int64_t* shape;   // of an input: a size, or -1 - symbol; of an output: indices into the sizes
};

// Memory between calls.
struct GraphBuffer {
  int32_t elements;       // index into the sizes
  int32_t element_bytes;
  int32_t first_call, last_call;  // that use it
};

enum class GraphMemory : uint8_t { kInput, kOutput, kConstant, kBuffer };

struct GraphOperand {
  GraphMemory memory;
  uint64_t index;         // of it; of a constant the offset in weights.bin
};

inline constexpr int kNumGraphLevels = 4;  // codegen/tail.py LEVELS; the first of isa.h

struct GraphCall {
  const char* node;
  GraphKernel run[kNumGraphLevels];
  int32_t num_operands, num_dims;
  const GraphOperand* operands;
  const int32_t* dims;    // indices into the sizes; so are the next three
  int32_t grid, workspace_bytes, item_cost;
};

// Sizes that must be equal, or the left one at least the right one.
struct GraphCheck {
  int32_t left, right;    // indices into the sizes
  const char* left_text;
  const char* right_text;
  const char* what;
  bool is_least;
};

struct GraphTables {
  void (*evaluate)(const int64_t* symbols, int64_t* sizes);
  int32_t num_symbols, num_sizes;
  const char* const* symbols;
  int32_t num_inputs, num_outputs, num_buffers, num_calls, num_checks;
  const GraphTensor* inputs;
  const GraphTensor* outputs;
  const GraphBuffer* buffers;
  const GraphCall* calls;
  const GraphCheck* checks;
};

}  // namespace atsc
