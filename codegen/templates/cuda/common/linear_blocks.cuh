// Linear layers with int4 and int8 weights on int8 tensor cores: exact integer products of a slab
// of 32 K, scaled into float sums.
//
// int4: `code - 8` as the high half of a byte is 16 (code - 8), which the factor of x takes back.
// int8: codes are stored as code - 128.
// Q8 activations are one term. Float activations become three: of each block of 32, x / factor is
// rounded to 23 bits and written in signed digits of base 256, so that a product is exact to 2^-24
// of the block's largest x, and nothing overflows.
#pragma once

#include "linear.cuh"
#include "q8.cuh"
#include "tensor_cores.cuh"

namespace atsc {

template <class Layer>
constexpr int num_terms() {
  return Layer::kQuantized ? 1 : 3;
}

// Stored scales of a row, as codegen/layout.py num_blocks().
template <class Layer>
constexpr int num_scales() {
  constexpr int unit = Layer::kBlock < kSlab ? kSlab : Layer::kBlock;
  return (Layer::kInputs + unit - 1) / unit * unit / Layer::kBlock;
}

// Blocks of 16 split a slab into two halves with scales of their own.
template <class Layer>
constexpr int num_halves() {
  return Layer::kBlock == 16 ? 2 : 1;
}

template <class Layer>
constexpr int slab_bytes() {
  return Layer::kFormat == Format::int4 ? 128 : 256;
}

template <class Layer>
constexpr bool has_offset() {
  return Layer::kZeros != Number::none;
}

template <class Layer>
constexpr float code_unit() {
  return Layer::kFormat == Format::int4 ? 0.0625f : 1.0f;
}

// Scales of one row in `slabs` slabs, a power of two, of which the first is a multiple of it.
template <class Layer>
constexpr int scales_of(int slabs) {
  return slabs * kSlab < Layer::kBlock ? 1 : slabs * kSlab / Layer::kBlock;
}

// B fragments of a word of int4 codes, as 16 (code - 8).
__device__ inline u32 low_codes(u32 word) { return high_nibbles(word << 4); }
__device__ inline u32 high_codes(u32 word) { return high_nibbles(word); }

// w = scale * taken + offset, `taken` being code - 8 of int4, code - 128 of int8.
template <class Layer, int kCount>
struct Terms {
  float scale[kCount], offset[kCount];

  __device__ void load(const void* scales, const void* zeros) {
    load_numbers<Layer::kScales>(scales, scale);
    if constexpr (!has_offset<Layer>()) return;
    if constexpr (Layer::kZeros != Number::none) load_numbers<Layer::kZeros>(zeros, offset);
    constexpr float kCentre = Layer::kFormat == Format::int4 ? 8.0f : 128.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (Layer::kZeros == Number::u8) {
        offset[i] = scale[i] * (kCentre - offset[i]);
      } else if constexpr (Layer::kFormat == Format::int4) {
        offset[i] += scale[i] * kCentre;
      }
    }
  }
};

// Sum of products of `kTerms` digits, each integer sum begun at kSumStart.
template <int kTerms>
__device__ inline float join_terms(const int (&d)[kTerms]) {
  float sum = sum_of(d[0]);
#pragma unroll
  for (int t = 1; t < kTerms; ++t) sum = fmaf(sum, 256.0f, sum_of(d[t]));
  return sum;
}

// The same times the weight's scale. Of an f16 scale, 1.5 * 2^23 times it is exact, and one
// operation takes the start off and multiplies.
template <class Layer, int kTerms>
__device__ inline float scaled_terms(const int (&d)[kTerms], float scale) {
  if constexpr (kTerms == 1 && Layer::kScales == Number::f16) {
    return fmaf(__int_as_float(d[0]), scale, -12582912.0f * scale);
  }
  return join_terms(d) * scale;
}

__device__ inline int sum_of_bytes(u32 word, int sum) {
  return __dp4a(static_cast<int>(word), 0x01010101, sum);
}

// The sum of a quad's four values, in all four lanes.
__device__ inline int sum_of_quad(int value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// The sum over 16 K of one row's activations, from the fragment words of all terms.
template <int kTerms>
__device__ inline float half_sum(const u32 (&words)[kTerms]) {
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < kTerms; ++t) {
    sum = fmaf(sum, 256.0f, static_cast<float>(sum_of_quad(sum_of_bytes(words[t], 0))));
  }
  return sum;
}

// A block of 32 floats in three digits of base 256, by eight neighbouring lanes with four each.
struct Digits {
  u32 words[3];  // this lane's four activations, highest digit first
  float factor;  // of the lowest digit; the same in all eight lanes
  float sum;     // factor * sum of the block, likewise
};

__device__ inline Digits to_digits(const float (&x)[4]) {
  float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  }
  constexpr float kMost = 127.0f * 65536.0f;
  const float inverse = largest > 1e-31f ? kMost / largest : 0.0f;
  Digits digits = {{0, 0, 0}, largest / kMost, 0.0f};
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int value = __float2int_rn(x[i] * inverse);
    const int low = static_cast<signed char>(value);
    const int middle = static_cast<signed char>((value - low) >> 8);
    const int high = (value - low - (middle << 8)) >> 16;
    digits.words[0] |= (high & 255u) << (8 * i);
    digits.words[1] |= (middle & 255u) << (8 * i);
    digits.words[2] |= (low & 255u) << (8 * i);
    sum += value;
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  digits.sum = digits.factor * static_cast<float>(sum);
  return digits;
}

}  // namespace atsc
