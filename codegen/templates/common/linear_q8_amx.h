// The part of linear_q8_512.h that AMX does better: 16 rows by 16 outputs by 32 K in one instruction.
//
// The products of a slab are scaled in float, so that accumulators leave their tiles after each slab.
// This, not the products, is what takes time: a row of 16 sums costs a store by the tile, a load, three
// vector operations, and a load and a store of the float sums. Hence
//   codes are signed (code - 8, as stored for int8): no zero point to subtract from every sum,
//   two slabs are scaled together: float sums are loaded and stored half as often,
//   two pairs of tiles take turns, so that activations come from the level-2 cache half as often,
//   and the vector units scale one unit of work while tiles multiply the next.
// Rows with second digits are gathered, so that tiles hold no others.
#pragma once

#include "amx_tiles.h"
#include "linear_q8_512.h"

namespace atsc {

inline constexpr int64_t kAmxRows = 16;  // of a tile
inline constexpr int kAmxSlabs = 2;      // of a unit of work
static_assert(kMostRows == 64, "tiles 0 to 3 are four groups of rows");

// Tile registers: 0 to 3 sums of 16 rows each; 4 and 5 activations; 6 weights.
class AmxTiles {
 public:
  AmxTiles() {
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 7; ++tile) {
      config.rows[tile] = tile < 6 ? kAmxRows : kQ8Block / 4;
      config.bytes_of_row[tile] = tile == 4 || tile == 5 ? kQ8Bytes : 4 * 2 * kTileRows;
    }
    configure_tiles(config);
  }
  ~AmxTiles() { release_tiles(); }
  AmxTiles(const AmxTiles&) = delete;
};

using AmxSums = int32_t[kMostRows][2 * kTileRows];

// Two tiles' weights of one slab, as Q8SlabPair but signed.
struct AmxSlab {
  __m512i codes[kQ8Block / 4];
  __m512 scale, offset;
};

// Whether a code stands for itself plus an offset.
template <class Layer>
constexpr bool has_amx_offset() {
  return Layer::kZeros != Number::none;
}

template <class Layer>
static inline void load_amx_slab(const Operands<Layer>& at, int64_t tile, int64_t second,
                                 int64_t slab, AmxSlab& made) {
  const auto* codes = static_cast<const uint8_t*>(at.codes);
  const uint8_t* low = codes + (tile * num_slabs<Layer>() + slab) * slab_bytes<Layer>();
  const uint8_t* high = codes + (second * num_slabs<Layer>() + slab) * slab_bytes<Layer>();
  prefetch_ahead<slab_bytes<Layer>()>(low);
  prefetch_ahead<slab_bytes<Layer>()>(high);
  if constexpr (Layer::kFormat == Format::int4) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i centre = _mm512_set1_epi8(has_amx_offset<Layer>() ? 0 : 8);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m512i both = join(load_bytes(low + 32 * g), load_bytes(high + 32 * g));
      const __m512i upper = _mm512_maskz_srli_epi16(~__mmask32{0}, both, 4);
      made.codes[g] = _mm512_sub_epi8(_mm512_and_si512(both, mask), centre);
      made.codes[g + 4] = _mm512_sub_epi8(_mm512_and_si512(upper, mask), centre);
    }
  } else {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      made.codes[g] = join(load_bytes(low + 32 * g), load_bytes(high + 32 * g));
    }
  }
  const int64_t block = slab * kQ8Block / Layer::kBlock;
  const Terms first = load_terms<Layer, true>(at.scales, at.zeros, tile, block);
  const Terms other = load_terms<Layer, true>(at.scales, at.zeros, second, block);
  made.scale = join(first.scale, other.scale);
  made.offset = join(first.offset, other.offset);
}

// Integer products of the weights in tile 6 and `count` rows from x on, which lie one behind the
// other. Reads and writes whole groups of 16 rows; what behind `count` means nothing.
static inline void multiply_rows(const int8_t* x, int64_t count, AmxSums& sums) {
  constexpr int64_t kStep = kAmxRows * kQ8Bytes;
  constexpr int64_t kStride = sizeof sums[0];
  const int64_t groups = (count + kAmxRows - 1) / kAmxRows;
  ATSC_TILE_ZERO(0);
  ATSC_TILE_LOAD(4, x, kQ8Bytes);
  ATSC_TILE_MULTIPLY(0, 4, 6);
  if (groups > 1) {
    ATSC_TILE_ZERO(1);
    ATSC_TILE_LOAD(5, x + kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(1, 5, 6);
  }
  if (groups > 2) {
    ATSC_TILE_ZERO(2);
    ATSC_TILE_LOAD(4, x + 2 * kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(2, 4, 6);
  }
  if (groups > 3) {
    ATSC_TILE_ZERO(3);
    ATSC_TILE_LOAD(5, x + 3 * kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(3, 5, 6);
  }
  ATSC_TILE_STORE(0, sums[0], kStride);
  if (groups > 1) ATSC_TILE_STORE(1, sums[kAmxRows], kStride);
  if (groups > 2) ATSC_TILE_STORE(2, sums[2 * kAmxRows], kStride);
  if (groups > 3) ATSC_TILE_STORE(3, sums[3 * kAmxRows], kStride);
}

// What tiles have made of two tiles' weights and one or two slabs, and what scales it.
struct AmxUnit {
  AmxSlab slabs[kAmxSlabs];
  alignas(64) AmxSums sums[kAmxSlabs], fine[kAmxSlabs];  // of all rows; of those gathered
};

// Second digits of the rows that have them, of one or two slabs.
struct GatheredRows {
  alignas(64) int8_t codes[kAmxSlabs][kMostRows * kQ8Bytes];
  int64_t counts[kAmxSlabs];
};

static inline void gather_rows(const Q8Rows& fine, int64_t slab, int place, uint64_t refined,
                               GatheredRows& gathered) {
  const int8_t* from = fine.view.codes + fine.index(slab) * kQ8Bytes;
  gathered.counts[place] = 0;
  for (; refined != 0; refined &= refined - 1) {
    const int8_t* row = from + std::countr_zero(refined) * kQ8Bytes;
    int8_t* to = gathered.codes[place] + gathered.counts[place]++ * kQ8Bytes;
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), load_bytes(row));
  }
}

// y + a slab's integer products with the row at `index` of x, in float.
template <class Layer>
static inline __m512 scale_row(const AmxSlab& slab, const int32_t* sums, const Q8View& x,
                               int64_t index, __m512 y) {
  if constexpr (has_amx_offset<Layer>()) {
    y = _mm512_fmadd_ps(slab.offset, _mm512_set1_ps(x.scaled_sums[index]), y);
  }
  const __m512 factor = _mm512_mul_ps(slab.scale, _mm512_set1_ps(x.scales[index]));
  const __m512 product = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_load_si512(sums));
  return _mm512_fmadd_ps(product, factor, y);
}

// Adds a unit to the float sums of its rows.
template <class Layer, int kSlabs>
static inline void add_unit(const AmxUnit& unit, int64_t slab, int64_t count, const Q8Rows& x,
                            const Q8Rows& fine, const RefinedRows<Layer>& refined,
                            float (*y)[2 * kTileRows]) {
  const int64_t first = x.index(slab);
#pragma GCC unroll 4
  for (int64_t row = 0; row < count; ++row) {
    __m512 sum = _mm512_load_ps(y[row]);
#pragma GCC unroll 2
    for (int i = 0; i < kSlabs; ++i) {
      const int64_t index = first + i * x.stride + row;
      sum = scale_row<Layer>(unit.slabs[i], unit.sums[i][row], x.view, index, sum);
    }
    _mm512_store_ps(y[row], sum);
  }
  for (int i = 0; i < kSlabs; ++i) {
    const int32_t(*sums)[2 * kTileRows] = unit.fine[i];
    for (uint64_t left = refined.of_slab[slab + i]; left != 0; left &= left - 1, ++sums) {
      const int64_t row = std::countr_zero(left), index = fine.index(slab + i) + row;
      const __m512 sum = _mm512_load_ps(y[row]);
      _mm512_store_ps(y[row], scale_row<Layer>(unit.slabs[i], *sums, fine.view, index, sum));
    }
  }
}

// As q8_gemm_pair, for kPairs pairs of tiles and blocks of weights of at least 32 K; the last pair may
// lack its second tile. Tiles are configured.
template <class Layer, int kPairs>
static inline void q8_gemm_amx(const Operands<Layer>& at, int64_t tile, int64_t end, Rows rows,
                               const Q8Rows& x, const Q8Rows& fine,
                               const RefinedRows<Layer>& refined) {
  alignas(64) float y[kPairs][kMostRows][2 * kTileRows];
  AmxUnit units[2];
  GatheredRows gathered;
  int next = 0;  // of units; the other one is to be added
  for (auto& pair : y) {
    for (int64_t row = 0; row < rows.count; ++row) _mm512_store_ps(pair[row], _mm512_setzero_ps());
  }
  const auto multiply = [&]<int kSlabs>(int64_t slab, int pair) {
    AmxUnit& unit = units[next];
    const int64_t first = tile + 2 * pair, second = std::min(first + 1, end - 1);
#pragma GCC unroll 2
    for (int i = 0; i < kSlabs; ++i) {
      load_amx_slab<Layer>(at, first, second, slab + i, unit.slabs[i]);
      ATSC_TILE_LOAD(6, unit.slabs[i].codes, sizeof unit.slabs[i].codes[0]);
      multiply_rows(x.view.codes + x.index(slab + i) * kQ8Bytes, rows.count, unit.sums[i]);
      if (gathered.counts[i] > 0) multiply_rows(gathered.codes[i], gathered.counts[i], unit.fine[i]);
    }
    next ^= 1;
  };
  const auto add = [&]<int kSlabs>(int64_t slab, int pair, int which) {
    add_unit<Layer, kSlabs>(units[which], slab, rows.count, x, fine, refined, y[pair]);
  };
  constexpr int64_t kSlabCount = num_slabs<Layer>(), kWhole = kSlabCount / 2 * 2;
  for (int64_t slab = 0; slab < kWhole; slab += 2) {
    for (int i = 0; i < 2; ++i) {
      gather_rows(fine, slab + i, i, refined.of_slab[slab + i], gathered);
      prefetch_refined<Layer>(fine, slab + i + 2, refined);
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      multiply.template operator()<2>(slab, pair);
      const int64_t before = pair > 0 ? slab : slab - 2;
      if (before >= 0) add.template operator()<2>(before, (pair + kPairs - 1) % kPairs, next);
    }
  }
  if constexpr (kWhole > 0) add.template operator()<2>(kWhole - 2, kPairs - 1, next ^ 1);
  if constexpr (kWhole < kSlabCount) {
    gather_rows(fine, kWhole, 0, refined.of_slab[kWhole], gathered);
    for (int pair = 0; pair < kPairs; ++pair) {
      multiply.template operator()<1>(kWhole, pair);
      add.template operator()<1>(kWhole, pair, next ^ 1);
    }
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; tile + i < end; ++i) {
      const float* sums = y[i / 2][row] + i % 2 * kTileRows;
      finish<Layer>(at, rows.first + row, tile + i, _mm256_load_ps(sums));
    }
  }
}

// Some rows, at most kMostRows, of the tiles [begin, end).
template <class Layer>
static inline void q8_gemm_tiles(const Operands<Layer>& at, int64_t begin, int64_t end, Rows rows,
                                 const Q8Rows& x, const Q8Rows& fine,
                                 const RefinedRows<Layer>& refined) {
  const AmxTiles tiles;
  int64_t tile = begin;
  for (; tile + 3 < end; tile += 4) {
    q8_gemm_amx<Layer, 2>(at, tile, std::min(tile + 4, end), rows, x, fine, refined);
  }
  for (; tile < end; tile += 2) {
    q8_gemm_amx<Layer, 1>(at, tile, std::min(tile + 2, end), rows, x, fine, refined);
  }
}

}  // namespace atsc
