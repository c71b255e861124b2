// What a compiled CPU kernel and the runtime agree on. Included by the runtime, by every generated
// kernel, and by the plan's tables; changing it means another kAbiVersion.
#pragma once

#include <cstddef>
#include <cstdint>

namespace atsc {

inline constexpr int kMaxInputs = 20;
inline constexpr int kMaxOutputs = 2;
inline constexpr int kTileRows = 8;      // outputs of a weight tile (codegen/layout.py)
inline constexpr int kQ8Block = 32;      // activations of one int8 block
inline constexpr int64_t kFewRows = 8;   // rounds of at most so many rows use the few-rows kernels

// One call's operands. A weight takes as many consecutive inputs as its layout has parts; an absent
// optional input is one null pointer (absent weights too). Pointers are 64-byte aligned.
struct KernelArgs {
  const void* in[kMaxInputs];
  void* out[kMaxOutputs];
  int64_t rows;               // rows of this node in this round
  int64_t position;           // tokens in the KV cache before this round
  const int32_t* logit_rows;  // select_rows: which rows to keep
  void* k_cache;              // attention: fp16 [kv_heads][kv_capacity][head_size]; token t lies at
  void* v_cache;              //   index t % kv_capacity
  int64_t kv_capacity;
  void* scratch;              // of scratch_bytes(), shared by all threads of the call; zero at first,
                              //   and what a kernel counts there it leaves at zero
  int32_t num_threads;
};

// A kernel computes the items [begin, end) of its domain; any partition of the domain, on any
// threads, gives the same result. Kernels never allocate, never block, never throw.
struct CpuKernel {
  const char* name;
  void (*run)(const KernelArgs& args, int64_t begin, int64_t end);
  int64_t (*domain)(const KernelArgs& args);
  size_t (*scratch_bytes)(int64_t max_rows, int64_t kv_capacity, int32_t num_threads);  // or null
};

// Defines the kernel that the tables refer to; the last line of every template.
#define ATSC_KERNEL(symbol, run, domain, scratch_bytes)    \
  extern "C" const ::atsc::CpuKernel symbol;               \
  const ::atsc::CpuKernel symbol = {#symbol, run, domain, scratch_bytes}

// A Q8 value of `rows` x `width` in memory, blocks first, so that a GEMV and a GEMM read it alike:
//   codes int8 [blocks][rows][32] | scales f32 [blocks][rows] | scaled_sums f32 [blocks][rows] |
//   sums i32 [blocks][rows]
// where a block's sum is that of its codes and its scaled sum is scale * sum. The same again, digit
// 1, is what it takes to tell the largest blocks of a row more exactly: scales are 0 where a block
// has no second digit, and then nothing else of it is set (compiler/ops/quantize.py).
struct Q8View {
  int8_t* codes;
  float* scales;
  float* scaled_sums;
  int32_t* sums;
};

inline constexpr int64_t kQ8BytesPerBlock = 32 + 4 + 4 + 4;  // of one digit

inline int64_t q8_blocks(int64_t width) { return (width + kQ8Block - 1) / kQ8Block; }

inline Q8View q8_view(const void* value, int64_t rows, int64_t width, int digit = 0) {
  const int64_t count = q8_blocks(width) * rows;
  auto* base = static_cast<int8_t*>(const_cast<void*>(value)) + digit * count * kQ8BytesPerBlock;
  auto* scales = reinterpret_cast<float*>(base + count * kQ8Block);
  return {base, scales, scales + count, reinterpret_cast<int32_t*>(scales + 2 * count)};
}

}  // namespace atsc
