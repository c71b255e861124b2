#include "checksum.h"

#include <immintrin.h>

#include <array>
#include <cstring>

namespace atsc {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // bit 31 is the coefficient of x^0

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[0] advances by one byte; tables[n] by one byte and n zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t n = 1; n < 8; ++n) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[n - 1][byte];
      tables[n][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// x^exponent modulo the polynomial. A product of two reflected numbers comes out one bit too low, for
// which this makes up.
constexpr uint64_t power_of_x(int exponent) {
  uint32_t power = 1u << 31;
  for (int i = 0; i < exponent; ++i) power = (power >> 1) ^ ((power & 1) ? kPolynomial : 0);
  return uint64_t{power} << 1;
}

constexpr size_t kLane = 16, kLanes = 4, kAtOnce = kLane * kLanes;

// Moves a lane towards the end of the message, with the same remainder: each half times the power of x
// between it and its new place.
[[gnu::target("pclmul,sse4.1")]] __m128i fold(__m128i lane, __m128i powers) {
  return _mm_xor_si128(_mm_clmulepi64_si128(lane, powers, 0x00),
                       _mm_clmulepi64_si128(lane, powers, 0x11));
}

uint32_t by_tables(uint32_t crc, const unsigned char* at, size_t bytes) {
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);  // little-endian, as all platforms of plans are
    word ^= crc;
    crc = 0;
    for (size_t byte = 0; byte < 8; ++byte) crc ^= kTables[7 - byte][word >> (8 * byte) & 255];
  }
  for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 255];
  return crc;
}

// Whole lanes, at least four; four products run at once. The last lane that is left has the remainder of
// all, which the tables find.
[[gnu::target("pclmul,sse4.1")]] uint32_t by_products(uint32_t crc, const unsigned char* at,
                                                      size_t bytes) {
  constexpr int kFar = 8 * kAtOnce, kNear = 8 * kLane;
  const __m128i far = _mm_set_epi64x(power_of_x(kFar - 32), power_of_x(kFar + 32));
  const __m128i near = _mm_set_epi64x(power_of_x(kNear - 32), power_of_x(kNear + 32));
  const auto load = [&](size_t lane) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + lane * kLane));
  };
  __m128i lanes[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = load(lane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  at += kAtOnce, bytes -= kAtOnce;
  for (; bytes >= kAtOnce; at += kAtOnce, bytes -= kAtOnce) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = _mm_xor_si128(fold(lanes[lane], far), load(lane));
    }
  }
  __m128i last = lanes[0];
  for (size_t lane = 1; lane < kLanes; ++lane) last = _mm_xor_si128(fold(last, near), lanes[lane]);
  for (; bytes >= kLane; at += kLane, bytes -= kLane) last = _mm_xor_si128(fold(last, near), load(0));
  unsigned char left[kLane];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left), last);
  return by_tables(0, left, kLane);
}

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  if (bytes >= kAtOnce && __builtin_cpu_supports("pclmul")) {
    const size_t whole = bytes / kLane * kLane;
    crc = by_products(crc, at, whole);
    at += whole, bytes -= whole;
  }
  return ~by_tables(crc, at, bytes);
}

}  // namespace atsc
