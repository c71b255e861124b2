// What kernels of general graphs compute with: element conversions, and scalar functions that the
// compiler can vectorise. Builtins instead of <cmath>, whose parsing takes longer than a kernel's.
#pragma once

#include <cstdint>
#include <type_traits>

#include "graph_math.h"

namespace atsc::graph {

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Of columns x, which are an image's x * stride + shift, those that it has; none if end <= begin.
struct Columns {
  int64_t begin, end;
};
static inline Columns columns_inside(int64_t size, int64_t stride, int64_t shift, int64_t width) {
  const int64_t begin = shift >= 0 ? 0 : (-shift + stride - 1) / stride;
  const int64_t end = size > shift ? (size - shift + stride - 1) / stride : 0;
  return {least(begin, width), least(end, width)};
}

template <class To, class From>
static inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &value, sizeof to);
  return to;
}

static inline float brain_to_float(uint16_t brain) {
  return bits<float>(static_cast<uint32_t>(brain) << 16);
}
static inline uint16_t float_to_brain(float value) {
  const auto word = bits<uint32_t>(value);
  const uint32_t rounded = (word + 0x7fffu + (word >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0u | (word >> 16 & 0x8000u) : rounded);
}

static inline float round_brain(float value) { return brain_to_float(float_to_brain(value)); }

// Out-of-range floats have no integer: they become the lowest one, as the x86 conversion does.
template <class To, class From>
static inline To cast(From value) {
  if constexpr (std::is_same_v<To, bool>) {
    return value != From(0);
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    if constexpr (std::is_same_v<To, uint64_t>) {
      return value >= From(9223372036854775808.0)
                 ? static_cast<uint64_t>(static_cast<int64_t>(value - From(9223372036854775808.0))) ^
                       (uint64_t{1} << 63)
                 : static_cast<uint64_t>(static_cast<int64_t>(value));
    } else if constexpr (sizeof(To) < 4) {
      return static_cast<To>(static_cast<int32_t>(value));
    } else if constexpr (std::is_same_v<To, uint32_t>) {
      return static_cast<To>(static_cast<int64_t>(value));
    } else {
      return static_cast<To>(value);
    }
  } else {
    return static_cast<To>(value);
  }
}

// e^x; relative error below 1.2e-7 where the result is normal, 0 below -103.
static inline float exp(float x) {
  float t = x < -104.0f ? -104.0f : x;
  t = t > 89.0f ? 89.0f : t;  // NaN stays, since neither comparison holds
  const float n = __builtin_nearbyintf(t * 1.44269504f);
  float r = __builtin_fmaf(n, -0.693359375f, t);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.3814540e-3f;
  p = __builtin_fmaf(p, r, 8.3687454e-3f);
  p = __builtin_fmaf(p, r, 4.16683908e-2f);
  p = __builtin_fmaf(p, r, 1.66665204e-1f);
  p = __builtin_fmaf(p, r, 4.99999934e-1f);
  p = __builtin_fmaf(p * r, r, r) + 1.0f;
  // Times 2^n in two steps: one alone would leave the exponent's range at both ends.
  const int32_t whole = static_cast<int32_t>(n == n ? n : 0.0f), half = whole >> 1;
  p *= bits<float>((half + 127) << 23);
  return p * bits<float>((whole - half + 127) << 23);
}
static inline double exp(double x) { return __builtin_exp(x); }

static inline float tanh(float x) {
  const float size = __builtin_fabsf(x), square = x * x;
  float p = -5.89508279e-3f;
  p = __builtin_fmaf(p, square, 2.07959125e-2f);
  p = __builtin_fmaf(p, square, -5.37838145e-2f);
  p = __builtin_fmaf(p, square, 1.33319240e-1f);
  p = __builtin_fmaf(p, square, -3.33332980e-1f);
  const float small = __builtin_fmaf(p * square, x, x);
  const float e = exp(-2.0f * size);
  const float large = __builtin_copysignf((1.0f - e) / (1.0f + e), x);
  return size > 0.6f ? large : small;
}
static inline double tanh(double x) { return __builtin_tanh(x); }

// Both pieces are our own fits: odd below 1, above it 1 - e^(-x^2) q(1 / (1 + 0.4 x)).
static inline float erf(float x) {
  const float size = __builtin_fabsf(x), square = x * x;
  float p = 7.8824974e-5f;
  p = __builtin_fmaf(p, square, -8.0188555e-4f);
  p = __builtin_fmaf(p, square, 5.1893122e-3f);
  p = __builtin_fmaf(p, square, -2.6854329e-2f);
  p = __builtin_fmaf(p, square, 1.12835974e-1f);
  p = __builtin_fmaf(p, square, -3.7612626e-1f);
  p = __builtin_fmaf(p, square, 1.12837911f);
  const float bound = size > 4.0f ? 4.0f : size;  // NaN stays
  const float t = 1.0f / __builtin_fmaf(0.4f, bound, 1.0f);
  float q = -1.9706748e-1f;
  q = __builtin_fmaf(q, t, 7.1837874e-1f);
  q = __builtin_fmaf(q, t, -4.1759375e-1f);
  q = __builtin_fmaf(q, t, 5.3216140e-1f);
  q = __builtin_fmaf(q, t, 1.21775269e-1f);
  q = __builtin_fmaf(q, t, 2.43830826e-1f);
  q = __builtin_fmaf(q, t, -1.34359044e-3f);
  const float large = 1.0f - exp(-bound * bound) * q;
  return size > 1.0f ? __builtin_copysignf(large, x) : p * x;
}
static inline double erf(double x) { return __builtin_erf(x); }

template <class T>
static inline T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

template <class T>
static inline T whole_power(T base, uint64_t exponent) {
  T result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = static_cast<T>(result * base);
    base = static_cast<T>(base * base);
  }
  return result;
}

// ONNX Pow: the result has the base's type.
template <class T, class E>
static inline T power(T base, E exponent) {
  if constexpr (std::is_integral_v<T> && std::is_integral_v<E>) {
    if (exponent >= 0) return whole_power(base, static_cast<uint64_t>(exponent));
  }
  if constexpr (std::is_same_v<T, float>) {
    if (exponent == E(2)) return base * base;
    return __builtin_powf(base, static_cast<float>(exponent));
  }
  return cast<T>(__builtin_pow(static_cast<double>(base), static_cast<double>(exponent)));
}

// Integer division and remainder by zero have no meaning, and must not stop the process.
template <class T>
static inline T divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) return 0;
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return static_cast<T>(-static_cast<std::make_unsigned_t<T>>(a));
    }
    return static_cast<T>(a / b);
  } else {
    return a / b;
  }
}

// The sign of the divisor, as Python's %.
template <class T>
static inline T floor_mod(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    const T rest = __builtin_fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  } else {
    if (b == 0) return 0;
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return 0;
    }
    const T rest = static_cast<T>(a % b);
    return static_cast<T>(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
  }
}

// The sign of the dividend, as C's fmod.
template <class T>
static inline T c_mod(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return __builtin_fmod(a, b);
  } else {
    if (b == 0) return 0;
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return 0;
    }
    return static_cast<T>(a % b);
  }
}

// NaN in either stays.
template <class T>
static inline T smaller(T a, T b) {
  return b < a || b != b ? b : a;
}
template <class T>
static inline T larger(T a, T b) {
  return b > a || b != b ? b : a;
}

// Saturated; NaN becomes the lowest.
static inline float within(float x, float low, float high) {
  const float risen = x > low ? x : low;
  return risen < high ? risen : high;
}

// By the type's width or more, or by a negative count, all bits leave: a sign stays to the right.
template <class T>
static inline T shift(T a, T b, bool left) {
  if (b < T(0) || b >= T(sizeof(T) * 8)) return static_cast<T>(!left && a < T(0) ? -1 : 0);
  return static_cast<T>(left ? a << b : a >> b);
}

}  // namespace atsc::graph
