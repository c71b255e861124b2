"""Products of matrices, convolutions as products with windows of the image, and pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atsc.codegen.graph.elementwise import FLOATS, cast, elementwise
from atsc.codegen.graph.kernels import product_call
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import padded, reshaped, transposed, unsqueezed
from atsc.codegen.graph.products import LooseRight, Product
from atsc.codegen.graph.reduce import binary, largest_of, mean_of, plus, reduced, total_of, unary
from atsc.codegen.graph.tensor import Code, Index, Stored, Tensor, c_index, c_type, stored
from atsc.compiler.dims import Dim, product
from atsc.compiler.tensor_graph import OnnxNode


def matrix_product(g: Lowering, left: Tensor, right: Tensor) -> Tensor:
    """[batch.., M, K] times [batch.., K, N], in memory; batches broadcast.

    fp16 and bf16 operands are multiplied as floats.
    """
    return g.store(pending_product(g, left, right))


def pending_product(g: Lowering, left: Tensor, right: Tensor) -> Tensor:
    """The same, to be finished by what reads it if it is of float32: products.py."""
    if right.rank == 2 and left.rank > 2 and isinstance(left, Stored):
        # One matrix for all batches: their rows are rows of one large operand.
        rows = stored(left.buffer, (product(left.shape[:-1]), left.shape[-1]))
        made = pending_product(g, rows, right)
        return reshaped(g, made, (*left.shape[:-1], right.shape[-1]))
    batch = g.broadcast([left.shape[:-2], right.shape[:-2]])
    left, right = (_batched(g, x, len(batch)) for x in (left, right))
    g.agree(left.shape[-1], right.shape[-2], "the sizes that are summed over")
    if left.dtype == right.dtype == "float32":
        left = left if left.view is not None else g.store(left)
        return Product(left, g.packed(right) or LooseRight(right), batch, right.shape[-1]).tensor()
    target = g.buffer(left.dtype, (*batch, left.shape[-2], right.shape[-1]))
    g.calls.append(product_call(g.node, left, right, target, batch))
    return stored(target)


def _batched(g: Lowering, x: Tensor, batches: int) -> Tensor:
    """An operand that packing may read more than once, with all batch dimensions."""
    x = g.cheap(x)
    missing = batches + 2 - x.rank
    return unsqueezed(g, x, list(range(missing))) if missing else x


def _matmul(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    left, right = x
    if left.rank == 0 or right.rank == 0:
        raise RefusedError("a scalar operand")
    is_row, is_column = left.rank == 1, right.rank == 1
    if is_row:
        left = unsqueezed(g, left, [0])
    if is_column:
        right = unsqueezed(g, right, [1])
    result = pending_product(g, left, right)
    shape = list(result.shape)
    if is_column:
        shape.pop()
    if is_row:
        shape.pop(-1 if is_column else -2)
    return reshaped(g, result, tuple(shape))


def _gemm(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    left, right = x[:2]
    bias = x[2] if len(x) > 2 else None
    if left.dtype not in FLOATS:
        raise RefusedError(f"operands of type {left.dtype}")
    left = transposed(left, [1, 0]) if node.attrs.get("transA", 0) else left
    right = transposed(right, [1, 0]) if node.attrs.get("transB", 0) else right
    result = pending_product(g, left, right)
    result = _times(g, result, node.attrs.get("alpha", 1.0))
    if bias is not None:
        result = binary(g, result, _times(g, bias, node.attrs.get("beta", 1.0)), "{0} + {1}")
    return result


def _times(g: Lowering, x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else unary(g, x, f"{{0}} * ({{kind}}){float(np.float32(factor)).hex()}")


def _without_zero_point(g: Lowering, x: Tensor, zero: Tensor | None, rows: bool) -> Tensor:
    """Integers less their zero point, as int32; a vector of those is of rows, or of columns."""
    x = cast(g, x, "int32")
    if zero is None:
        return x
    zero = cast(g, zero, "int32")
    if zero.rank == 1 and zero.shape[0].constant != 1 and rows:
        zero = unsqueezed(g, zero, [1])
    return elementwise(g, [x, zero], "int32", lambda a, b: f"{a} - {b}")


def _matmul_integer(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    zeros = [*x[2:], None, None][:2]
    left = _without_zero_point(g, x[0], zeros[0], True)
    right = _without_zero_point(g, x[1], zeros[1], False)
    return _matmul(g, node, [left, right])


def _einsum(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    """Of one or two operands without ellipses and without an index twice in one of them."""
    equation = node.attrs["equation"].replace(" ", "")
    sources, _, target = equation.partition("->")
    terms = sources.split(",")
    if "->" not in equation:
        letters = "".join(terms)
        target = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    doubled = any(len(set(term)) < len(term) for term in terms)
    if "." in equation or len(x) > 2 or doubled:
        raise RefusedError(f"equation {equation}")
    sizes: dict[str, Dim] = {}
    for term, operand in zip(terms, x, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            sizes[letter] = g.agree(sizes.get(letter, size), size, f"sizes of {letter} in Einsum")
    operands = []
    for number, (term, operand) in enumerate(zip(terms, x, strict=True)):
        # What only this operand has and the result lacks is summed first.
        others = set(target).union(*(t for i, t in enumerate(terms) if i != number))
        gone = [axis for axis, letter in enumerate(term) if letter not in others]
        if gone:
            operand = total_of(g, operand, gone)
            kept = [axis for axis in range(len(term)) if axis not in gone]
            operand = reshaped(g, operand, tuple(operand.shape[axis] for axis in kept))
            term = "".join(term[axis] for axis in kept)
        operands.append((term, operand))
    if len(operands) == 1:
        term, operand = operands[0]
        return transposed(operand, [term.index(letter) for letter in target])
    (left, a), (right, b) = operands
    batch = [c for c in target if c in left and c in right]
    rows = [c for c in target if c in left and c not in right]
    columns = [c for c in target if c in right and c not in left]
    summed = [c for c in left if c in right and c not in target]

    def matrix(term: str, operand: Tensor, *groups: list[str]) -> Tensor:
        order = [term.index(letter) for letter in [*batch, *groups[0], *groups[1]]]
        flat = (*(sizes[c] for c in batch), *(product(sizes[c] for c in part) for part in groups))
        return reshaped(g, transposed(operand, order), flat)

    made = matrix_product(g, matrix(left, a, rows, summed), matrix(right, b, summed, columns))
    letters_made = [*batch, *rows, *columns]
    whole = reshaped(g, made, tuple(sizes[letter] for letter in letters_made))
    return transposed(whole, [letters_made.index(letter) for letter in target])


class Windows:
    """How windows of a convolution or a pool lie over the spatial dimensions of an image."""

    def __init__(self, node: OnnxNode, image: Tensor, kernel: Sequence[int]) -> None:
        attrs, count = node.attrs, len(kernel)
        self.kernel = list(kernel)
        self.strides = list(attrs.get("strides", [1] * count))
        self.dilations = list(attrs.get("dilations", [1] * count))
        self.extents = [
            (k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)
        ]  # fmt: skip
        pads = list(attrs.get("pads", [0] * 2 * count))
        auto = attrs.get("auto_pad", "NOTSET") or "NOTSET"
        self.before: list[Dim] = [Dim.of(0 if auto == "VALID" else p) for p in pads[:count]]
        self.after: list[Dim] = [Dim.of(0 if auto == "VALID" else p) for p in pads[count:]]
        self.sizes = list(image.shape[2:])
        self.outputs: list[Dim] = []
        ceil = attrs.get("ceil_mode", 0)
        for axis, (size, stride, extent) in enumerate(
            zip(self.sizes, self.strides, self.extents, strict=True)
        ):
            if auto in ("SAME_UPPER", "SAME_LOWER"):
                out = (size + (stride - 1)) // stride
                whole = (out - 1) * stride + extent - size
                if whole.constant is None:
                    raise RefusedError(f"auto_pad {auto} of an image of unknown size")
                whole = Dim.of(max(whole.constant, 0))
                half = whole // 2
                upper = auto == "SAME_UPPER"
                self.before[axis], self.after[axis] = (
                    (half, whole - half) if upper else (whole - half, half)
                )
            span = size + self.before[axis] + self.after[axis] - extent
            out = (span + (stride - 1 if ceil else 0)) // stride + 1
            if ceil:
                if out.constant is None or size.constant is None:
                    raise RefusedError("ceil_mode with an image of unknown size")
                # A window may not begin in the padding after the image.
                begin = (out - 1) * stride - self.before[axis]
                if begin.constant is not None and begin.constant >= size.constant:
                    out = out - 1
            if out.constant is not None and out.constant <= 0:
                raise RefusedError("a window larger than the padded image")
            self.outputs.append(out)

    def places(self, code: Code, at: Index, k: Index) -> tuple[list[str], str]:
        """Where in the image position `k` of window `at` lies, and whether that is inside."""
        places, inside = [], []
        for axis, size in enumerate(self.sizes):
            stride, dilation = self.strides[axis], self.dilations[axis]
            text = f"{at[axis]} * {stride}L + {k[axis]} * {dilation}L"
            place = code.index(f"{text} - {code.dim(self.before[axis])}")
            places.append(place)
            inside.append(f"{place} >= 0 && {place} < {code.dim(size)}")
        return places, " && ".join(inside)


def windowed(image: Tensor, windows: Windows, outside: str) -> Tensor:
    """[N, C, out.., kernel..]: every window of an image, `outside` where it is beyond the image."""
    count, kind = len(windows.kernel), c_type(image.dtype)

    def at(code: Code, index: Index) -> str:
        places, inside = windows.places(code, index[2 : 2 + count], index[2 + count :])
        own = [*index[:2], *(c_index(s, p) for s, p in zip(image.shape[2:], places, strict=True))]
        return code.choose(kind, inside, lambda: image.at(code, own), lambda: outside)

    kernel = [Dim.of(k) for k in windows.kernel]
    shape = (*image.shape[:2], *windows.outputs, *kernel)
    return Tensor(image.dtype, shape, at, cost=image.cost + 2)


def _conv(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    image, weight = x[:2]
    kernel = [_number(size, "the kernel") for size in weight.shape[2:]]
    if image.rank < 3:
        raise RefusedError(f"an image of {image.rank} dimensions")
    windows = Windows(node, image, kernel)
    return _convolution(
        g, g.cheap(image), weight, windows, node.attrs.get("group", 1), _bias(x), "0"
    )


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
    shape = (n, weight.shape[0], *windows.outputs)
    result = reshaped(g, pending_product(g, left, right), shape)
    if bias is not None:
        bias = reshaped(g, bias, (bias.shape[0], *[Dim.of(1)] * count))
        result = binary(g, result, bias, "{0} + {1}")
    return result


def _conv_integer(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    zeros = [*x[2:], None, None][:2]
    # Padding is of zero points, that is of zeros once those are taken off.
    image = _without_zero_point(g, x[0], zeros[0], False)
    weight = cast(g, x[1], "int32")
    if zeros[1] is not None:
        zero = cast(g, zeros[1], "int32")
        if zero.rank == 1 and zero.shape[0].constant != 1:
            zero = reshaped(g, zero, (zero.shape[0], *[Dim.of(1)] * (weight.rank - 1)))
        weight = elementwise(g, [weight, zero], "int32", lambda a, b: f"{a} - {b}")
    kernel = [_number(size, "the kernel") for size in weight.shape[2:]]
    windows = Windows(node, image, kernel)
    return _convolution(g, image, weight, windows, node.attrs.get("group", 1), None, "0")


def _max_pool(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise RefusedError("the output Indices")
    windows = Windows(node, x[0], node.attrs["kernel_shape"])
    image = g.cheap(x[0])
    lowest = "-__builtin_inf()"
    if image.dtype not in FLOATS:
        lowest = str(np.iinfo(image.dtype).min)
    return _over_windows(g, largest_of(g, windowed(image, windows, lowest), _kernel_axes(windows)))


def _kernel_axes(windows: Windows) -> list[int]:
    count = len(windows.kernel)
    return list(range(2 + count, 2 + 2 * count))


def _over_windows(g: Lowering, x: Tensor) -> Tensor:
    """Without the dimensions of the kernel, which were reduced to 1."""
    count = (x.rank - 2) // 2
    return reshaped(g, x, x.shape[: 2 + count])


def _average_pool(g: Lowering, node: OnnxNode, x: list[Tensor]) -> Tensor:
    windows, image = Windows(node, x[0], node.attrs["kernel_shape"]), g.cheap(x[0])
    axes, kind = _kernel_axes(windows), c_type(x[0].dtype)
    total = _over_windows(g, total_of(g, windowed(image, windows, "0"), axes))
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

    return Tensor(x[0].dtype, total.shape, at, cost=total.cost + 8)


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
        windows = Windows(node, x[0], node.attrs["kernel_shape"])
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
    windows = Windows(own, framed, kernel)
    return _convolution(g, framed, reshaped(g, mirrored, flat), windows, group, _bias(x), "0")


RULES: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "MatMulInteger"): _matmul_integer,
    ("", "Einsum"): _einsum,
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
