// Frames (windows.h) of images of bytes.
#pragma once

#include <cstdint>

#include "scalar.h"

namespace atsc::graph {

// One row of a frame whose elements are quads: the same pixel of four channels. Null rows are above or
// below the image; `channels` of the four exist; `flip` as in product_i8.h.
static inline void quad_row(uint8_t* to, const uint8_t* row, int64_t channels,
                            int64_t channel_stride, int64_t size, int64_t before, int64_t stride,
                            int64_t phases, int64_t width, uint8_t outside, uint8_t flip) {
  for (int64_t phase = 0; phase < phases; ++phase, to += 4 * width) {
    const int64_t shift = phase - before;
    const auto [begin, end] = columns_inside(row == nullptr ? 0 : size, stride, shift, width);
    for (int64_t x = 0; x < 4 * begin; ++x) to[x] = outside;
    if (begin < end) {
      // Channels that are missing meet weights of 0.
      const uint8_t* const one = row;
      const uint8_t* const two = row + (channels > 1 ? channel_stride : 0);
      const uint8_t* const three = row + (channels > 2 ? 2 * channel_stride : 0);
      const uint8_t* const four = row + (channels > 3 ? 3 * channel_stride : 0);
#pragma GCC ivdep  // a frame is nobody's image
      for (int64_t x = begin; x < end; ++x) {
        const int64_t at = x * stride + shift;
        to[4 * x] = one[at] ^ flip;
        to[4 * x + 1] = two[at] ^ flip;
        to[4 * x + 2] = three[at] ^ flip;
        to[4 * x + 3] = four[at] ^ flip;
      }
    }
    for (int64_t x = 4 * (begin > end ? begin : end); x < 4 * width; ++x) to[x] = outside;
  }
}

}  // namespace atsc::graph
