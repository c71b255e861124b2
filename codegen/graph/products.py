"""Products of float32 matrices: computed in register tiles, and finished by what reads them.

A `Product` is not computed when its node is lowered. Its tensor, and elementwise functions of
that, carry it (`Tensor.product`); whoever stores such a tensor gets one kernel that computes tiles
of the product and what is made of them, such as bias, activation and residual, while they are in
the cache. To store two tensors of one product would be right, but compute it twice.

The right operand of a tile is a panel of 32 columns, [K][32]. Constants are stored in panels when
the plan is written; other operands are copied into panels as they are needed. The left operand is
read where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from atsc.codegen.graph.kernels import Call, finished_call
from atsc.codegen.graph.tensor import (
    DEAR,
    Buffer,
    Code,
    Index,
    Tensor,
    View,
    c_index,
    linear,
)
from atsc.compiler.dims import Dim, product, smallest
from atsc.compiler.tensor_graph import Constant

PANEL_COLUMNS = 32  # kTileColumns of templates/graph/level.h
MOST_ROWS = 168
"""Of a tile: whole strips at all levels, and enough to make copying a panel cheap."""
Box = tuple[Dim, ...]


class Pending(Protocol):
    """What is computed together with the elementwise functions of it: `Tensor.product`."""

    def call(self, node: str, tensor: Tensor, target: Buffer) -> Call:
        """The kernel that stores a function of it."""

    def reshaped(self, x: Tensor, shape: Box) -> Tensor | None:
        """A function of it in another shape; None where that must be stored first."""


class Right(Protocol):
    """The right operand of a product."""

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """Declare `const float* panel`: the columns from `first_n` on, `depth` from `first_k` on.

        `spare` is a workspace, which keeps the panel of the tile before, `filled`.
        """

    def step(self, depth: Dim) -> Dim:
        """How deep panels are."""

    def spare_elements(self, depth: Dim) -> Dim | int:
        """The size of the workspace."""


@dataclass(frozen=True, slots=True)
class PackedRight:
    """A constant in panels [panels][K][PANEL_COLUMNS]."""

    buffer: Buffer

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """In place."""
        code.line(f"const float* const panel = {code.buffer(self.buffer)} + first_n * depth;")

    def spare_elements(self, depth: Dim) -> Dim | int:
        """None."""
        return 0

    def step(self, depth: Dim) -> Dim:
        """They are stored whole."""
        return depth


@dataclass(frozen=True, slots=True)
class LooseRight:
    """Any tensor [batch.., K, N], copied panel by panel."""

    tensor: Tensor

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """A copy."""
        code.line("float* const panel = spare;")
        with code.block("if (tile_column != filled)"):
            code.line("filled = tile_column;")
            self._fill(code, batch)

    def _fill(self, code: Code, batch: Sequence[str]) -> None:
        view = self.tensor.view
        if view is not None and view.strides[-2].constant == 1:
            place = place_of(code, self.tensor, [*batch, "0", "first_n"])
            stride = code.dim(view.strides[-1])
            code.line(f"turn_panel(panel, depth, columns, {place}, {stride});")
            return
        with code.block("fill_panel(panel, depth, columns, [&](int64_t k, int64_t c) -> float"):
            code.line("[[maybe_unused]] const int64_t n = first_n + c;")
            index = [*batch, "k", "n"]
            at = [c_index(size, x) for size, x in zip(self.tensor.shape, index, strict=True)]
            code.line(f"return {self.tensor.at(code, at)};")
        code.lines[-1] += ");"

    def spare_elements(self, depth: Dim) -> Dim | int:
        """One panel."""
        return depth * PANEL_COLUMNS

    def step(self, depth: Dim) -> Dim:
        """Whole, so that tiles below each other can share one."""
        return depth


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A product [batch.., M, N] that is computed in register tiles."""

    batch: Box
    rows: Dim
    """M."""
    columns: Dim
    """N."""

    @property
    def axes(self) -> Box:
        """Batches, M, N."""
        return (*self.batch, self.rows, self.columns)

    def boxes(self, shape: Box) -> list[Box] | None:
        """The dimensions that each axis is divided into by a reshape; None: by no division."""
        found, place = [], 0
        for axis in self.axes:
            begin, size = place, Dim.of(1)
            while size != axis:
                if place == len(shape):
                    return None
                size, place = size * shape[place], place + 1
            found.append(shape[begin:place])
        rest = shape[place:]
        if any(size.constant != 1 for size in rest):
            return None
        found[-1] = (*found[-1], *rest)
        return found

    def reshaped(self, x: Tensor, shape: Box) -> Tensor | None:
        """A function of this product in another shape; None where its elements would move."""
        if self.boxes(shape) is None or (own := self.boxes(x.shape)) is None:
            return None
        boxes = own

        def at(code: Code, index: Index) -> str:
            return x.at(code, _split(code, boxes))

        return Tensor(x.dtype, shape, at, cost=x.cost, product=self)

    def headers(self) -> tuple[str, ...]:
        """What the kernel includes."""
        raise NotImplementedError

    def multiply(self, code: Code, batch: Sequence[str]) -> Dim:
        """Declare and fill `sums`, a tile; the workspace that it takes, in elements of 4 bytes."""
        raise NotImplementedError

    def depth(self) -> Dim:
        """Multiplications that make an element, as the tiles count them."""
        raise NotImplementedError

    def call(self, node: str, tensor: Tensor, target: Buffer) -> Call:
        """The kernel that stores a function of this product; an item of the grid is a tile."""
        code = Code()
        code.headers |= dict.fromkeys(self.headers())
        tiles_m = (self.rows + (MOST_ROWS - 1)) // MOST_ROWS
        tiles_n = (self.columns + (PANEL_COLUMNS - 1)) // PANEL_COLUMNS
        batch = [f"b{axis}" for axis in range(len(self.batch))]
        code.line("[[maybe_unused]] int64_t filled = -1, held = -1;")
        with code.block("for (int64_t item = lo; item < hi; ++item)"):
            code.line("[[maybe_unused]] int64_t rest = item;")
            # Tiles below each other come one after the other: they read the same panel.
            sizes = [*zip(batch, self.batch, strict=True), ("tile_n", tiles_n), ("tile_m", tiles_m)]
            for name, size in reversed(sizes):
                code.line(f"[[maybe_unused]] const int64_t {name} = rest % {code.dim(size)};")
                code.line(f"rest /= {code.dim(size)};")
            column = f"item / {code.dim(tiles_m)}"
            code.line(f"[[maybe_unused]] const int64_t tile_column = {column};")
            row = f"tile_column / {code.dim(tiles_n)} * {code.dim(tiles_m)} + tile_m"
            code.line(f"[[maybe_unused]] const int64_t tile_row = {row};")
            whole_m, whole_n = code.dim(self.rows), code.dim(self.columns)
            code.line(f"const int64_t height = ({whole_m} - 1) / {code.dim(tiles_m)} + 1;")
            code.line(
                f"const int64_t first_m = tile_m * height, first_n = tile_n * {PANEL_COLUMNS};"
            )
            code.line(f"const int64_t rows = least(height, {whole_m} - first_m);")
            code.line(f"const int64_t columns = least({PANEL_COLUMNS}, {whole_n} - first_n);")
            names = [c_index(size, name) for size, name in zip(self.batch, batch, strict=True)]
            workspace = self.multiply(code, names)
            with code.block("finish_tile(rows, columns, [&](int64_t r, int64_t c)"):
                code.line("[[maybe_unused]] const int64_t m = first_m + r, n = first_n + c;")
                code.axes = [*names, "m", "n"]
                boxes = self.boxes(tensor.shape)
                assert boxes is not None
                index = _split(code, boxes)
                value = code.as_stored(target.dtype, tensor.at(code, index))
                code.line(f"out[{linear(code, tensor.shape, index)}] = {value};")
            code.lines[-1] += ");"
        # Tiles take many elements at a time.
        cost = self.depth() * smallest(self.rows, MOST_ROWS) * 2
        grid = product([*self.batch, tiles_m, tiles_n])
        return finished_call(node, code, target, grid, cost, workspace * 4)


@contextlib.contextmanager
def steps(code: Code, step: Dim, depth: Dim) -> Iterator[None]:
    """Statements for each part of the depth: `depth` elements from `first_k` on."""
    code.line(f"const int64_t whole_depth = {code.dim(depth)};")
    loop = f"for (int64_t first_k = 0; first_k < whole_depth; first_k += {code.dim(step)})"
    if step == depth:
        code.line("constexpr int64_t first_k = 0;")
    with code.block("" if step == depth else loop):
        code.line(f"const int64_t depth = least({code.dim(step)}, whole_depth - first_k);")
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Product(Tiles):
    """left [batch.., M, K] times right [batch.., K, N], of float32."""

    left: Tensor
    """With a view, or cheap."""
    right: Right

    def tensor(self) -> Tensor:
        """What is finished by its readers."""

        def at(code: Code, index: Index) -> str:
            return code.let("float", "sums[r * kTileColumns + c]")

        return Tensor("float32", self.axes, at, cost=DEAR, product=self)

    def headers(self) -> tuple[str, ...]:
        """With the tiles."""
        return ("level.h", "product.h")

    def depth(self) -> Dim:
        """K."""
        return self.left.shape[-1]

    def multiply(self, code: Code, batch: Sequence[str]) -> Dim:
        """By the tiles of tile_f32.h."""
        depth, sums = self.depth(), MOST_ROWS * PANEL_COLUMNS
        code.line("float* const sums = static_cast<float*>(workspace);")
        code.line(f"[[maybe_unused]] float* const spare = sums + {sums};")
        spare = Dim.of(self.right.spare_elements(depth))
        copied = self._left(code, batch, spare)
        with steps(code, self.right.step(depth), depth):
            self.right.panel(code, batch, depth)
            code.line("ATSC_LEVEL(atsc_tile_f32)")
            code.line("(rows, columns, depth, left + first_k, stride, panel, sums, first_k > 0);")
        return spare + copied + sums

    def _left(self, code: Code, batch: Sequence[str], taken: Dim) -> Dim | int:
        """Declare `const float* left` and `int64_t stride`; what they take of the workspace."""
        left, view = self.left, self.left.view
        depth = left.shape[-1]
        copied = (depth + 16) * MOST_ROWS
        copy = f"spare + {code.dim(taken)}"
        if view is None or view.strides[-1].constant not in (0, 1):
            code.line(f"float* const left = {copy};")
            code.line(f"const int64_t stride = {code.dim(depth)};")
            with (
                code.block("for (int64_t r = 0; r < rows; ++r)"),
                code.block("for (int64_t k = 0; k < stride; ++k)"),
            ):
                code.line("[[maybe_unused]] const int64_t m = first_m + r;")
                index = [*batch, "m", "k"]
                at = [c_index(size, x) for size, x in zip(left.shape, index, strict=True)]
                code.line(f"left[r * stride + k] = {left.at(code, at)};")
            return copied
        place = place_of(code, left, [*batch, "first_m", "0"])
        step = view.strides[-2].constant
        stride = code.dim(view.strides[-2])
        if step is not None and step % 1024 != 0:
            code.line(f"const float* const left = {place};")
            code.line(f"const int64_t stride = {stride};")
            return 0
        code.line(f"int64_t stride = {stride};")
        whole = code.dim(depth)
        code.line(f"const float* const left = rows_of({place}, stride, rows, {whole}, {copy});")
        return copied


def _split(code: Code, boxes: Sequence[Box]) -> list[str]:
    """The index of the element that is being finished, in a shape made of such boxes."""
    return [
        name for axis, box in zip(code.axes, boxes, strict=True) for name in code.split(axis, box)
    ]


def place_of(code: Code, tensor: Tensor, index: Index) -> str:
    """The address of an element of a float32 tensor that has a view."""
    assert tensor.view is not None
    parts = [code.buffer(tensor.view.buffer)]
    for size, at, stride in zip(tensor.shape, index, tensor.view.strides, strict=True):
        if at != "0" and size.constant != 1:
            parts.append(at if stride.constant == 1 else f"{at} * {code.dim(stride)}")
    return " + ".join(parts)


def packed_constant(
    name: str, constant: Constant, view: View, shape: Box
) -> tuple[Buffer, Constant]:
    """A constant [.., K, N] that a view shows, in panels; other dimensions are 1."""
    depth, columns = (size.constant for size in shape[-2:])
    steps = [stride.constant for stride in view.strides[-2:]]
    assert depth is not None and columns is not None
    panels = -(-columns // PANEL_COLUMNS)

    def read() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        flat = np.ascontiguousarray(constant.read()).reshape(-1)
        strides = [int(step or 0) * flat.itemsize for step in steps]
        matrix = np.lib.stride_tricks.as_strided(flat, (depth, columns), strides)
        wide = np.zeros((depth, panels * PANEL_COLUMNS), np.float32)
        wide[:, :columns] = matrix
        return np.ascontiguousarray(wide.reshape(depth, panels, PANEL_COLUMNS).transpose(1, 0, 2))

    buffer = Buffer(name, "float32", tuple(map(Dim.of, (panels, depth, PANEL_COLUMNS))))
    return buffer, Constant("float32", (panels, depth, PANEL_COLUMNS), read)


__all__ = [
    "MOST_ROWS",
    "PANEL_COLUMNS",
    "Box",
    "LooseRight",
    "PackedRight",
    "Pending",
    "Product",
    "Right",
    "Tiles",
    "packed_constant",
    "place_of",
    "steps",
]
