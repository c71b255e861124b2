"""The contract of kernels of general graphs: what generators hand to the graph runtime.

A kernel is one C++20 function with C linkage, self-contained but for libm and our own headers:

    extern "C" int32_t NAME(void* const* tensors, const int64_t* dims, void* workspace,
                            int64_t lo, int64_t hi);

`tensors` holds the inputs and then the outputs, each contiguous in row-major order and 64-byte
aligned, elements as ONNX stores them (bool: one byte, 0 or 1). `dims` holds the values of
`symbols` in their order. [lo, hi) is a part of the kernel's grid: any partition of [0, grid), run
in any order by any threads, must give the same result. `workspace` is `workspace_bytes` large,
64-byte aligned, not initialised, and one thread's own. The function returns 0, or not 0 where an
input's content is out of range (an index beyond its axis). Kernels never allocate, throw, or keep
state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atsc.compiler.dims import Dim

ElementType = Literal[
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
]  # fmt: skip
ELEMENT_BYTES: dict[ElementType, int] = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "int16": 2, "int32": 4,
    "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip


_WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": ("-march=x86-64-v3",),
    "avxvnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx512": _WIDE,
    "avx512vnni": (*_WIDE, "-mavx512vnni"),
}
"""Levels of codegen/cpu.py that kernels of general graphs know, with their compiler flags."""
FLOAT_LEVELS = ("avx2", "avx512")
"""Those of kernels to which VNNI is of no use."""
_BELOW = {"avxvnni": "avx2", "avx512vnni": "avx512"}


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape; no size is an expression that the kernel's `symbols` do not give."""

    dtype: ElementType
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class TailKernel:
    """A kernel of a general graph, as source."""

    name: str
    """The function; distinct sources have distinct names."""
    source: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    symbols: tuple[str, ...]
    """What `dims` holds: every symbol that the shapes, the grid and the workspace depend on."""
    grid: Dim
    workspace_bytes: Dim = Dim.of(0)  # noqa: RUF009 (immutable)
    item_cost: Dim = Dim.of(1)  # noqa: RUF009
    """Elements that one item of the grid reads or writes, about: how finely to share the grid."""
    headers: tuple[str, ...] = ()
    """Files of templates/graph whose text goes before the source; kernels of the same headers and
    flags share a translation unit. Without any, the source is a unit of its own."""
    flags: tuple[str, ...] = ()
    """Compiler flags beyond those of every kernel."""
    levels: tuple[str, ...] = ()
    """Compiled once for each of them; the source then names its function ATSC_LEVEL(name)."""

    def own_level(self, level: str) -> str:
        """A level, or the one below it that the kernel has."""
        return level if level in (self.levels or FLOAT_LEVELS) else _BELOW[level]

    def symbol(self, level: str) -> str:
        """The function's name at a level."""
        return f"{self.name}__{self.own_level(level)}" if self.levels else self.name
