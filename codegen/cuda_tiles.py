"""Tile sizes and variants of the CUDA kernels: everything that templates leave to decide.

GEMV: a block holds 32 outputs (8 of float weights) and its warps share out K. They are as many as
make one wave of all blocks, with no tail; a warp takes at least one full load. GEMM: 128 x 64
outputs a block, three blocks a multiprocessor, were 15 to 50 % faster than 128 x 128 on an H200;
float activations, which each block converts, want 128 x 128. Where so few blocks leave
multiprocessors idle, 64 x 64, each warp with half the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atsc.codegen.layout import Q8_BLOCK, TILE_ROWS

WARPS_OF_SM = 18
"""Warps of a GEMV that a multiprocessor should hold; on an H200 more made every shape slower."""
CHUNK = 512
"""Rows of a usual prefill chunk."""
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
"""Most shared memory of one block; others have what sm_89 has."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels are tuned for: compute capability (90 for sm_90) and multiprocessors."""

    sm: int
    num_sms: int


Tile = dict[str, int]
Params = Mapping[str, Any]


def variant_of(op: str, params: Params, gpu: Gpu) -> str:
    """What follows the stem in the template's name."""
    if op != "linear":
        return ""
    matrix = params["matrix"]
    if matrix["block"]:
        return "_blocks"
    # sm_75 has no bf16, and its f16 products run in fp32 as well.
    few_or_old = params["few_rows"] or gpu.sm < 80
    return "_floats" if few_or_old or matrix["format"] == "f32" else "_halves"


def is_served(op: str, params: Params) -> bool:
    """Whether registers and shared memory hold what the operator's templates keep there."""
    if op != "attention":
        return True
    attrs = params["attrs"]
    return bool(attrs["head_size"] <= 256 and attrs["num_heads"] <= 1024)


def tile_of(stem: str, params: Params, gpu: Gpu) -> Tile:
    """The sizes that the template sees as `tile`; empty for kernels that need none."""
    choose = _TILES.get(stem)
    return choose(params, gpu) if choose else {}


def _most_shared(gpu: Gpu) -> int:
    return SHARED_BYTES.get(gpu.sm, SHARED_BYTES[89])


def _warps(num_blocks: int, steps: int, most: int, gpu: Gpu) -> int:
    """Warps of a block, a power of two: one wave of all blocks, at least one step for a warp."""
    warps = 4
    while 2 * warps <= min(most, steps) and num_blocks * 2 * warps <= gpu.num_sms * WARPS_OF_SM:
        warps *= 2
    return warps


def _gemv_blocks(params: Params, gpu: Gpu) -> Tile:
    matrix, quantized = params["matrix"], params["kind"]["x"] == "q8"
    unroll, stages = (4, 2) if quantized and matrix["format"] == "int4" else (2, 3)
    most = 16
    while _gemv_bytes(params, most, unroll, stages) > _most_shared(gpu):
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
    matrix = params["matrix"]
    if params["kind"]["x"] != "q8":
        # Each block cuts its rows into digits: the wider, the less often.
        return gemm_blocks_tile(params, rows=128, columns=128, slabs=1, stages=3)
    num_blocks = CHUNK // 128 * -(-matrix["n"] // 64)
    rows = 128 if num_blocks >= gpu.num_sms else 64
    slabs = 2 if -(-matrix["k"] // Q8_BLOCK) % 2 == 0 else 1
    stage_bytes = gemm_blocks_tile(params, rows, 64, slabs, 1)["stage_bytes"]
    stages = min(4, _most_shared(gpu) // stage_bytes)
    # Three stages where a fourth would cost the third block; 1 KiB a block is the system's.
    of_block = (_most_shared(gpu) + 1024) // 3 - 1024
    if 3 * stage_bytes <= of_block < 4 * stage_bytes:
        stages = 3
    return gemm_blocks_tile(params, rows, 64, slabs, stages)


def gemm_blocks_tile(params: Params, rows: int, columns: int, slabs: int, stages: int) -> Tile:
    """All sizes of a linear_gemm_blocks kernel, from those that can be chosen."""
    terms = 1 if params["kind"]["x"] == "q8" else 3
    warp_rows = rows // 2
    # Codes, factor and sum of each row; of Q8 rows the factor of the second digit too.
    of_rows = rows * slabs * (Q8_BLOCK * terms + (12 if terms == 1 else 8))
    return {
        "rows": rows,
        "columns": columns,
        "warp_rows": warp_rows,
        "threads": rows // warp_rows * columns,
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
    num_bytes: int = tiles * (codes + slots * (scales + zeros))
    return -(-num_bytes // 16) * 16


def _row(params: Params, gpu: Gpu) -> Tile:
    """A block holds a row in registers."""
    fours = -(-params["width"]["x"] // 4)
    of_thread = -(-fours // 768)
    return {"threads": -(-fours // (32 * of_thread)) * 32}


def _attention_decode(params: Params, gpu: Gpu) -> Tile:
    """One wave of blocks; registers allow eight warps a multiprocessor."""
    warps = 8 if params["attrs"]["head_size"] <= 128 else 4
    blocks = gpu.num_sms * (8 // warps) // params["attrs"]["kv_heads"]
    return {"warps": warps, "blocks": max(blocks, 1)}


def _attention_prefill(params: Params, gpu: Gpu) -> Tile:
    """The largest tile that shared memory holds, twice where registers allow two blocks."""
    size = params["attrs"]["head_size"]
    # Warps, tiles of 16 queries a warp, tokens, stages: sums need half the registers. On an H200 a
    # second stage made heads of 64 5 % faster and heads of 128 5 % slower.
    sizes = [(4, 2, 64, 1), (4, 1, 64, 1), (4, 1, 32, 1)]
    if size <= 64:
        sizes.insert(0, (4, 2, 64, 2))
    elif size > 128:
        sizes = [(8, 1, 64, 2), (8, 1, 64, 1), (8, 1, 32, 1), (4, 1, 32, 1), (4, 1, 16, 1)]
    found = [
        attention_prefill_tile(size, *chosen, blocks)
        for blocks in ((2, 1) if size <= 128 else (1,))
        for chosen in sizes
    ]
    return next(t for t in found if t["resident"] * (t["shared"] + 1024) <= _most_shared(gpu))


def attention_prefill_tile(
    size: int, warps: int, tiles: int, tokens: int, stages: int, resident: int
) -> Tile:
    """All sizes of an attention_prefill kernel, from those that can be chosen."""
    pitch = -(-size // 16) * 16 + 8
    return {
        "warps": warps,
        "tiles": tiles,
        "tokens": tokens,
        "stages": stages,
        "shared": 2 * pitch * (16 * warps * tiles + 2 * stages * tokens),
        "resident": resident,
        "splits": 8,
    }


_TILES: Mapping[str, Callable[[Params, Gpu], Tile]] = {
    "rms_norm": _row,
    "layer_norm": _row,
    "quantize": _row,
    "attention_decode": _attention_decode,
    "attention_prefill": _attention_prefill,
    "linear_gemv_blocks": _gemv_blocks,
    "linear_gemv_floats": _gemv_floats,
    "linear_gemm_blocks": _gemm_blocks,
    "linear_gemm_halves": lambda params, gpu: {"stages": 4},
}
