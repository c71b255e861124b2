"""Windows of float32 images of one or two dimensions, read from frames: templates/graph/windows.h.

A `Frame` is an image with its padding, laid out so that what one tap of a kernel reads for
neighbouring windows is contiguous; an image without padding and stride is one as it is. Products
(`WindowsRight`) copy panels from it, depthwise convolutions and pools (`Taps`) loop over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atsc.codegen.graph.kernels import Call, finished_call
from atsc.codegen.graph.lower import Lowering
from atsc.codegen.graph.products import MOST_ROWS, PANEL_COLUMNS, Box
from atsc.codegen.graph.tensor import (
    DEAR,
    Buffer,
    Code,
    Index,
    Stored,
    Tensor,
    c_index,
    linear,
)
from atsc.codegen.graph.windows import Windows
from atsc.compiler.dims import Dim, smallest

_PANEL_DEPTH = 192
_SMALL_ROW = 64
_ROWS_OF_BLOCK = 6
"""Of a plane with longer rows; what is left over of a vector then is little."""
_SLACK = 16
"""close_rows of windows.h copies so many elements at a time."""
MOST_TAPS = 64
"""Of a kernel whose taps are written out."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """How windows read an image [N, C, spatial..] through a frame [N, C, rows, phases, width]."""

    buffer: Buffer
    """The image; or the whole frame, once that is stored."""
    is_ready: bool
    """The buffer is a frame."""
    channels: Dim
    rows: Dim
    phases: int
    width: Dim
    image: tuple[Dim, Dim]
    """Rows and columns of the image."""
    before: tuple[Dim, Dim]
    """Padding above it, and before its columns."""
    stride: int
    """From a window to the one beside it."""
    outside: str
    outputs: tuple[Dim, Dim]
    """Windows below and beside each other."""
    row_step: Dim
    """From a window to the one below it."""
    taps: tuple[Dim, ...]
    """Where each tap reads, from a window's place on."""
    zero: Tensor | None = None
    """A zero point that is taken off an image of integers."""

    @property
    def row_stride(self) -> Dim:
        """Elements of a row."""
        return self.width * self.phases

    @property
    def channel_stride(self) -> Dim:
        """Elements of a channel."""
        return self.row_stride * self.rows

    def fill_row(self, code: Code, to: str, plane: str, row: str) -> None:
        """Statements that make one row of a frame from the image."""
        height, columns = map(code.dim, self.image)
        above, before = map(code.dim, self.before)
        source = code.buffer(self.buffer)
        code.headers.setdefault("windows.h")
        zero = "0.0f" if self.zero is None else f"(float){self.zero.at(code, [])}"
        code.line(f"const int64_t y = {row} - {above};")
        code.line(f"const auto* const row = {source} + ({plane} * {height} + y) * {columns};")
        code.line(f"frame_row({to}, y >= 0 && y < {height} ? row : nullptr, {columns}, {before},")
        width = code.dim(self.width)
        code.line(f"    {self.stride}, {self.phases}, {width}, {self.outside}, {zero});")

    def stored(self, g: Lowering, planes: Dim) -> Frame:
        """In memory as a whole."""
        if self.is_ready:
            return self
        target = g.buffer("float32", (planes, self.rows, Dim.of(self.phases), self.width))
        code = Code()
        code.headers |= {"level.h": None, "windows.h": None}
        with code.block("for (int64_t item = lo; item < hi; ++item)"):
            code.line(f"const int64_t plane = item / {code.dim(self.rows)};")
            to = f"out + item * {code.dim(self.row_stride)}"
            self.fill_row(code, to, "plane", f"item % {code.dim(self.rows)}")
        grid = planes * self.rows
        g.calls.append(finished_call(g.node, code, target, grid, self.row_stride))
        return replace(self, buffer=target, is_ready=True)


def framed(g: Lowering, image: Tensor, windows: Windows, outside: str) -> Frame:
    """The frame of an image [N, C, spatial..]; `outside` is what padding holds."""
    image = g.store(image)
    missing = 2 - len(windows.kernel)
    kernel, strides, dilations = (
        [1] * missing + values for values in (windows.kernel, windows.strides, windows.dilations)
    )
    above, before = [Dim.of(0)] * missing + windows.before
    height, columns = [Dim.of(1)] * missing + windows.sizes
    high, wide = [Dim.of(1)] * missing + windows.outputs
    reach = (kernel[1] - 1) * dilations[1]
    is_ready = strides[1] == 1 and windows.is_inside
    rows = (high - 1) * strides[0] + ((kernel[0] - 1) * dilations[0] + 1)
    width = wide + reach // strides[1]
    if is_ready:
        rows, width = height, columns
    phases = min(strides[1], reach + 1)
    row_stride = width * phases
    taps = tuple(
        row_stride * (y * dilations[0])
        + width * (x * dilations[1] % strides[1])
        + x * dilations[1] // strides[1]
        for y in range(kernel[0])
        for x in range(kernel[1])
    )
    return Frame(
        image.buffer, is_ready, image.shape[1], rows, phases, width, (height, columns),
        (above, before), strides[1], outside, (high, wide), row_stride * strides[0], taps,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class WindowsRight:
    """The right operand of a convolution: [N, group, C / group * taps, windows]."""

    frame: Frame
    depth: Dim
    """Channels of a group."""
    rows: Dim
    """Of the product."""

    def panel(self, code: Code, batch: Sequence[str], depth: Dim) -> None:
        """A copy."""
        frame = self.frame
        code.headers.setdefault("windows.h")
        dim = code.dim
        image, group = batch
        plane = f"{image} * {dim(frame.channels)} + {group} * {dim(self.depth)}"
        stride, taps = dim(frame.channel_stride), len(frame.taps)
        code.line("float* const panel = spare;")
        is_whole = self.step(depth) == depth
        with code.block("if (tile_column != filled)" if is_whole else ""):
            code.line("filled = tile_column;")
            code.line(f"const int64_t taps[] = {{{', '.join(map(dim, frame.taps))}}};")
            code.line(f"const int64_t plane = {plane} + first_k / {taps};")
            code.line(
                f"window_panel<{taps}>(panel, {code.buffer(frame.buffer)} + plane * {stride},"
            )
            code.line(f"    first_n, columns, {dim(frame.outputs[1])}, {dim(frame.row_step)},")
            code.line(f"    depth / {taps}, {stride}, taps);")

    def step(self, depth: Dim) -> Dim:
        """Whole channels, so many that a panel stays in the first cache.

        All, where tiles below each other share a panel: then whole rows of many weights are read.
        """
        if self.rows.constant is None or self.rows.constant > MOST_ROWS:
            return depth
        taps = len(self.frame.taps)
        return smallest(depth, max(1, _PANEL_DEPTH // taps) * taps)

    def spare_elements(self, depth: Dim) -> Dim | int:
        """One panel."""
        return self.step(depth) * PANEL_COLUMNS


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """What one channel's windows give: a depthwise convolution, the largest, or the sum.

    It is finished by its readers, as a product is: products.py.
    """

    frame: Frame
    combine: Literal["fma", "larger", "sum"]
    shape: Box
    """[N, M, outputs..]; M is a multiple of the frame's channels."""
    weight: Stored | None = None
    """[M, 1, kernel..]"""

    def tensor(self) -> Tensor:
        """To be finished."""

        def at(code: Code, index: Index) -> str:
            return code.let("float", "done[j]")

        return Tensor("float32", self.shape, at, cost=DEAR, product=self)

    def reshaped(self, x: Tensor, shape: Box) -> Tensor | None:
        """None: it is stored first."""
        return None

    def call(self, node: str, tensor: Tensor, target: Buffer) -> Call:
        """The kernel; an item of the grid is a plane of the result."""
        code, frame = Code(), self.frame
        code.headers |= {"level.h": None, "windows.h": None}
        dim = code.dim
        images, channels = self.shape[:2]
        high, wide = frame.outputs
        is_small = wide.constant is not None and wide.constant < _SMALL_ROW
        block = high if is_small else smallest(high, _ROWS_OF_BLOCK)
        # Rows of a small plane are computed in one go, with what is between them.
        is_flat = is_small and frame.row_step == frame.row_stride
        with code.block("for (int64_t item = lo; item < hi; ++item)"):
            code.line(f"[[maybe_unused]] const int64_t image = item / {dim(channels)};")
            code.line(f"[[maybe_unused]] const int64_t channel = item % {dim(channels)};")
            code.line("float* const sums = static_cast<float*>(workspace);")
            spare = self._sums(code, block, is_flat)
            self._begin(code, channels, spare)
            with code.block(f"for (int64_t first = 0; first < {dim(high)}; first += {dim(block)})"):
                code.line(f"const float* const line = from + first * {dim(frame.row_step)};")
                code.line(f"const int64_t lines = least({dim(block)}, {dim(high)} - first);")
                self._combine(code, is_flat)
                code.line("#pragma GCC ivdep")
                with code.block(f"for (int64_t j = 0; j < lines * {dim(wide)}; ++j)"):
                    code.line(f"[[maybe_unused]] const int64_t p = first * {dim(wide)} + j;")
                    names = ["image", "channel", *code.split("p", self.shape[2:])]
                    index = [c_index(s, n) for s, n in zip(self.shape, names, strict=True)]
                    value = code.as_stored(target.dtype, tensor.at(code, index))
                    code.line(f"out[{linear(code, self.shape, index)}] = {value};")
        cost = high * wide * (len(frame.taps) // 4 + 1)
        own = spare if frame.is_ready else spare + frame.channel_stride
        return finished_call(node, code, target, images * channels, cost, own * 4)

    def _sums(self, code: Code, block: Dim, is_flat: bool) -> Dim:
        """Declare `done`, the results of a block; where the workspace goes on, in elements."""
        if not is_flat:
            code.line("float* const done = sums;")
            return block * self.frame.outputs[1] + _SLACK
        size = block * self.frame.row_stride + _SLACK
        code.line(f"float* const done = sums + {code.dim(size)};")
        return size * 2

    def _begin(self, code: Code, channels: Dim, spare: Dim) -> None:
        """Declare `from`, the plane, and the weights."""
        frame, plane = self.frame, "item"
        if frame.channels != channels:
            group = code.dim(channels // frame.channels)
            plane = f"(image * {code.dim(frame.channels)} + channel / {group})"
        if frame.is_ready:
            stride = code.dim(frame.channel_stride)
            code.line(
                f"const float* const from = {code.buffer(frame.buffer)} + {plane} * {stride};"
            )
        else:
            code.line(f"float* const from = sums + {code.dim(spare)};")
            with code.block(f"for (int64_t r = 0; r < {code.dim(frame.rows)}; ++r)"):
                frame.fill_row(code, f"from + r * {code.dim(frame.row_stride)}", plane, "r")
        if self.weight is not None:
            count = len(frame.taps)
            weights = code.buffer(self.weight.buffer)
            code.line(f"const float* const w = {weights} + channel * {count};")
            for tap in range(count):
                code.line(f"const float w{tap} = w[{tap}];")

    def _combine(self, code: Code, is_flat: bool) -> None:
        """Fill `done` with the results of a block of `lines` rows."""
        wide = code.dim(self.frame.outputs[1])
        if is_flat:
            pitch = code.dim(self.frame.row_stride)
            code.line("#pragma GCC ivdep")
            with code.block(f"for (int64_t j = 0; j < (lines - 1) * {pitch} + {wide}; ++j)"):
                code.line(f"sums[j] = {self._value(code, 'line')};")
            code.line(f"close_rows(done, sums, lines, {pitch}, {wide});")
            return
        with code.block("for (int64_t r = 0; r < lines; ++r)"):
            code.line(f"const float* const row = line + r * {code.dim(self.frame.row_step)};")
            code.line("#pragma GCC ivdep")
            with code.block(f"for (int64_t j = 0; j < {wide}; ++j)"):
                code.line(f"done[r * {wide} + j] = {self._value(code, 'row')};")

    def _value(self, code: Code, row: str) -> str:
        """The combined taps of window j of a row."""
        reads = [f"{row}[{code.dim(tap)} + j]" for tap in self.frame.taps]
        value = reads[0] if self.weight is None else f"w0 * {reads[0]}"
        for tap, read in enumerate(reads[1:], 1):
            if self.combine == "fma":
                value = f"__builtin_fmaf(w{tap}, {read}, {value})"
            elif self.combine == "sum":
                value = f"{value} + {read}"
            else:
                value = f"larger<float>({value}, {read})"
        return value


__all__ = ["MOST_TAPS", "Frame", "Taps", "WindowsRight", "framed"]
