// The activations of compiler/ops/activation.py, one float at a time.
#pragma once

namespace atsc {

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float activate_none(float x) { return x; }
__device__ inline float activate_silu(float x) { return x * sigmoid(x); }
__device__ inline float activate_sigmoid(float x) { return sigmoid(x); }
__device__ inline float activate_tanh(float x) { return tanhf(x); }
__device__ inline float activate_relu(float x) { return x < 0.0f ? 0.0f : x; }
__device__ inline float activate_quick_gelu(float x) { return x * sigmoid(1.702f * x); }

__device__ inline float activate_relu2(float x) {
  const float kept = activate_relu(x);
  return kept * kept;
}

// erfc keeps the digits that 1 + erf would cancel.
__device__ inline float activate_gelu(float x) { return 0.5f * x * erfcf(-0.707106781f * x); }

// (1 + tanh u) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ inline float activate_gelu_tanh(float x) {
  return x * sigmoid(x * (1.59576912f + 7.13548162e-2f * x * x));
}

}  // namespace atsc
