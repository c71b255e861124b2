"""Exact products of 8-bit integers, in register tiles that readers finish: products.py.

Tiles multiply unsigned bytes by signed ones (templates/graph/tile_i8.h). An operand of the wrong
kind is turned by adding 128 to it or taking 128 off, as to its zero point. With x and w so, and
zero points p and q,

    sum (x - p)(w - q) = sum x w - p (sum w - K q) - q sum x

where the sum of a constant's bytes is known at compile time, and other sums are made where the
operand is copied. Results are exact modulo 2^32, as MatMulInteger and ConvInteger are.

The left operand of a matrix product is unsigned, read in place where rows are whole quads (four
bytes) and nothing need be summed; a constant right operand lies in panels [K / 4][columns][4].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atsc.codegen.graph.lower import Lowering
from atsc.codegen.graph.products import MOST_ROWS, PANEL_COLUMNS, Tiles, place_of, steps
from atsc.codegen.graph.tensor import DEAR, Buffer, Code, Index, Tensor, c_index
from atsc.codegen.tail import ElementType
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import Constant

BYTES = ("int8", "uint8")
MOST_EXACT_DEPTH = (2**31 - 1) // 255**2
"""Products of bytes that an int32 holds the sum of, whatever they are."""
Array = NDArray[Any]


def flip_of(dtype: ElementType, *, signed: bool) -> int:
    """What bytes are combined with, by exclusive or, to become signed or unsigned ones."""
    return 0 if (dtype == "int8") == signed else 0x80


@dataclass(frozen=True, slots=True)
class Point:
    """A zero point, of bytes that were turned: a number, or an int32 tensor and what is added."""

    tensor: Tensor | None
    added: int

    @property
    def is_zero(self) -> bool:
        """Nothing need be taken off."""
        return self.tensor is None and self.added == 0

    def at(self, code: Code, index: Index) -> str:
        """A C expression."""
        if self.tensor is None:
            return str(self.added)
        value = f"(int32_t){self.tensor.at(code, index)}"
        return f"({value} + {self.added})" if self.added else value


def point_of(zero: Tensor | None, added: int) -> Point:
    """Of a zero point, or none; `added` is what turning added to all bytes."""
    if zero is None:
        return Point(None, added)
    if zero.literal is not None and zero.literal.size == 1:
        return Point(None, int(zero.literal.reshape(-1)[0]) + added)
    return Point(zero, added)


class Left(Protocol):
    """The left operand: rows of whole quads."""

    def rows(self, code: Code, batch: Sequence[str], spare: str) -> Dim:
        """Declare `const void* left` and `stride` in bytes; what it takes of `spare`, elements."""


class Right(Protocol):
    """The right operand, in panels; see products.Right: an element is a quad."""

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """Declare `panel`: the columns from `first_n` on, `depth` from `first_k` on."""

    def step(self, depth: Dim) -> Dim:
        """How deep panels are."""

    def spare_elements(self, depth: Dim) -> Dim | int:
        """The size of the workspace."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerProduct(Tiles):
    """The exact product, as int32."""

    left: Left
    right: Right
    quads: Dim
    is_left_signed: bool
    terms: tuple[Callable[[Code], tuple[str, str]], ...]
    """Pairs of factors that are taken off a sum."""
    ones: Buffer | None = None
    """A row of the left operand's kind whose product is `column_sums`."""

    def tensor(self) -> Tensor:
        """What is finished by its readers."""

        def at(code: Code, index: Index) -> str:
            value = "sums[r * kTileColumns + c]"
            for term in self.terms:
                value = f"less_product({value}, {', '.join(term(code))})"
            return code.let("int32_t", value)

        return Tensor("int32", self.axes, at, cost=DEAR, product=self)

    def headers(self) -> tuple[str, ...]:
        """With the tiles."""
        return ("level.h", "product.h", "product_i8.h")

    def depth(self) -> Dim:
        """Quads."""
        return self.quads

    def multiply(self, code: Code, batch: Sequence[str]) -> Dim:
        """By the tiles of tile_i8.h."""
        sums, sides = MOST_ROWS * PANEL_COLUMNS, MOST_ROWS + 8 + PANEL_COLUMNS
        code.line("int32_t* const sums = static_cast<int32_t*>(workspace);")
        code.line(f"[[maybe_unused]] int32_t* const column_sums = sums + {sums};")
        code.line(f"[[maybe_unused]] int32_t* const row_sums = column_sums + {PANEL_COLUMNS};")
        code.line(f"[[maybe_unused]] int32_t* const end = sums + {sums + sides};")
        code.line("[[maybe_unused]] float* const spare = reinterpret_cast<float*>(end);")
        spare = Dim.of(self.right.spare_elements(self.quads))
        copied = self.left.rows(code, batch, f"spare + {code.dim(spare)}")
        tile = "atsc_tile_s8u8" if self.is_left_signed else "atsc_tile_u8s8"
        with steps(code, self.right.step(self.quads), self.quads):
            self.right.panel(code, batch, self.quads)
            code.line("[[maybe_unused]] const int64_t begin = 4 * first_k;")
            code.line(f"ATSC_LEVEL({tile})")
            code.line("(rows, columns, depth, left + begin, stride, panel, sums, first_k > 0);")
            if self.ones is not None:
                ones = f"{code.buffer(self.ones)} + begin"
                code.line(f"ATSC_LEVEL({tile})")
                code.line(f"(1, columns, depth, {ones}, 0, panel, column_sums, first_k > 0);")
        return spare + copied + (sums + sides)


@dataclass(frozen=True, slots=True, eq=False)
class ActivationRows:
    """A tensor [batch.., M, K] of bytes as unsigned rows; `row_sums` where they are wanted."""

    tensor: Tensor
    is_summed: bool

    def rows(self, code: Code, batch: Sequence[str], spare: str) -> Dim:
        """In place, or a copy that tiles of the same rows share."""
        x, view = self.tensor, self.tensor.view
        depth, flip = x.shape[-1], flip_of(x.dtype, signed=False)
        has_rows = view is not None and view.strides[-1].constant == 1
        is_whole = depth.constant is not None and depth.constant % 4 == 0
        if has_rows and is_whole and not flip and not self.is_summed:
            assert view is not None
            place = place_of(code, x, [*batch, "first_m", "0"])
            code.line(f"const uint8_t* const left = {place};")
            code.line(f"const int64_t stride = {code.dim(view.strides[-2])};")
            return Dim.of(0)
        quads = (depth + 3) // 4
        sums = "row_sums" if self.is_summed else "nullptr"
        code.line(f"uint8_t* const left = reinterpret_cast<uint8_t*>({spare});")
        code.line(f"const int64_t stride = 4 * {code.dim(quads)};")
        sizes = f"rows, {code.dim(depth)}, {code.dim(quads)}, {flip}"
        with code.block("if (tile_row != held)"):
            code.line("held = tile_row;")
            if has_rows:
                assert view is not None
                place = place_of(code, x, [*batch, "first_m", "0"])
                step = code.dim(view.strides[-2])
                code.line(f"copy_rows(left, {sums}, {place}, {step}, {sizes});")
                return quads * MOST_ROWS
            head = f"fill_rows(left, {sums}, {sizes}, [&](int64_t r, int64_t k) -> uint8_t"
            with code.block(head):
                code.line("[[maybe_unused]] const int64_t m = first_m + r;")
                index = [*batch, "m", "k"]
                at = [c_index(size, name) for size, name in zip(x.shape, index, strict=True)]
                code.line(f"return static_cast<uint8_t>({x.at(code, at)});")
            code.lines[-1] += ");"
        return quads * MOST_ROWS


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A constant in panels [panels][K / 4][PANEL_COLUMNS][4], signed."""

    buffer: Buffer

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """In place."""
        place = f"{code.buffer(self.buffer)} + 4 * first_n * depth"
        code.line(f"const int8_t* const panel = {place};")

    def step(self, depth: Dim) -> Dim:
        """They are stored whole."""
        return depth

    def spare_elements(self, depth: Dim) -> Dim | int:
        """None."""
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class LooseCodes:
    """Any tensor [batch.., K, N] of bytes, copied panel by panel, with `column_sums`."""

    tensor: Tensor

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """A copy that tiles below each other share."""
        x = self.tensor
        flip = flip_of(x.dtype, signed=True)
        code.line("int8_t* const panel = reinterpret_cast<int8_t*>(spare);")
        with code.block("if (tile_column != filled)"):
            code.line("filled = tile_column;")
            head = f"fill_quads(panel, column_sums, {code.dim(x.shape[-2])}, columns, {flip},"
            with code.block(f"{head} [&](int64_t k, int64_t c) -> uint8_t"):
                code.line("[[maybe_unused]] const int64_t n = first_n + c;")
                index = [*batch, "k", "n"]
                at = [c_index(size, name) for size, name in zip(x.shape, index, strict=True)]
                code.line(f"return static_cast<uint8_t>({x.at(code, at)});")
            code.lines[-1] += ");"

    def step(self, depth: Dim) -> Dim:
        """Whole, since it is shared."""
        return depth

    def spare_elements(self, depth: Dim) -> Dim | int:
        """One panel."""
        return depth * PANEL_COLUMNS


def code_product(
    g: Lowering, left: Tensor, left_zero: Tensor | None, right: Tensor, right_zero: Tensor | None
) -> Tensor | None:
    """[batch.., M, K] less its zero point times [batch.., K, N] less its own, as int32.

    Batches of the operands are equal or 1. None where operands or zero points are of a form that
    has no tiles: then they are multiplied as int32.
    """
    if left.dtype not in BYTES or right.dtype not in BYTES:
        return None
    is_of_rows = left_zero is not None and left_zero.size != Dim.of(1)
    if left_zero is not None and is_of_rows:
        if left_zero.rank != 1 or left.rank != 2:
            return None
        g.agree(left_zero.shape[0], left.shape[-2], "zero points of rows")
    constant = _constant_right(g, right, right_zero)
    if constant is None and right_zero is not None and right_zero.size != Dim.of(1):
        return None
    batch = g.broadcast([left.shape[:-2], right.shape[:-2]])
    depth = g.agree(left.shape[-1], right.shape[-2], "the sizes that are summed over")
    p = point_of(left_zero, flip_of(left.dtype, signed=False))

    def left_point(code: Code) -> str:
        if p.tensor is None:
            return str(p.added)
        return p.at(code, [code.axes[-2]] if is_of_rows else ["0"] * p.tensor.rank)

    if constant is not None:
        packed, terms, is_summed = _constant_terms(g, right, *constant, left_point, p.is_zero)
        own: Right = PackedCodes(packed)
    else:
        own, terms, is_summed = _loose_terms(right, right_zero, depth, left_point, p.is_zero)
    rows = left if left.view is not None else g.store(left)
    return IntegerProduct(
        batch, left.shape[-2], right.shape[-1], ActivationRows(rows, is_summed), own,
        (depth + 3) // 4, False, terms,
    ).tensor()  # fmt: skip


Terms = tuple[Callable[[Code], tuple[str, str]], ...]


def _loose_terms(
    right: Tensor,
    right_zero: Tensor | None,
    depth: Dim,
    left_point: Callable[[Code], str],
    left_is_zero: bool,
) -> tuple[Right, Terms, bool]:
    q = point_of(right_zero, 128 * -(right.dtype == "uint8"))

    def right_point(code: Code) -> str:
        return q.at(code, ["0"] * (q.tensor.rank if q.tensor is not None else 0))

    def columns(code: Code) -> tuple[str, str]:
        whole = f"(int32_t){code.dim(depth)}"
        return left_point(code), f"less_product(column_sums[c], {whole}, {right_point(code)})"

    def rows(code: Code) -> tuple[str, str]:
        return right_point(code), "row_sums[r]"

    terms: Terms = () if left_is_zero else (columns,)
    return LooseCodes(right), terms if q.is_zero else (*terms, rows), not q.is_zero


def _constant_right(g: Lowering, right: Tensor, zero: Tensor | None) -> tuple[Array, Array] | None:
    """A constant matrix and its zero points [N], as they are in the model; None: it is none."""
    matrix = constant_content(g, right)
    if matrix is None or any(size != 1 for size in matrix.shape[:-2]) or not matrix.size:
        return None
    points = np.zeros(1, np.int64) if zero is None else constant_content(g, zero)
    if points is None or points.ndim > 1 or points.size not in (1, matrix.shape[-1]):
        return None
    return matrix.reshape(matrix.shape[-2:]), np.broadcast_to(points, matrix.shape[-1:])


def _constant_terms(
    g: Lowering,
    right: Tensor,
    matrix: Array,
    points: Array,
    left_point: Callable[[Code], str],
    left_is_zero: bool,
) -> tuple[Buffer, Terms, bool]:
    """The packed operand, what is taken off, and whether that needs the sums of rows."""
    flip = flip_of(right.dtype, signed=True)
    signed = (matrix.view(np.uint8) ^ flip).view(np.int8)
    q = points.astype(np.int32) - flip
    packed = constant_buffer(g, "codes", packed_columns(signed))
    sums = signed.sum(0, dtype=np.int32) - np.int32(len(signed)) * q
    terms: list[Callable[[Code], tuple[str, str]]] = []
    if not left_is_zero and sums.any():
        column_sums = constant_buffer(g, "sums", sums)
        terms.append(lambda code: (left_point(code), code.load(column_sums, code.axes[-1])))
    if q.any():
        offsets = constant_buffer(g, "points", q)
        terms.append(lambda code: (code.load(offsets, code.axes[-1]), "row_sums[r]"))
    return packed, tuple(terms), bool(q.any())


def packed_columns(matrix: Array) -> Array:
    """Signed bytes [K, N] as [panels, K / 4, PANEL_COLUMNS, 4]."""
    depth, columns = matrix.shape
    quads, panels = -(-depth // 4), -(-columns // PANEL_COLUMNS)
    wide = np.zeros((quads * 4, panels * PANEL_COLUMNS), np.int8)
    wide[:depth, :columns] = matrix
    split = wide.reshape(quads, 4, panels, PANEL_COLUMNS)
    return np.ascontiguousarray(split.transpose(2, 0, 3, 1))


def constant_content(g: Lowering, x: Tensor) -> Array | None:
    """What a constant holds, wherever reshapes and transposes have put it; None: it is none."""
    if x.literal is not None and x.literal.shape == tuple(size.constant for size in x.shape):
        return x.literal
    if x.view is None or x.view.buffer not in g.constants:
        return None
    shape = [size.constant for size in x.shape]
    strides = [stride.constant for stride in x.view.strides]
    if None in shape or None in strides:
        return None
    flat = np.ascontiguousarray(g.constants[x.view.buffer].read()).reshape(-1)
    sizes = [int(size or 0) for size in shape]
    steps_in_bytes = [int(stride or 0) * flat.itemsize for stride in strides]
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, sizes, steps_in_bytes))


def constant_floats(g: Lowering, x: Tensor) -> Tensor:
    """Dequantised constants as a constant, for products that are not of integers."""
    if x.quantised is None:
        return x
    own = x.quantised
    parts = (own.codes, own.scale, *([] if own.zero is None else [own.zero]))
    found = [constant_content(g, part) for part in parts]
    codes, scale, zero = [*found, np.zeros((), np.int8)][:3]
    if codes is None or scale is None or zero is None:
        return x
    shape = [1] * codes.ndim
    if own.axis is not None:
        shape[own.axis] = -1
    centred = codes.astype(np.int32) - zero.astype(np.int32).reshape(shape)
    made = g.array(centred.astype(np.float32) * scale.astype(np.float32).reshape(shape))
    return replace(made, quantised=own)


def constant_buffer(g: Lowering, what: str, content: Array) -> Buffer:
    """A constant that is stored in this form."""
    buffer = Buffer(
        f"{g.node}.{what}.{len(g.constants)}", _element(content), tuple(map(Dim.of, content.shape))
    )
    g.constants[buffer] = Constant.of(content)
    return buffer


def _element(content: Array) -> ElementType:
    return "int8" if content.dtype == np.int8 else "int32"


__all__ = [
    "BYTES",
    "MOST_EXACT_DEPTH",
    "IntegerProduct",
    "Point",
    "code_product",
    "constant_buffer",
    "constant_content",
    "constant_floats",
    "flip_of",
    "point_of",
]
