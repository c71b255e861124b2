// Linear layers with int4 or int8 weights and Q8 activations: exact integer products, by AVX2 or,
// where the translation unit is compiled for it, by VNNI.
//
// One register holds 8 rows x 4 k of a tile; the same 4 activations are broadcast to all rows.
// int4: vpmaddubsw of codes 0..15 and activations -127..127. A lane of int16 adds 16 products, at
//   most 16 * 15 * 127 = 30480, so that a whole slab of 32 K needs one vpmaddwd.
// int8: vpmaddubsw of |code| <= 128 and activation * sign(code). Two products, at most
//   2 * 128 * 127 = 32512, fit int16; sums go on in int32. (Codes taken as unsigned would reach
//   2 * 255 * 127 and saturate.)
// VNNI: vpdpbusd of raw codes, which adds four products in int32.
// AVX-512 does the same for 16 outputs at a time (linear_q8_512.h).
// A slab then adds scale_w * scale_x * dot + offset_w * scaled_sum_x in float. Where activations have
// a second digit (kernel.h), it does so once more.
#pragma once

#include <bit>
#include <cstring>

#include "linear.h"
#include "scratch.h"

namespace atsc {

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool kVnni = true;
static inline __m256i add_products(__m256i sum, __m256i codes, __m256i x) {
  return _mm256_dpbusd_epi32(sum, codes, x);
}
#elif defined(__AVXVNNI__)
constexpr bool kVnni = true;
static inline __m256i add_products(__m256i sum, __m256i codes, __m256i x) {
  return _mm256_dpbusd_avx_epi32(sum, codes, x);
}
#else
constexpr bool kVnni = false;
static inline __m256i add_products(__m256i sum, __m256i, __m256i) { return sum; }
#endif
constexpr bool kSigned = !kVnni;  // int8: the codes as stored, or raw

// A tile's weights of one slab of 32 K: codes of k = 4 i .. 4 i + 3 in codes[i].
template <class Layer>
struct Q8Slab {
  __m256i codes[8];
  Terms terms[num_halves<Layer>()];
};

// One row's activations of a slab.
struct Q8Row {
  const int8_t* codes;
  const float *scale, *scaled_sum;
  const int32_t* sum;
};

static inline Q8Row q8_row(const Q8View& x, int64_t index) {
  return {x.codes + index * kQ8Bytes, x.scales + index, x.scaled_sums + index, x.sums + index};
}

template <class Layer>
static inline Q8Slab<Layer> load_slab(const Operands<Layer>& at, int64_t tile, int64_t slab) {
  const auto* p = static_cast<const uint8_t*>(at.codes) +
                  (tile * num_slabs<Layer>() + slab) * slab_bytes<Layer>();
  prefetch_ahead<slab_bytes<Layer>()>(p);
  Q8Slab<Layer> loaded;
  if constexpr (Layer::kFormat == Format::int4) {
    const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m256i both = load_bytes(p + 32 * g);
      loaded.codes[g] = _mm256_and_si256(both, low);
      loaded.codes[g + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m256i stored = load_bytes(p + 32 * g);
      loaded.codes[g] = kSigned ? stored : _mm256_xor_si256(stored, _mm256_set1_epi8(-128));
    }
  }
  for (int half = 0; half < num_halves<Layer>(); ++half) {
    const int64_t block = slab * kQ8Block / Layer::kBlock + half;
    loaded.terms[half] = load_terms<Layer, kSigned>(at.scales, at.zeros, tile, block);
  }
  return loaded;
}

// codes[first .. first + count) against the activations that they belong to: int32 of 8 rows.
template <class Layer, int kFirst, int kCount>
static inline __m256i dot(const __m256i* codes, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
  constexpr int kChains = kVnni ? 2 : 1;  // vpdpbusd takes its time
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
  for (int i = kFirst; i < kFirst + kCount; ++i) {
    __m256i& sum = sums[i % kChains];
    const __m256i four = broadcast4(x + 4 * i);
    if constexpr (kVnni) {
      sum = add_products(sum, codes[i], four);
    } else if constexpr (Layer::kFormat == Format::int4) {
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[i], four));
      asm("" : "+x"(sum));  // in this order: all broadcasts at once would spill the codes
    } else {
      const __m256i size = _mm256_abs_epi8(codes[i]);
      const __m256i products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four, codes[i]));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, ones));
    }
  }
  if constexpr (!kVnni && Layer::kFormat == Format::int4) {
    return _mm256_madd_epi16(sums[0], ones);
  }
  return _mm256_add_epi32(sums[0], sums[1]);
}

// Sum of the first 16 of a row's 32 activations.
static inline float first_half_sum(const int8_t* x) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  const __m128i raised = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
  const __m128i sums = _mm_sad_epu8(raised, _mm_setzero_si128());
  return static_cast<float>(_mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128);
}

// y + the product of a slab and a row's activations.
template <class Layer>
static inline __m256 add_slab(const Q8Slab<Layer>& slab, const Q8Row& x, __m256 y) {
  const __m256 scale = _mm256_broadcast_ss(x.scale);
  if constexpr (num_halves<Layer>() == 1) {
    // Only the last two operations wait for the dot product, so that more rows are in flight.
    if constexpr (has_offset<Layer, kSigned>()) {
      y = _mm256_fmadd_ps(slab.terms[0].offset, _mm256_broadcast_ss(x.scaled_sum), y);
    }
    const __m256 factor = _mm256_mul_ps(slab.terms[0].scale, scale);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot<Layer, 0, 8>(slab.codes, x.codes)), factor, y);
  } else {
    const __m256 low = _mm256_cvtepi32_ps(dot<Layer, 0, 4>(slab.codes, x.codes));
    const __m256 high = _mm256_cvtepi32_ps(dot<Layer, 4, 4>(slab.codes, x.codes));
    __m256 sum = _mm256_mul_ps(slab.terms[0].scale, low);
    sum = _mm256_fmadd_ps(slab.terms[1].scale, high, sum);
    if constexpr (has_offset<Layer, kSigned>()) {
      const float half = first_half_sum(x.codes);
      const float rest = static_cast<float>(*x.sum) - half;
      sum = _mm256_fmadd_ps(slab.terms[0].offset, _mm256_set1_ps(half), sum);
      sum = _mm256_fmadd_ps(slab.terms[1].offset, _mm256_set1_ps(rest), sum);
    }
    return _mm256_fmadd_ps(scale, sum, y);
  }
}

// One digit of a block of rows: those of a slab lie at view's index(slab), one after the other.
struct Q8Rows {
  Q8View view;
  int64_t stride, first;

  int64_t index(int64_t slab) const { return slab * stride + first; }
};

// Bytes of a block of rows, first digits alone, one behind the other.
template <class Layer>
constexpr int64_t packed_bytes() {
  return (num_slabs<Layer>() * kMostRows * kQ8BytesPerBlock + 63) / 64 * 64;
}

// What q8_gemm takes of a call's scratch for rounds of so many rows; nothing where one block has all.
template <class Layer>
static inline size_t q8_gemm_scratch(int64_t max_rows, int64_t, int32_t num_threads) {
  const int64_t slots = max_rows > kMostRows ? std::min<int64_t>(num_threads, kMaxCounters) : 0;
  return static_cast<size_t>(kCounterBytes + slots * packed_bytes<Layer>());
}

// The first digits of a block of rows: packed into a free part of the scratch, or where they are.
//
// In a round of 512 rows a block's codes are 2 KiB in every 16, so that few sets of the level-2 cache
// had to hold them all, and each pair of tiles fetched them from beyond it.
template <class Layer>
class PackedRows {
 public:
  PackedRows(const KernelArgs& args, const Operands<Layer>& at, Rows rows, int64_t pairs)
      : rows_{q8_view(at.x, args.rows, Layer::kInputs), args.rows, rows.first} {
    constexpr int64_t kFewestPairs = 8;  // for fewer it does not pay
    if (args.scratch == nullptr || args.rows <= kMostRows || pairs < kFewestPairs) return;
    const int64_t slots = std::min<int64_t>(args.num_threads, kMaxCounters);
    // Threads' stacks lie apart, so that each thread mostly has the slot that its own cache holds.
    const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) >> 23;
    for (int64_t i = 0; i < slots; ++i) {
      const int64_t slot = static_cast<int64_t>((here + static_cast<uintptr_t>(i)) %
                                                static_cast<uintptr_t>(slots));
      int32_t* const taken = static_cast<int32_t*>(args.scratch) + slot;
      if (__atomic_exchange_n(taken, 1, __ATOMIC_ACQUIRE) != 0) continue;
      taken_ = taken;
      pack(static_cast<std::byte*>(args.scratch) + kCounterBytes + slot * packed_bytes<Layer>(),
           rows.count);
      return;
    }
  }
  ~PackedRows() {
    if (taken_ != nullptr) __atomic_store_n(taken_, 0, __ATOMIC_RELEASE);
  }
  PackedRows(const PackedRows&) = delete;

  const Q8Rows& rows() const { return rows_; }

 private:
  void pack(std::byte* to, int64_t count) {
    const Q8Rows packed{q8_view(to, count, Layer::kInputs), count, 0};
    for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
      const int64_t from = rows_.index(slab), at = packed.index(slab);
      const Q8View &old = rows_.view, &made = packed.view;
      std::memcpy(made.codes + at * kQ8Bytes, old.codes + from * kQ8Bytes, count * kQ8Bytes);
      std::memcpy(made.scales + at, old.scales + from, count * sizeof *old.scales);
      std::memcpy(made.scaled_sums + at, old.scaled_sums + from, count * sizeof *old.scaled_sums);
      std::memcpy(made.sums + at, old.sums + from, count * sizeof *old.sums);
    }
    rows_ = packed;
  }

  Q8Rows rows_;
  int32_t* taken_ = nullptr;
};

// Which of at most kMostRows rows have a second digit, slab by slab: a bit a row.
template <class Layer>
struct RefinedRows {
  static_assert(kMostRows <= 64);
  uint64_t of_slab[num_slabs<Layer>()];

  RefinedRows(const Q8Rows& fine, int64_t count) {
    for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
      const float* scales = fine.view.scales + fine.index(slab);
      of_slab[slab] = 0;
      for (int64_t row = 0; row < count; row += 8) {
        const __m256 eight = load_first(scales + row, count - row);
        const __m256 differ = _mm256_cmp_ps(eight, _mm256_setzero_ps(), _CMP_NEQ_UQ);
        of_slab[slab] |= static_cast<uint64_t>(_mm256_movemask_ps(differ)) << row;
      }
    }
  }
};

// Fetches what a slab's rows with second digits need: they lie apart, in lines of their own.
template <class Layer>
static inline void prefetch_refined(const Q8Rows& fine, int64_t slab,
                                    const RefinedRows<Layer>& refined) {
  if (slab >= num_slabs<Layer>()) return;
  const int64_t first = fine.index(slab);
  for (uint64_t left = refined.of_slab[slab]; left != 0; left &= left - 1) {
    const int64_t index = first + std::countr_zero(left);
    _mm_prefetch(reinterpret_cast<const char*>(fine.view.codes + index * kQ8Bytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(fine.view.scales + index), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(fine.view.sums + index), _MM_HINT_T0);
  }
}

// One row: the tiles [begin, end).
template <class Layer>
static inline void q8_gemv(const Operands<Layer>& at, int64_t begin, int64_t end) {
  const Q8View x = q8_view(at.x, 1, Layer::kInputs), fine = q8_view(at.x, 1, Layer::kInputs, 1);
  for (int64_t tile = begin; tile < end; ++tile) {
    __m256 y = _mm256_setzero_ps();
    for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
      const Q8Slab<Layer> loaded = load_slab<Layer>(at, tile, slab);
      y = add_slab<Layer>(loaded, q8_row(x, slab), y);
      if (fine.scales[slab] != 0.0f) y = add_slab<Layer>(loaded, q8_row(fine, slab), y);
    }
    finish<Layer>(at, 0, tile, y);
  }
}

// Adds the products of a slab and the rows of `refined`, a bit a row from index `first` of x on. Not
// inlined, and so the slab unpacked again: GCC would keep its codes in memory for the caller's rows.
template <class Layer>
[[gnu::noinline]] static void add_refined(const Operands<Layer>& at, int64_t tile, int64_t slab,
                                          const Q8View& x, int64_t first, uint64_t refined,
                                          float (*y)[kTileRows]) {
  const Q8Slab<Layer> loaded = load_slab<Layer>(at, tile, slab);
  for (; refined != 0; refined &= refined - 1) {
    const int64_t row = std::countr_zero(refined);
    const Q8Row a = q8_row(x, first + row);
    _mm256_store_ps(y[row], add_slab<Layer>(loaded, a, _mm256_load_ps(y[row])));
  }
}

// Some rows, at most kMostRows, of one tile: a slab is unpacked once for all of them.
template <class Layer>
static inline void q8_gemm_tile(const Operands<Layer>& at, int64_t tile, Rows rows,
                                const Q8Rows& x, const Q8Rows& fine,
                                const RefinedRows<Layer>& refined) {
  alignas(32) float y[kMostRows][kTileRows];
  for (int64_t row = 0; row < rows.count; ++row) _mm256_store_ps(y[row], _mm256_setzero_ps());
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    const Q8Slab<Layer> loaded = load_slab<Layer>(at, tile, slab);
    for (int64_t row = 0; row < rows.count; ++row) {
      const Q8Row a = q8_row(x.view, x.index(slab) + row);
      _mm256_store_ps(y[row], add_slab<Layer>(loaded, a, _mm256_load_ps(y[row])));
    }
    if (const uint64_t some = refined.of_slab[slab]) {
      add_refined<Layer>(at, tile, slab, fine.view, fine.index(slab), some, y);
    }
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    finish<Layer>(at, rows.first + row, tile, _mm256_load_ps(y[row]));
  }
}

}  // namespace atsc

#if defined(__AVX512BW__)
#include "linear_q8_512.h"
#endif
#if defined(__AMX_INT8__) || defined(ATSC_EMULATED_AMX)
#define ATSC_HAS_AMX
#include "linear_q8_amx.h"
#endif

namespace atsc {

// Some rows, at most kMostRows, of the tiles [begin, end).
template <class Layer>
static inline void q8_gemm(const KernelArgs& args, const Operands<Layer>& at, int64_t begin,
                           int64_t end, Rows rows) {
  const PackedRows<Layer> packed(args, at, rows, (end - begin) / 2);
  const Q8Rows& x = packed.rows();
  const Q8Rows fine{q8_view(at.x, args.rows, Layer::kInputs, 1), args.rows, rows.first};
  const RefinedRows<Layer> refined(fine, rows.count);
#if defined(ATSC_HAS_AMX)
  if constexpr (num_halves<Layer>() == 1) {
    q8_gemm_tiles<Layer>(at, begin, end, rows, x, fine, refined);
    return;
  }
#endif
#if defined(__AVX512BW__)
  for (int64_t tile = begin; tile < end; tile += 2) {
    q8_gemm_pair<Layer>(at, tile, std::min(tile + 2, end), rows, x, fine, refined);
  }
#else
  for (int64_t tile = begin; tile < end; ++tile) {
    q8_gemm_tile<Layer>(at, tile, rows, x, fine, refined);
  }
#endif
}

}  // namespace atsc
