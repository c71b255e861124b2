// What a timed unit reads: numbers like those of a model at work. Of zeros no block would have a
// second digit (compiler/ops/quantize.py), and a GPU takes less power for them, so that its clocks
// are higher than in use. Always the same numbers, so that times can be compared.
#pragma once

#include <cstddef>
#include <cstdint>

namespace atsc {

// Floats [rows][width], about normally distributed with variance 1; but eight times as large in a
// tenth of the blocks of 32, which are mostly those of the same columns in all rows.
void fill_activations(float* values, int64_t rows, int64_t width);

// fp16 numbers of either sign, from 1/8 to 1/2.
void fill_cache(std::byte* cache, uint64_t bytes);

}  // namespace atsc
