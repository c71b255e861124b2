// What the CUDA linear kernels share: the layer's sizes, and the epilogue.
//
// A kernel describes its layer by a struct of constants that linear_layer.cuh.j2 writes; weights
// lie in tiles of 8 outputs as codegen/layout.py has them.
#pragma once

#include "activations.cuh"
#include "device_kernel.h"
#include "numbers.cuh"

namespace atsc {

enum class Format { int4, int8, f32, f16, bf16 };

constexpr int kTileRows = 8;  // outputs of a weight tile
constexpr int kSlab = 32;     // K of a slab: one block of int8 activations

template <class Layer>
constexpr int num_tiles() {
  return (Layer::kOutputs + kTileRows - 1) / kTileRows;
}

template <class Layer>
constexpr int num_slabs() {
  return (Layer::kInputs + kSlab - 1) / kSlab;
}

// Four floats of a row from column `first`, zeros behind its end.
template <class Layer>
__device__ inline void load_row(const float* row, int first, bool wanted, float (&x)[4]) {
  if (Layer::kInputs % 4 == 0) {
    const bool inside = wanted && first < Layer::kInputs;
    const float4 four = inside ? *reinterpret_cast<const float4*>(row + first) : float4{};
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
  } else {
    for (int i = 0; i < 4; ++i) {
      x[i] = wanted && first + i < Layer::kInputs ? row[first + i] : 0.0f;
    }
  }
}

// Bias, activation, gate and residual of one output of one row, and its store.
template <class Layer>
__device__ inline void finish(const DeviceArgs& args, int row, int column, float y) {
  const long long place = static_cast<long long>(row) * Layer::kOutputs + column;
  if constexpr (Layer::kHasBias) y += static_cast<const float*>(args.in[Layer::kBias])[column];
  if constexpr (Layer::kHasGate) {
    y *= Layer::activate(static_cast<const float*>(args.in[Layer::kGate])[place]);
  } else {
    y = Layer::activate(y);
  }
  if constexpr (Layer::kHasResidual) {
    y += static_cast<const float*>(args.in[Layer::kResidual])[place];
  }
  static_cast<float*>(args.out[0])[place] = y;
}

}  // namespace atsc
