// c[r][n] = sum over k of a[r][k] * b[k][n], or with `adds` that added to c: bytes, of which one
// operand is unsigned and the other signed, exact in int32; kTileColumns columns, any number of rows.
//
// A function of its own at each level, compiled once for all plans. Depth is counted in quads, four
// neighbours of it: a is row-major with rows `stride` bytes apart, b is packed
// [quads][kTileColumns][4], c is [rows][kTileColumns]; b and c are 64-byte aligned. Without VNNI
// bytes are widened to 16 bits, since the byte products of AVX2 saturate; a column then is two lanes
// until the end. With `columns` of at most half a tile only that half of c is written.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "level.h"
#include "tile_strips.h"

namespace atsc::graph {
namespace ATSC_LEVEL(tile_i8) {

static inline int32_t quad_at(const uint8_t* x) {
  int32_t quad;
  __builtin_memcpy(&quad, x, sizeof quad);
  return quad;
}

#ifdef __AVX512F__
using Register = __m512i;
constexpr int kRows = 14;
static inline Register no_sums() { return _mm512_setzero_si512(); }
#else
using Register = __m256i;
constexpr int kRows = 6;
static inline Register no_sums() { return _mm256_setzero_si256(); }
#endif

#if defined(__AVX512VNNI__)
constexpr int kColumns = 16;
template <bool kSigned>
static inline Register left_of(const uint8_t* x) { return _mm512_set1_epi32(quad_at(x)); }
template <bool kSigned>
static inline Register right_of(const uint8_t* x) { return _mm512_load_si512(x); }
template <bool kSignedLeft>
static inline Register dot_of(Register a, Register b, Register c) {
  return kSignedLeft ? _mm512_dpbusd_epi32(c, b, a) : _mm512_dpbusd_epi32(c, a, b);
}
static inline void store_sums(int32_t* x, Register v, bool adds) {
  _mm512_store_si512(x, adds ? _mm512_add_epi32(v, _mm512_load_si512(x)) : v);
}
#elif defined(__AVX512F__)
constexpr int kColumns = 8;
template <bool kSigned>
static inline Register widened(__m256i x) {
  return kSigned ? _mm512_cvtepi8_epi16(x) : _mm512_cvtepu8_epi16(x);
}
template <bool kSigned>
static inline Register left_of(const uint8_t* x) {
  return widened<kSigned>(_mm256_set1_epi32(quad_at(x)));
}
template <bool kSigned>
static inline Register right_of(const uint8_t* x) {
  return widened<kSigned>(_mm256_load_si256(reinterpret_cast<const __m256i*>(x)));
}
template <bool kSignedLeft>
static inline Register dot_of(Register a, Register b, Register c) {
  return _mm512_add_epi32(c, _mm512_madd_epi16(a, b));
}
static inline void store_sums(int32_t* x, Register v, bool adds) {
  const __m256i sums = _mm512_cvtepi64_epi32(_mm512_add_epi32(v, _mm512_srli_epi64(v, 32)));
  __m256i* const to = reinterpret_cast<__m256i*>(x);
  _mm256_store_si256(to, adds ? _mm256_add_epi32(sums, _mm256_load_si256(to)) : sums);
}
#elif defined(__AVXVNNI__)
constexpr int kColumns = 8;
template <bool kSigned>
static inline Register left_of(const uint8_t* x) { return _mm256_set1_epi32(quad_at(x)); }
template <bool kSigned>
static inline Register right_of(const uint8_t* x) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(x));
}
template <bool kSignedLeft>
static inline Register dot_of(Register a, Register b, Register c) {
  return kSignedLeft ? _mm256_dpbusd_avx_epi32(c, b, a) : _mm256_dpbusd_avx_epi32(c, a, b);
}
static inline void store_sums(int32_t* x, Register v, bool adds) {
  __m256i* const to = reinterpret_cast<__m256i*>(x);
  _mm256_store_si256(to, adds ? _mm256_add_epi32(v, _mm256_load_si256(to)) : v);
}
#else
constexpr int kColumns = 4;
template <bool kSigned>
static inline Register widened(__m128i x) {
  return kSigned ? _mm256_cvtepi8_epi16(x) : _mm256_cvtepu8_epi16(x);
}
template <bool kSigned>
static inline Register left_of(const uint8_t* x) {
  return widened<kSigned>(_mm_set1_epi32(quad_at(x)));
}
template <bool kSigned>
static inline Register right_of(const uint8_t* x) {
  return widened<kSigned>(_mm_load_si128(reinterpret_cast<const __m128i*>(x)));
}
template <bool kSignedLeft>
static inline Register dot_of(Register a, Register b, Register c) {
  return _mm256_add_epi32(c, _mm256_madd_epi16(a, b));
}
static inline void store_sums(int32_t* x, Register v, bool adds) {
  const __m256i pairs = _mm256_add_epi32(v, _mm256_srli_epi64(v, 32));
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
  const __m128i sums = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(pairs, order));
  __m128i* const to = reinterpret_cast<__m128i*>(x);
  _mm_store_si128(to, adds ? _mm_add_epi32(sums, _mm_load_si128(to)) : sums);
}
#endif

template <bool kSignedLeft>
struct Bytes {
  using Element = uint8_t;
  using Sum = int32_t;
  using Vector = Register;
  static constexpr int kWidth = kColumns, kStrip = kRows, kStep = 4;
  static Vector zero() { return no_sums(); }
  static Vector left(const uint8_t* x) { return left_of<kSignedLeft>(x); }
  static Vector right(const uint8_t* x) { return right_of<!kSignedLeft>(x); }
  static Vector dot(Vector a, Vector b, Vector c) { return dot_of<kSignedLeft>(a, b, c); }
  static void store(int32_t* x, Vector v, bool adds) { store_sums(x, v, adds); }
};

template <bool kSignedLeft>
static void tile(int64_t rows, int64_t columns, int64_t quads, const void* a, int64_t stride,
                 const void* b, int32_t* c, bool adds) {
  const auto* const left = static_cast<const uint8_t*>(a);
  const auto* const right = static_cast<const uint8_t*>(b);
  ATSC_LEVEL(tile_strips)::tile<Bytes<kSignedLeft>>(rows, columns, quads, left, stride, right, c,
                                                    adds);
}

}  // namespace ATSC_LEVEL(tile_i8)
}  // namespace atsc::graph

extern "C" void ATSC_LEVEL(atsc_tile_u8s8)(int64_t rows, int64_t columns, int64_t quads,
                                           const void* a, int64_t stride, const void* b, int32_t* c,
                                           bool adds) {
  atsc::graph::ATSC_LEVEL(tile_i8)::tile<false>(rows, columns, quads, a, stride, b, c, adds);
}

extern "C" void ATSC_LEVEL(atsc_tile_s8u8)(int64_t rows, int64_t columns, int64_t quads,
                                           const void* a, int64_t stride, const void* b, int32_t* c,
                                           bool adds) {
  atsc::graph::ATSC_LEVEL(tile_i8)::tile<true>(rows, columns, quads, a, stride, b, c, adds);
}
