// The part of linear_q8_512.h that AMX does better: 16 rows by 16 outputs by 32 K in one instruction.
//
// The products of a slab are scaled in float, so that accumulators leave their tiles after each slab:
// into one of two buffers, while the vector units scale what the slab before left in the other one.
// On a Sapphire Rapids core 2.0 times as fast as VNNI, with weights and activations in its caches.
#pragma once

#include "amx_tiles.h"
#include "linear_q8_512.h"

namespace atsc {

inline constexpr int64_t kAmxRows = 16;  // of a tile
inline constexpr int kAmxGroups = kMostRows / kAmxRows;
static_assert(kMostRows == 64, "tiles 0 to 3 are four groups of rows");

// Tile registers: 0 to 3 the sums of 16 rows each, of which 3 has those of the last group if that is
// not whole; 4 and 5 activations of whole groups, 6 of the last one; 7 weights.
struct AmxTiles {
  explicit AmxTiles(int64_t rows) : whole(static_cast<int>(rows / kAmxRows)) {
    const auto rest = static_cast<uint8_t>(rows % kAmxRows);
    has_rest = rest != 0;
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = kAmxRows;
      config.bytes_of_row[tile] = 4 * kAmxRows;
    }
    if (has_rest) config.rows[3] = config.rows[6] = rest;
    for (int tile = 4; tile < 7; ++tile) config.bytes_of_row[tile] = kQ8Bytes;
    config.rows[7] = kQ8Block / 4;
    configure_tiles(config);
  }
  ~AmxTiles() { release_tiles(); }
  AmxTiles(const AmxTiles&) = delete;

  int whole;  // groups of 16 rows
  bool has_rest;
};

using AmxSums = int32_t[kMostRows][2 * kTileRows];

// Integer products of a slab's codes, 4 k of 16 outputs in each of eight rows, and rows from x on.
static inline void multiply_tiles(const AmxTiles& tiles, const int8_t* x, const __m512i* codes,
                                  AmxSums& sums) {
  constexpr int64_t kStep = kAmxRows * kQ8Bytes;
  constexpr int64_t kStride = sizeof sums[0];
  ATSC_TILE_LOAD(7, codes, sizeof codes[0]);
  if (tiles.whole > 0) {
    ATSC_TILE_ZERO(0);
    ATSC_TILE_LOAD(4, x, kQ8Bytes);
    ATSC_TILE_MULTIPLY(0, 4, 7);
  }
  if (tiles.whole > 1) {
    ATSC_TILE_ZERO(1);
    ATSC_TILE_LOAD(5, x + kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(1, 5, 7);
  }
  if (tiles.whole > 2) {
    ATSC_TILE_ZERO(2);
    ATSC_TILE_LOAD(4, x + 2 * kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(2, 4, 7);
  }
  if (tiles.has_rest) {
    ATSC_TILE_ZERO(3);
    ATSC_TILE_LOAD(6, x + tiles.whole * kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(3, 6, 7);
    ATSC_TILE_STORE(3, sums[tiles.whole * kAmxRows], kStride);
  } else if (tiles.whole > 3) {
    ATSC_TILE_ZERO(3);
    ATSC_TILE_LOAD(5, x + 3 * kStep, kQ8Bytes);
    ATSC_TILE_MULTIPLY(3, 5, 7);
    ATSC_TILE_STORE(3, sums[3 * kAmxRows], kStride);
  }
  if (tiles.whole > 0) ATSC_TILE_STORE(0, sums[0], kStride);
  if (tiles.whole > 1) ATSC_TILE_STORE(1, sums[kAmxRows], kStride);
  if (tiles.whole > 2) ATSC_TILE_STORE(2, sums[2 * kAmxRows], kStride);
}

// What turns a slab's integer products into the layer's terms.
struct AmxTerms {
  __m512 scale, offset;
};

// y + a slab's integer products with the row at `index` of x, in float.
template <class Layer>
static inline void scale_row(const AmxTerms& terms, const int32_t* sums, const Q8View& x,
                             int64_t index, float* y) {
  constexpr int32_t kCentre = Layer::kFormat == Format::int4 ? 8 : 128;
  __m512i sum = _mm512_load_si512(sums);
  __m512 all = _mm512_load_ps(y);
  if constexpr (starts_at_centre<Layer>()) {
    sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(kCentre * x.sums[index]));
  } else {
    all = _mm512_fmadd_ps(terms.offset, _mm512_set1_ps(x.scaled_sums[index]), all);
  }
  const __m512 factor = _mm512_mul_ps(terms.scale, _mm512_set1_ps(x.scales[index]));
  const __m512 product = _mm512_maskz_cvtepi32_ps(0xffff, sum);
  _mm512_store_ps(y, _mm512_fmadd_ps(product, factor, all));
}

template <class Layer>
static inline void scale_rows(const AmxTerms& terms, const AmxSums& sums, const Q8View& x,
                              int64_t first, int64_t count, float (*y)[2 * kTileRows]) {
#pragma GCC unroll 4
  for (int64_t row = 0; row < count; ++row) {
    scale_row<Layer>(terms, sums[row], x, first + row, y[row]);
  }
}

// Adds the products of second digits, which the rows of `refined` have, a bit a row. Tiles multiply
// the others too, so that they pay from some rows on; those have no digits to scale.
template <class Layer>
static inline void add_fine_rows(const AmxTiles& tiles, const Q8SlabPair<Layer>& slab,
                                 const Q8View& fine, int64_t first, uint64_t refined,
                                 float (*y)[2 * kTileRows]) {
  constexpr int kFewestInTiles = 12;
  alignas(64) AmxSums sums;
  const bool in_tiles = std::popcount(refined) >= kFewestInTiles;
  if (in_tiles) multiply_tiles(tiles, fine.codes + first * kQ8Bytes, slab.codes, sums);
  for (; refined != 0; refined &= refined - 1) {
    const int64_t row = std::countr_zero(refined);
    if (in_tiles) {
      scale_row<Layer>({slab.scale[0], slab.offset[0]}, sums[row], fine, first + row, y[row]);
    } else {
      add_one_row<Layer>(slab, fine, first + row, y + row);
    }
  }
}

// As q8_gemm_pair, for blocks of weights of at least 32 K; `tiles` are configured for these rows.
template <class Layer>
static inline void q8_gemm_amx(const Operands<Layer>& at, int64_t tile, int64_t end, int64_t all,
                               Rows rows, const RefinedRows<Layer>& refined,
                               const AmxTiles& tiles) {
  const Q8View x = q8_view(at.x, all, Layer::kInputs), fine = q8_view(at.x, all, Layer::kInputs, 1);
  alignas(64) float y[kMostRows][2 * kTileRows];
  alignas(64) AmxSums sums[2];
  AmxTerms before;
  for (int64_t row = 0; row < rows.count; ++row) _mm512_store_ps(y[row], _mm512_setzero_ps());
  for (int64_t slab = 0; slab < num_slabs<Layer>(); ++slab) {
    const Q8SlabPair<Layer> loaded = load_slab_pair<Layer>(at, tile, end - 1, slab);
    const int64_t first = slab * all + rows.first;
    multiply_tiles(tiles, x.codes + first * kQ8Bytes, loaded.codes, sums[slab & 1]);
    if (slab > 0) scale_rows<Layer>(before, sums[~slab & 1], x, first - all, rows.count, y);
    before = {loaded.scale[0], loaded.offset[0]};
    if (const uint64_t some = refined.of_slab[slab]) {
      add_fine_rows<Layer>(tiles, loaded, fine, first, some, y);
    }
  }
  constexpr int64_t kLast = num_slabs<Layer>() - 1;
  scale_rows<Layer>(before, sums[kLast & 1], x, kLast * all + rows.first, rows.count, y);
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; tile + i < end; ++i) {
      finish<Layer>(at, rows.first + row, tile + i, _mm256_load_ps(y[row] + i * kTileRows));
    }
  }
}

}  // namespace atsc
