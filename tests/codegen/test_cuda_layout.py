"""The weight layout suits CUDA: one word a lane, checked on the CPU; NVRTC compiles it for all."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from kernel_runner import aligned

from atsc.codegen.cpu import matrix_params
from atsc.codegen.cuda import SM_LEVELS
from atsc.codegen.layout import StoredWeight, part_chunks, store
from atsc.codegen.nvrtc import CudaUnit, compile_cuda
from atsc.codegen.render import render
from atsc.codegen.toolchain import Unit, compile_units, link_library
from atsc.compiler.ir import BlockFormat, DType, Weight
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.weights import dequantize

# What the CUDA source needs to be C++: threads run one after the other, which is right here because
# no thread of the kernel reads what another writes.
_PRELUDE = """
#include <immintrin.h>
#include <cstring>
#define __device__
#define __global__
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim;
static float host_from_f16(unsigned short bits) { return _cvtsh_ss(bits); }
[[maybe_unused]] static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
"""
_LAUNCH = """
extern "C" void launch_{symbol}(unsigned grid, unsigned block, const unsigned* codes,
                                const void* scales, const void* zeros, float* w) {{
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) {symbol}(codes, scales, zeros, w);
}}
"""


def dequantize_source(stored: StoredWeight, symbol: str) -> str:
    params = {"symbol": symbol, "matrix": matrix_params(stored)}
    return render("cuda/dequantize__sm75.cu.j2", params)


def weights() -> dict[str, Weight]:
    rng = np.random.default_rng(7)
    found = {}
    for bits in (4, 8):
        for block, zero in ((16, None), (32, None), (32, DType.U8), (128, DType.F32)):
            fmt = BlockFormat(bits, block, zero is not None)
            name = f"{fmt}_{zero.value if zero else 'none'}"
            found[name] = random_block_weight(rng, (21, 176), fmt, zero or DType.U8)
    found["f16"] = random_float_weight(rng, (21, 175), DType.F16)
    found["bf16"] = random_float_weight(rng, (16, 90), DType.BF16)
    return found


WEIGHTS = weights()


def parts_of(stored: StoredWeight) -> list[np.ndarray]:
    found = []
    for part in stored.parts:
        memory = aligned(part.num_bytes)
        memory[:] = np.concatenate([c.view(np.uint8).ravel() for c in part_chunks(stored, part)])
        found.append(memory)
    return found


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    units = [
        Unit(
            name,
            _PRELUDE + dequantize_source(store(weight, True), name) + _LAUNCH.format(symbol=name),
            ("-march=x86-64-v3", "-fvisibility=default", "-Wno-unused-function"),
        )
        for name, weight in WEIGHTS.items()
    ]
    library = tmp_path_factory.mktemp("cuda") / "emulated.so"
    link_library(compile_units(units), library)
    return ctypes.CDLL(str(library))


@pytest.mark.toolchain
@pytest.mark.parametrize("name", WEIGHTS)
def test_each_lane_loads_its_fragment(name: str, emulated: ctypes.CDLL) -> None:
    weight = WEIGHTS[name]
    stored = store(weight, True)
    parts = parts_of(stored)
    outputs, width = weight.shape
    actual = np.full((outputs, width), np.nan, np.float32)
    pointers = [ctypes.c_void_p(part.ctypes.data) for part in parts]
    pointers += [ctypes.c_void_p()] * (3 - len(parts))
    step = 32 if isinstance(weight.format, BlockFormat) else 16
    warps = -(-outputs // 8) * -(-width // step)
    launch = getattr(emulated, f"launch_{name}")
    launch(-(-warps // 4), 128, *pointers, ctypes.c_void_p(actual.ctypes.data))
    expected = dequantize(weight)
    # Offsets are scale * zero rounded once more; all else is the same arithmetic.
    tolerance = 1e-6 if stored.zero_kind in ("f16", "f32") else 0.0
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sm", SM_LEVELS)
def test_it_compiles_for_every_gpu(sm: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    names = ("int4b32_none", "int8b32z_u8", "int4b128z_f32", "f16")
    units = [CudaUnit(n, dequantize_source(store(WEIGHTS[n], True), n), sm) for n in names]
    for name, path in zip(names, compile_cuda(units), strict=True):
        cubin = path.read_bytes()
        assert cubin.startswith(b"\x7fELF")
        assert name.encode() in cubin
