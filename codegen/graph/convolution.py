"""Convolutions, as products with windows of the image, and pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from atsc.codegen.graph.elementwise import FLOATS, cast
from atsc.codegen.graph.frames import MOST_TAPS, Frame, Taps, WindowsRight, framed
from atsc.codegen.graph.integer_windows import code_convolution
from atsc.codegen.graph.integers import MOST_EXACT_DEPTH, constant_floats
from atsc.codegen.graph.linear import matrix_product, without_dimensions, without_zero_point
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import padded, reshaped, transposed
from atsc.codegen.graph.products import Product
from atsc.codegen.graph.reduce import binary, largest_of, mean_of, plus, reduced, total_of, unary
from atsc.codegen.graph.tensor import Code, Index, Tensor, c_index, c_type
from atsc.codegen.graph.windows import Windows, windowed
from atsc.compiler.dims import Dim, product
from atsc.compiler.tensor_graph import OnnxNode


def _conv(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    image, weight = x[:2]
    windows = windows_of(g, node, image, weight)
    made = _dequantised_convolution(g, node, image, weight, windows)
    if made is not None:
        return _biased(g, made, _bias(x))
    weight = constant_floats(g, weight)
    return _convolution(
        g, g.cheap(image), weight, windows, node.attrs.get("group", 1), _bias(x), "0"
    )


def windows_of(g: Lowering, node: OnnxNode, image: Tensor, weight: Tensor) -> Windows:
    """How a convolution reads its image."""
    if image.rank < 3:
        raise RefusedError(f"an image of {image.rank} dimensions")
    kernel = [_number(size, "the kernel") for size in weight.shape[2:]]
    return Windows(g, node, image, kernel)


def _dequantised_convolution(
    g: Lowering, node: OnnxNode, image: Tensor, weight: Tensor, windows: Windows
) -> Tensor | None:
    """Of floats that stand for integers, by those; None where they do not."""
    a, b = image.quantised, weight.quantised
    if a is None or b is None or a.axis is not None or b.axis not in (None, 0):
        return None
    depth = _number(weight.shape[1], "the kernel") * int(np.prod(windows.kernel))
    if depth > MOST_EXACT_DEPTH:
        return None
    total = integer_convolution(g, node, windows, (a.codes, a.zero), (b.codes, b.zero))
    factor = binary(
        g, without_dimensions(g, a.scale), of_first(g, b.scale, total.rank - 1), "{0} * {1}"
    )
    return binary(g, cast(g, total, "float32"), factor, "{0} * {1}")


def _bias(x: list[Any]) -> Tensor | None:
    return x[2] if len(x) > 2 else None


def _number(size: Dim, what: str) -> int:
    if size.constant is None:
        raise RefusedError(f"{what} has size {size}, which must be a constant")
    return size.constant


def _convolution(
    g: Lowering,
    image: Tensor,
    weight: Tensor,
    windows: Windows,
    group: int,
    bias: Tensor | None,
    outside: str,
) -> Tensor:
    """weight [group, M / group, C / group * kernel] times windows [N, group, C .., pixels]."""
    n, channels = image.shape[:2]
    pixels, count = product(windows.outputs), len(windows.kernel)
    depth = _number(weight.shape[1], "the kernel")
    g.agree(channels, Dim.of(depth * group), "channels of the image and of the kernel")
    per_group = weight.shape[0] // group
    shape = (n, weight.shape[0], *windows.outputs)
    if image.dtype == weight.dtype == "float32" and count <= 2:
        result = _framed_convolution(g, image, weight, windows, group, outside)
        return _biased(g, result, bias)
    taps = depth * int(np.prod(windows.kernel))
    patches = windowed(image, windows, outside)

    def at(code: Code, index: Index) -> str:
        # [N, group, K, pixel]
        rest, k_places = index[2], []
        for size in reversed(windows.kernel):
            k_places.append("0" if size == 1 else code.index(f"{rest} % {size}L"))
            rest = rest if size == 1 else code.index(f"{rest} / {size}L")
        channel = rest if group == 1 else code.index(f"{index[1]} * {depth}L + {rest}")
        pixel = index[3]
        out_places: list[str] = []
        for length in reversed(windows.outputs[1:]):
            out_places.append(code.index(f"{pixel} % {code.dim(length)}"))
            pixel = code.index(f"{pixel} / {code.dim(length)}")
        out_places.append(pixel)
        channel = c_index(channels, channel)
        own = [index[0], channel, *reversed(out_places), *reversed(k_places)]
        return patches.at(code, own)

    right = Tensor(image.dtype, (n, Dim.of(group), Dim.of(taps), pixels), at)
    left = reshaped(g, g.store(weight), (Dim.of(1), Dim.of(group), per_group, Dim.of(taps)))
    return _biased(g, reshaped(g, matrix_product(g, left, right), shape), bias)


def _biased(g: Lowering, x: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x
    bias = reshaped(g, bias, (bias.shape[0], *[Dim.of(1)] * (x.rank - 2)))
    return binary(g, x, bias, "{0} + {1}")


def _framed_convolution(
    g: Lowering, image: Tensor, weight: Tensor, windows: Windows, group: int, outside: str
) -> Tensor:
    """Of float32 and at most two dimensions: by what templates/graph/windows.h does."""
    frame, taps = framed(g, image, windows, outside), int(np.prod(windows.kernel))
    depth, weight = weight.shape[1], g.store(weight)
    shape = (image.shape[0], weight.shape[0], *windows.outputs)
    if depth.constant == 1 and group > 1 and taps <= MOST_TAPS:
        return Taps(frame, "fma", shape, weight).tensor()
    per_group = weight.shape[0] // group
    left = reshaped(g, weight, (Dim.of(1), Dim.of(group), per_group, depth * taps))
    right = WindowsRight(frame.stored(g, image.shape[0] * image.shape[1]), depth, per_group)
    batch = (image.shape[0], Dim.of(group))
    made = Product(batch, per_group, product(windows.outputs), left, right).tensor()
    return reshaped(g, made, shape)


def _conv_integer(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    image_zero, weight_zero = [*x[2:], None, None][:2]
    windows = windows_of(g, node, x[0], x[1])
    return integer_convolution(g, node, windows, (x[0], image_zero), (x[1], weight_zero))


Codes = tuple[Tensor, Tensor | None]


def integer_convolution(
    g: Lowering, node: OnnxNode, windows: Windows, image: Codes, weight: Codes
) -> Tensor:
    """ConvInteger: an image less its zero point by kernels less theirs, exact, as int32."""
    group = int(node.attrs.get("group", 1))
    depth = _number(weight[0].shape[1], "the kernel")
    g.agree(image[0].shape[1], Dim.of(depth * group), "channels of the image and of the kernel")
    made = code_convolution(g, *image, *weight, windows, group)
    if made is not None:
        return made
    # Padding is of zero points, that is of zeros once those are taken off.
    centred = without_zero_point(g, *image, False)
    kernels, zero = weight
    zero = None if zero is None else of_first(g, zero, kernels.rank)
    kernels = without_zero_point(g, kernels, zero, False)
    return _convolution(g, centred, kernels, windows, group, None, "0")


def of_first(g: Lowering, x: Tensor, rank: int) -> Tensor:
    """A parameter of a whole tensor, or of each element of its first dimension, to broadcast."""
    if x.size == Dim.of(1):
        return reshaped(g, x, ())
    return reshaped(g, x, (x.shape[0], *[Dim.of(1)] * (rank - 1)))


def _max_pool(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise RefusedError("the output Indices")
    windows = Windows(g, node, x[0], node.attrs["kernel_shape"])
    if (frame := _pool_frame(g, x[0], windows, "-__builtin_inff()")) is not None:
        return Taps(frame, "larger", (*x[0].shape[:2], *windows.outputs)).tensor()
    image = g.cheap(x[0])
    lowest = "-__builtin_inf()"
    if image.dtype not in FLOATS:
        lowest = str(np.iinfo(image.dtype).min)
    return _over_windows(g, largest_of(g, windowed(image, windows, lowest), _kernel_axes(windows)))


def _pool_frame(g: Lowering, image: Tensor, windows: Windows, outside: str) -> Frame | None:
    """The image of a pool in a frame; None where its windows are read one by one."""
    is_small = len(windows.kernel) <= 2 and int(np.prod(windows.kernel)) <= MOST_TAPS
    if image.dtype != "float32" or not is_small:
        return None
    return framed(g, image, windows, outside)


def _kernel_axes(windows: Windows) -> list[int]:
    count = len(windows.kernel)
    return list(range(2 + count, 2 + 2 * count))


def _over_windows(g: Lowering, x: Tensor) -> Tensor:
    """Without the dimensions of the kernel, which were reduced to 1."""
    count = (x.rank - 2) // 2
    return reshaped(g, x, x.shape[: 2 + count])


def _average_pool(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    windows, kind = Windows(g, node, x[0], node.attrs["kernel_shape"]), c_type(x[0].dtype)
    if (frame := _pool_frame(g, x[0], windows, "0")) is not None:
        total = Taps(frame, "sum", (*x[0].shape[:2], *windows.outputs)).tensor()
    else:
        patches = windowed(g.cheap(x[0]), windows, "0")
        total = _over_windows(g, total_of(g, patches, _kernel_axes(windows)))
    # Padding counts if asked for, but never what ceil_mode adds beyond it.
    limits = [
        (-before, size + after) if node.attrs.get("count_include_pad", 0) else (Dim.of(0), size)
        for size, before, after in zip(windows.sizes, windows.before, windows.after, strict=True)
    ]

    def at(code: Code, index: Index) -> str:
        ones = []
        for axis, (low, high) in enumerate(limits):
            begin = f"{index[2 + axis]} * {windows.strides[axis]}L"
            begin = code.index(f"{begin} - {code.dim(windows.before[axis])}")
            name = code.fresh("count")
            code.line(f"int64_t {name} = 0;")
            with code.block(f"for (int64_t k = 0; k < {windows.kernel[axis]}; ++k)"):
                place = code.index(f"{begin} + k * {windows.dilations[axis]}L")
                inside = f"{place} >= {code.dim(low)} && {place} < {code.dim(high)}"
                code.line(f"{name} += {inside};")
            ones.append(name)
        value = total.at(code, index)
        return code.rounded(x[0].dtype, f"({kind})({value} / ({kind})({' * '.join(ones)}))")

    return Tensor(x[0].dtype, total.shape, at, cost=total.cost + 8, product=total.product)


def _global_pool(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    axes = list(range(2, x[0].rank))
    if node.op == "GlobalAveragePool":
        return mean_of(g, x[0], axes)
    return largest_of(g, x[0], axes)


def _lp_pool(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    p = int(node.attrs.get("p", 2))
    kind = c_type(x[0].dtype)
    text = f"power<{{kind}}>(({{0}} < 0 ? -{{0}} : {{0}}), ({{kind}}){p})"
    powers = unary(g, g.cheap(x[0]), text, 24)
    if node.op == "GlobalLpPool":
        total = reduced(g, powers, list(range(2, x[0].rank)), f"({kind})0", plus(kind))
    else:
        windows = Windows(g, node, x[0], node.attrs["kernel_shape"])
        powers = g.store(powers)
        total = _over_windows(g, total_of(g, windowed(powers, windows, "0"), _kernel_axes(windows)))
    return unary(g, total, f"power<{{kind}}>({{0}}, ({{kind}}){(1 / p).hex()})", 24)


def _conv_transpose(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    """As a convolution of the image with its pixels `stride` apart, by the mirrored kernel."""
    image, weight = g.store(x[0]), x[1]
    attrs, group = node.attrs, node.attrs.get("group", 1)
    kernel = [_number(size, "the kernel") for size in weight.shape[2:]]
    count = len(kernel)
    strides = list(attrs.get("strides", [1] * count))
    dilations = list(attrs.get("dilations", [1] * count))
    extra = list(attrs.get("output_padding", [0] * count))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = list(attrs.get("pads", [0] * 2 * count))
    if "output_shape" in attrs or attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID", ""):
        sizes = [_number(size, "the image") for size in image.shape[2:]]
        wanted = list(
            attrs.get("output_shape", [s * t for s, t in zip(sizes, strides, strict=True)])
        )
        for axis, size in enumerate(sizes):
            total = (size - 1) * strides[axis] + extra[axis] + extents[axis] - wanted[axis]
            half = total // 2
            lower = attrs.get("auto_pad") == "SAME_UPPER"
            pads[axis], pads[axis + count] = (half, total - half) if lower else (total - half, half)
    spread_shape = [(s - 1) * t + 1 for s, t in zip(image.shape[2:], strides, strict=True)]

    def spread_at(code: Code, index: Index) -> str:
        hits, own = [], []
        for place, stride, size in zip(index[2:], strides, image.shape[2:], strict=True):
            if stride != 1:
                hits.append(f"{place} % {stride}L == 0")
            own.append(c_index(size, place if stride == 1 else code.index(f"{place} / {stride}L")))

        def load() -> str:
            return image.at(code, [*index[:2], *own])

        kind = c_type(image.dtype)
        return code.choose(kind, " && ".join(hits), load, lambda: "0") if hits else load()

    spread = Tensor(image.dtype, (*image.shape[:2], *spread_shape), spread_at, cost=2)
    before = [Dim.of(e - 1 - p) for e, p in zip(extents, pads[:count], strict=True)]
    after = [
        Dim.of(e - 1 - p + o) for e, p, o in zip(extents, pads[count:], extra, strict=True)
    ]  # fmt: skip
    zeros = [Dim.of(0)] * 2
    framed = padded(g, spread, [*zeros, *before], [*zeros, *after], None)
    depth = weight.shape[0] // group
    split = reshaped(g, weight, (Dim.of(group), depth, *weight.shape[1:]))
    moved = transposed(split, [0, 2, 1, *range(3, 3 + count)])

    def mirrored_at(code: Code, index: Index) -> str:
        places = [
            f"{k - 1}L - {at}" if k > 1 else at for k, at in zip(kernel, index[3:], strict=True)
        ]
        return moved.at(code, [*index[:3], *(code.index(place) for place in places)])

    mirrored = Tensor(moved.dtype, moved.shape, mirrored_at)
    flat = (moved.shape[0] * moved.shape[1], *moved.shape[2:])
    own = OnnxNode(node.name, "Conv", "", 1, (), (), {"dilations": dilations})
    windows = Windows(g, own, framed, kernel)
    return _convolution(g, framed, reshaped(g, mirrored, flat), windows, group, _bias(x), "0")


RULES: dict[tuple[str, str], Rule] = {
    ("", "Conv"): _conv,
    ("", "ConvInteger"): _conv_integer,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "MaxPool"): _max_pool,
    ("", "AveragePool"): _average_pool,
    ("", "LpPool"): _lp_pool,
    ("", "GlobalAveragePool"): _global_pool,
    ("", "GlobalMaxPool"): _global_pool,
    ("", "GlobalLpPool"): _lp_pool,
}
