// AMX's tile registers for int8: the instructions, or, where ATSC_EMULATED_AMX is defined, the same
// in plain C++ (tests run it on CPUs without AMX).
//
//     ATSC_TILE_ZERO(tile)
//     ATSC_TILE_LOAD(tile, from, stride), ATSC_TILE_STORE(tile, to, stride)      bytes
//     ATSC_TILE_MULTIPLY(sums, a, b)      TDPBSSD: int32 += int8 x int8, four k at a time
//
// Numbers of tiles are literals, since compilers paste them into the instruction's text.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
#pragma once

#include <cstdint>

namespace atsc {

struct TileConfig {  // what LDTILECFG reads
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_of_row[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace atsc

#if defined(ATSC_EMULATED_AMX)

#include <cstring>

namespace atsc {

struct EmulatedTiles {
  TileConfig config;
  uint8_t bytes[8][16][64];
};
static thread_local EmulatedTiles emulated_tiles;

static inline void configure_tiles(const TileConfig& config) {
  std::memset(&emulated_tiles, 0, sizeof emulated_tiles);
  emulated_tiles.config = config;
}

static inline void release_tiles() { std::memset(&emulated_tiles, 0, sizeof emulated_tiles); }

static inline void zero_tile(int tile) {
  std::memset(emulated_tiles.bytes[tile], 0, sizeof emulated_tiles.bytes[tile]);
}

static inline void load_tile(int tile, const void* from, int64_t stride) {
  const TileConfig& config = emulated_tiles.config;
  zero_tile(tile);
  for (int row = 0; row < config.rows[tile]; ++row) {
    std::memcpy(emulated_tiles.bytes[tile][row], static_cast<const uint8_t*>(from) + row * stride,
                config.bytes_of_row[tile]);
  }
}

static inline void store_tile(int tile, void* to, int64_t stride) {
  const TileConfig& config = emulated_tiles.config;
  for (int row = 0; row < config.rows[tile]; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated_tiles.bytes[tile][row],
                config.bytes_of_row[tile]);
  }
}

static inline void multiply_tile(int sums, int a, int b) {
  const TileConfig& config = emulated_tiles.config;
  for (int row = 0; row < config.rows[sums]; ++row) {
    for (int column = 0; column < config.bytes_of_row[sums] / 4; ++column) {
      int32_t sum;
      std::memcpy(&sum, emulated_tiles.bytes[sums][row] + 4 * column, sizeof sum);
      for (int k = 0; k < config.bytes_of_row[a]; ++k) {
        sum += static_cast<int8_t>(emulated_tiles.bytes[a][row][k]) *
               static_cast<int8_t>(emulated_tiles.bytes[b][k / 4][4 * column + k % 4]);
      }
      std::memcpy(emulated_tiles.bytes[sums][row] + 4 * column, &sum, sizeof sum);
    }
  }
}

}  // namespace atsc

#define ATSC_TILE_ZERO(tile) ::atsc::zero_tile(tile)
#define ATSC_TILE_LOAD(tile, from, stride) ::atsc::load_tile(tile, from, stride)
#define ATSC_TILE_STORE(tile, to, stride) ::atsc::store_tile(tile, to, stride)
#define ATSC_TILE_MULTIPLY(sums, a, b) ::atsc::multiply_tile(sums, a, b)

#else

#include <immintrin.h>

namespace atsc {

// What lies at p is in memory, whatever the compiler has planned. GCC 12 and 13 are not told that
// loads of tiles read memory, and of a configuration only that its first eight bytes are read.
static inline void settle(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

static inline void configure_tiles(const TileConfig& config) {
  settle(&config);
  _tile_loadconfig(&config);
}
static inline void release_tiles() { _tile_release(); }

}  // namespace atsc

#define ATSC_TILE_ZERO(tile) _tile_zero(tile)
#define ATSC_TILE_LOAD(tile, from, stride) \
  do {                                     \
    ::atsc::settle(from);                  \
    _tile_loadd(tile, from, stride);       \
  } while (false)
#define ATSC_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define ATSC_TILE_MULTIPLY(sums, a, b) _tile_dpbssd(sums, a, b)

#endif
