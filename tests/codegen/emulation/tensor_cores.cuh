// common/tensor_cores.cuh in plain C++: each lane of a warp lays its fragments open and reads those
// of the others. Asynchronous copies happen as late as they may, so that a missing wait shows.
#pragma once

#include "ptx.cuh"

namespace atsc {

constexpr int kSumStart = 0x4b400000;

inline float sum_of(int started) { return __int_as_float(started) - 12582912.0f; }

struct Fragments {
  u32 a[4], b[2];
};

inline int products_of_bytes(u32 a, u32 b) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), 0);
}

// Sums of one fragment: `dot` adds the products of lane 4 row + q of A and lane 4 column + q of B.
template <class Number, class Dot>
inline void multiply(Number (&d)[4], const Number (&start)[4], const Fragments& mine, Dot dot) {
  const auto all = lay_open(mine);
  const int row = lane() / 4, column = lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    d[i] = start[i];
    for (int q = 0; q < 4; ++q) {
      d[i] += dot(all[4 * row + q].a, i / 2, all[4 * (column + i % 2) + q].b);
    }
  }
}

inline void mma_k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int start[4] = {kSumStart, kSumStart, kSumStart, kSumStart};
  multiply(d, start, {{a[0], a[1], a[2], a[3]}, {b0, b1}}, [](const u32* x, int low, const u32* w) {
    return products_of_bytes(x[low], w[0]) + products_of_bytes(x[2 + low], w[1]);
  });
}

inline void mma_k16(int (&d)[4], u32 a0, u32 a1, u32 b) {
  const int start[4] = {kSumStart, kSumStart, kSumStart, kSumStart};
  multiply(d, start, {{a0, a1, 0, 0}, {b, 0}}, [](const u32* x, int low, const u32* w) {
    return products_of_bytes(x[low], w[0]);
  });
}

template <bool kBf16>
inline float product_of_pairs(u32 a, u32 b) {
  const auto number = [](u32 half) {
    const u16 bits = static_cast<u16>(half);
    return kBf16 ? __uint_as_float(static_cast<u32>(bits) << 16) : from_f16(bits);
  };
  return number(a) * number(b) + number(a >> 16) * number(b >> 16);
}

template <bool kBf16>
inline void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const float start[4] = {d[0], d[1], d[2], d[3]};
  multiply(d, start, {{a[0], a[1], a[2], a[3]}, {b0, b1}}, [](const u32* x, int low, const u32* w) {
    return product_of_pairs<kBf16>(x[low], w[0]) + product_of_pairs<kBf16>(x[2 + low], w[1]);
  });
}

inline void load_matrices(u32 (&a)[4], const void* row) {
  const auto rows = lay_open(static_cast<const u8*>(row));
  for (int i = 0; i < 4; ++i) std::memcpy(&a[i], rows[8 * i + lane() / 4] + lane() % 4 * 4, 4);
}

template <int kBytes>
inline void copy_async(void* to, const void* from, bool wanted) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto address = std::bit_cast<std::uintptr_t>(to) | std::bit_cast<std::uintptr_t>(from);
  if (address % kBytes) fail("an asynchronous copy from or to an unaligned address");
  copies().open.push_back({to, from, kBytes, wanted});
}

inline void commit_copies() {
  copies().groups.push_back(std::move(copies().open));
  copies().open.clear();
}

template <int kYounger>
inline void wait_for_copies() {
  auto& groups = copies().groups;
  for (; groups.size() > kYounger; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      if (copy.wanted) {
        std::memcpy(copy.to, copy.from, copy.num_bytes);
      } else {
        std::memset(copy.to, 0, copy.num_bytes);
      }
    }
  }
}

}  // namespace atsc
