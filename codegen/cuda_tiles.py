"""Tile sizes and variants of the CUDA kernels: everything that templates leave to decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels are tuned for: compute capability (90 for sm_90) and multiprocessors."""

    sm: int
    num_sms: int


Tile = dict[str, int]
Params = Mapping[str, Any]


def variant_of(op: str, params: Params) -> str:
    """What follows the stem in the template's name."""
    return ""


def tile_of(stem: str, params: Params, gpu: Gpu) -> Tile:
    """The sizes that the template sees as `tile`; empty for kernels that need none."""
    choose = _TILES.get(stem)
    return choose(params, gpu) if choose else {}


_TILES: Mapping[str, Callable[[Params, Gpu], Tile]] = {}
