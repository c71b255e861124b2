"""Tile sizes and variants of the CUDA kernels: everything that templates leave to decide.

GEMV: a block holds 32 outputs (8 of float weights) and its warps share out K. As many warps as the
GPU holds at once for all blocks together make one wave of equal shares, with no tail; a warp takes
at least one full load. GEMM: 128 x 128 or 128 x 64 outputs a block, whichever keeps the
multiprocessors more evenly busy at a usual prefill chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atsc.codegen.layout import Q8_BLOCK, TILE_ROWS

WARPS_OF_SM = 32
"""Resident warps of one multiprocessor with 64 registers a thread."""
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Most shared memory of one block; others have what sm_89 has."""
CHUNK = 512
"""Rows of a usual prefill chunk."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels are tuned for: compute capability (90 for sm_90) and multiprocessors."""

    sm: int
    num_sms: int


Tile = dict[str, int]
Params = Mapping[str, Any]


def variant_of(op: str, params: Params) -> str:
    """What follows the stem in the template's name."""
    if op != "linear":
        return ""
    return "_blocks" if params["matrix"]["block"] else "_floats"


def tile_of(stem: str, params: Params, gpu: Gpu) -> Tile:
    """The sizes that the template sees as `tile`; empty for kernels that need none."""
    choose = _TILES.get(stem)
    return choose(params, gpu) if choose else {}


def _warps(num_blocks: int, steps: int, most: int, gpu: Gpu) -> int:
    """Warps of a block, a power of two: one wave of all blocks, at least one step for a warp."""
    warps = 4
    while 2 * warps <= min(most, steps) and num_blocks * 2 * warps <= gpu.num_sms * WARPS_OF_SM:
        warps *= 2
    return warps


def _gemv_blocks(params: Params, gpu: Gpu) -> Tile:
    matrix, quantized = params["matrix"], params["kind"]["x"] == "q8"
    unroll, stages = 4 if quantized and matrix["format"] == "int4" else 2, 3
    most = 16
    while _gemv_bytes(params, most, unroll, stages) > SHARED_BYTES.get(gpu.sm, SHARED_BYTES[89]):
        most //= 2
    steps = -(-matrix["k"] // (Q8_BLOCK * unroll))
    warps = _warps(-(-matrix["n"] // 32), steps, most, gpu)
    return gemv_blocks_tile(params, warps, unroll, stages)


def gemv_blocks_tile(params: Params, warps: int, unroll: int, stages: int) -> Tile:
    """All sizes of a linear_gemv_blocks kernel, from those that can be chosen."""
    return {
        "warps": warps,
        "unroll": unroll,
        "stages": stages,
        "stage_bytes": _weight_bytes(params["matrix"], unroll, 4),
        # Float activations stand beside the ring as digits.
        "staged_bytes": 0 if params["kind"]["x"] == "q8" else unroll * 3 * 8 * 64,
    }


def _gemv_bytes(params: Params, warps: int, unroll: int, stages: int) -> int:
    """Shared memory of a block: the rings, and the sums of its warps."""
    tile = gemv_blocks_tile(params, warps, unroll, stages)
    return warps * (stages * tile["stage_bytes"] + tile["staged_bytes"] + 1024)


def _gemv_floats(params: Params, gpu: Gpu) -> Tile:
    matrix, unroll = params["matrix"], 4
    k_of_step = 16 if matrix["format"] == "f32" else 32
    steps = -(-matrix["k"] // (k_of_step * unroll))
    return {"warps": _warps(-(-matrix["n"] // TILE_ROWS), steps, 16, gpu), "unroll": unroll}


def _gemm_blocks(params: Params, gpu: Gpu) -> Tile:
    matrix, quantized = params["matrix"], params["kind"]["x"] == "q8"

    def busy_share(columns: int) -> float:
        blocks = CHUNK // 128 * -(-matrix["n"] // columns)
        return blocks / (-(-blocks // gpu.num_sms) * gpu.num_sms)

    # Wider blocks read x less often; narrower ones must win by some percent.
    columns = 128 if quantized and busy_share(128) > 0.9 * busy_share(64) else 64
    slabs = 2 if quantized and -(-matrix["k"] // Q8_BLOCK) % 2 == 0 else 1
    stages = 4 if quantized else 2
    return gemm_blocks_tile(params, columns, slabs, stages)


def gemm_blocks_tile(params: Params, columns: int, slabs: int, stages: int) -> Tile:
    """All sizes of a linear_gemm_blocks kernel, from those that can be chosen."""
    terms = 1 if params["kind"]["x"] == "q8" else 3
    of_rows = 128 * slabs * (Q8_BLOCK * terms + 8)
    return {
        "rows": 128,
        "columns": columns,
        "threads": columns * 2,
        "slabs": slabs,
        "stages": stages,
        "stage_bytes": of_rows + _weight_bytes(params["matrix"], slabs, columns // TILE_ROWS),
        "resident": 3 if columns == 64 else 1,
    }


def _weight_bytes(matrix: Mapping[str, Any], slabs: int, tiles: int) -> int:
    """Bytes of a stage's weights in the templates' struct Stage."""
    codes = TILE_ROWS * Q8_BLOCK * slabs // (2 if matrix["format"] == "int4" else 1)
    slots = max(1, slabs * Q8_BLOCK // matrix["block"])
    scales = TILE_ROWS * {"f16": 2, "f32": 4}[matrix["scale"]]
    zeros = {"none": 4, "u8": 8, "f16": 16, "f32": 32}[matrix["zeros"]]
    return -(-tiles * (codes + slots * (scales + zeros)) // 16) * 16


_TILES: Mapping[str, Callable[[Params, Gpu], Tile]] = {
    "linear_gemv_blocks": _gemv_blocks,
    "linear_gemv_floats": _gemv_floats,
    "linear_gemm_blocks": _gemm_blocks,
}
