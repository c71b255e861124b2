"""Exact convolutions of 8-bit integers.

As products of windows (frames.py), whose elements here are quads: the same pixel of four channels,
as many bytes as a float32, which stands for them. So panels are copied as those of floats are, and
are what the tiles of integers.py read. Padding is of zero points. Weights are the left operand, in
rows [C / 4][taps][4]. Depthwise convolutions are computed as floats, which hold their sums exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.codegen.graph.elementwise import cast
from atsc.codegen.graph.frames import MOST_TAPS, Frame, Taps, WindowsRight, framed
from atsc.codegen.graph.integers import (
    BYTES,
    IntegerProduct,
    Point,
    constant_buffer,
    constant_content,
    flip_of,
    point_of,
)
from atsc.codegen.graph.kernels import finished_call
from atsc.codegen.graph.lower import Lowering
from atsc.codegen.graph.moves import reshaped
from atsc.codegen.graph.tensor import Buffer, Code, Stored, Tensor
from atsc.codegen.graph.windows import Windows
from atsc.compiler.dims import Dim, product

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of whole quads, signed: [group * M][K]."""

    buffer: Buffer

    def rows(self, code: Code, batch: Sequence[str], spare: str) -> Dim:
        """In place."""
        stride = code.dim(self.buffer.shape[-1])
        row = f"({batch[-1]} * {code.dim(self.buffer.shape[1])} + first_m)"
        code.line(f"const int64_t stride = {stride};")
        code.line(f"const int8_t* const left = {code.buffer(self.buffer)} + {row} * stride;")
        return Dim.of(0)


def code_convolution(
    g: Lowering,
    image: Tensor,
    image_zero: Tensor | None,
    weight: Tensor,
    weight_zero: Tensor | None,
    windows: Windows,
    group: int,
) -> Tensor | None:
    """The image less its zero point, by the kernels less theirs, as int32 [N, M, outputs..].

    None where operands are of a form that has no tiles.
    """
    if image.dtype not in BYTES or weight.dtype not in BYTES or len(windows.kernel) > 2:
        return None
    if image_zero is not None and image_zero.size != Dim.of(1):
        return None
    kernels = constant_content(g, weight)
    points = np.zeros(1) if weight_zero is None else constant_content(g, weight_zero)
    if kernels is None or points is None or not kernels.size:
        return None
    zero = None if image_zero is None else reshaped(g, image_zero, ())
    points = np.broadcast_to(points.reshape(-1), kernels.shape[:1]).astype(np.int32)
    shape = (image.shape[0], weight.shape[0], *windows.outputs)
    taps = int(np.prod(windows.kernel))
    if group > 1 and kernels.shape[1] == 1 and taps <= MOST_TAPS:
        return _depthwise(g, image, zero, kernels, points, windows)
    signed = (kernels.view(np.uint8) ^ flip_of(weight.dtype, signed=True)).view(np.int8)
    q = points - flip_of(weight.dtype, signed=True)
    p = point_of(zero, flip_of(image.dtype, signed=False))
    depth, quads = kernels.shape[1], -(-kernels.shape[1] // 4)
    rows = _quads_last(signed).reshape(group, len(signed) // group, -1)
    terms = _terms(g, signed, q, p, group)
    ones = None
    if q.any():
        row = _quads_last(np.ones_like(signed[:1])).reshape(-1)
        ones = constant_buffer(g, "ones", row)
    frame = _frame(g, image, windows, p, group, depth)
    per_group, left = Dim.of(rows.shape[1]), WeightRows(constant_buffer(g, "rows", rows))
    right = WindowsRight(frame, Dim.of(quads), per_group)
    made = IntegerProduct(
        (image.shape[0], Dim.of(group)), per_group, product(windows.outputs),
        left, right, Dim.of(quads * taps), True, terms, ones,
    )  # fmt: skip
    return reshaped(g, made.tensor(), shape)


def _quads_last(kernels: Array) -> Array:
    """[M, C, kernel..] as [M, C / 4, kernel.., 4]."""
    count, depth = kernels.shape[:2]
    quads = -(-depth // 4)
    wide = np.zeros((count, quads * 4, *kernels.shape[2:]), np.int8)
    wide[:, :depth] = kernels
    split = wide.reshape(count, quads, 4, *kernels.shape[2:])
    return np.ascontiguousarray(np.moveaxis(split, 2, -1))


def _terms(
    g: Lowering, signed: Array, q: Array, p: Point, group: int
) -> tuple[Callable[[Code], tuple[str, str]], ...]:
    """What is taken off the sums of a channel: see integers.py."""
    flat = signed.reshape(len(signed), -1)
    sums = flat.sum(1, dtype=np.int32) - np.int32(flat.shape[1]) * q
    per_group = len(signed) // group
    terms: list[Callable[[Code], tuple[str, str]]] = []

    def of_channel(code: Code, content: Buffer) -> str:
        of_group, row = code.axes[1], code.axes[-2]
        place = row if of_group == "0" else code.index(f"{of_group} * {per_group} + {row}")
        return code.load(content, place)

    if not p.is_zero and sums.any():
        column = constant_buffer(g, "sums", sums)
        index = ["0"] * (p.tensor.rank if p.tensor is not None else 0)
        terms.append(lambda code: (p.at(code, index), of_channel(code, column)))
    if q.any():
        offsets = constant_buffer(g, "points", q)
        terms.append(lambda code: (of_channel(code, offsets), "column_sums[c]"))
    return tuple(terms)


def _frame(g: Lowering, image: Tensor, windows: Windows, p: Point, group: int, depth: int) -> Frame:
    """The image in quads of each group's channels, stored."""
    quads = -(-depth // 4)
    source: Stored = g.store(image)
    frame = replace(framed(g, source, windows, ""), is_ready=False, channels=Dim.of(group * quads))
    planes = image.shape[0] * (group * quads)
    target = g.buffer("float32", (planes, frame.rows, Dim.of(frame.phases), frame.width))
    code = Code()
    code.headers["frame_i8.h"] = None
    height, columns = map(code.dim, frame.image)
    flip = flip_of(image.dtype, signed=False)
    with code.block("for (int64_t item = lo; item < hi; ++item)"):
        code.line(f"const int64_t plane = item / {code.dim(frame.rows)};")
        code.line(f"const int64_t y = item % {code.dim(frame.rows)} - {code.dim(frame.before[0])};")
        code.line(f"const int64_t quad = plane % {quads}, group = plane / {quads};")
        code.line(f"const int64_t channel = group * {depth} + 4 * quad;")
        bytes_of = f"reinterpret_cast<const uint8_t*>({code.buffer(source.buffer)})"
        code.line(f"const uint8_t* const from = {bytes_of};")
        code.line(f"const uint8_t* const row = from + (channel * {height} + y) * {columns};")
        outside = f"static_cast<uint8_t>({p.at(code, [])})"
        to = f"reinterpret_cast<uint8_t*>(out + item * {code.dim(frame.row_stride)})"
        before = code.dim(frame.before[1])
        code.line(f"quad_row({to},")
        code.line(f"    y >= 0 && y < {height} ? row : nullptr, least(4, {depth} - 4 * quad),")
        code.line(f"    {height} * {columns}, {columns}, {before}, {frame.stride},")
        code.line(f"    {frame.phases}, {code.dim(frame.width)}, {outside}, {flip});")
    grid = planes * frame.rows
    g.calls.append(finished_call(g.node, code, target, grid, frame.row_stride))
    return replace(frame, buffer=target, is_ready=True)


def _depthwise(
    g: Lowering, image: Tensor, zero: Tensor | None, kernels: Array, points: Array, windows: Windows
) -> Tensor:
    """Sums of at most MOST_TAPS products of 8 bits, less than 2^24: exact in float32."""
    weights = kernels.astype(np.float32) - points.reshape(-1, *[1] * (kernels.ndim - 1))
    frame = replace(framed(g, image, windows, "0"), is_ready=False, zero=zero)
    shape = (image.shape[0], Dim.of(len(kernels)), *windows.outputs)
    weight = g.store(g.array(weights.astype(np.float32)))
    return cast(g, Taps(frame, "fma", shape, weight).tensor(), "int32")


__all__ = ["code_convolution"]
