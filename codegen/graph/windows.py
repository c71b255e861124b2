"""How the windows of convolutions and pools lie over an image."""

from __future__ import annotations

from collections.abc import Sequence

from atsc.codegen.graph.lower import Lowering, RefusedError
from atsc.codegen.graph.tensor import Code, Index, Tensor, c_index, c_type
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import OnnxNode


class Windows:
    """How windows of a convolution or a pool lie over the spatial dimensions of an image."""

    def __init__(self, g: Lowering, node: OnnxNode, image: Tensor, kernel: Sequence[int]) -> None:
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
            g.at_least(out, 1, "the number of windows that the padded image holds")
            self.outputs.append(out)
        pads_used = [*self.before, *self.after]
        self.is_inside = not ceil and all(pad.constant == 0 for pad in pads_used)
        """No window reaches beyond the image."""

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
