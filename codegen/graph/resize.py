"""Resize and Upsample: one axis after the other, each a table of source elements and weights.

Interpolation is separable, and every mode is a weighted sum of a few elements along each axis
(ONNX Resize 19). Sizes and scales of the axes that change are known at compile time, so positions
and weights are computed here, in double precision, and become constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.codegen.graph.elementwise import FLOATS
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import axis_of
from atsc.codegen.graph.tensor import DEAR, Code, Index, Tensor, c_index, c_type
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import OnnxNode

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis changes."""

    size: int
    scale: float
    out_size: int
    roi: tuple[float, float] = (0.0, 1.0)


def _resize(g: Lowering, node: OnnxNode, x: list[Any]) -> Tensor:
    image: Tensor = x[0]
    mode = node.attrs.get("mode", "nearest")
    if mode != "nearest" and image.dtype not in FLOATS:
        raise RefusedError(f"mode {mode} of {image.dtype}")
    axes, plan = _plan(g, node, x)
    for axis, change in zip(axes, plan, strict=True):
        plain = change.out_size == change.size and change.scale == 1
        if plain and _attr(node, "coordinate_transformation_mode") != "tf_crop_and_resize":
            continue
        image = _resized_axis(g, node, image, axis, change)
    return image


def _attr(node: OnnxNode, name: str) -> Any:
    """An attribute; version 10 and Upsample have none and mean what these defaults say."""
    old = node.op == "Upsample" or node.opset < 11
    defaults = {
        "mode": "nearest",
        "coordinate_transformation_mode": "asymmetric" if old else "half_pixel",
        "nearest_mode": "floor" if old else "round_prefer_floor",
        "cubic_coeff_a": -0.75,
        "exclude_outside": 0,
        "extrapolation_value": 0.0,
        "antialias": 0,
        "keep_aspect_ratio_policy": "stretch",
    }
    return node.attrs.get(name, defaults[name])


def _plan(g: Lowering, node: OnnxNode, x: list[Any]) -> tuple[list[int], list[_Axis]]:
    """The axes, and what becomes of each; those that do not change may be open."""
    image: Tensor = x[0]
    old = node.op == "Upsample" or node.opset < 11
    roi, scales, sizes = [None, *x[1:], None, None][:3] if old else [*x[1:], None, None, None][:3]
    axes = [axis_of(int(a), image.rank) for a in node.attrs.get("axes", range(image.rank))]
    count = len(axes)
    factors: list[float] | None = None
    if "scales" in node.attrs:
        factors = [float(f) for f in node.attrs["scales"]]
    elif scales is not None and scales.shape != (Dim.of(0),):
        factors = [float(f) for f in g.content(scales, "scales").reshape(-1)]
    wanted = g.dims(sizes, "sizes") if factors is None and sizes is not None else None
    if (factors is None) == (wanted is None) or len(factors or wanted or ()) != count:
        raise RefusedError("neither scales nor sizes for its axes")
    regions = [(0.0, 1.0)] * count
    if _attr(node, "coordinate_transformation_mode") == "tf_crop_and_resize":
        given = g.content(roi, "roi").reshape(-1).astype(np.float64)
        regions = [(float(given[i]), float(given[i + count])) for i in range(count)]
    plan = []
    for place, axis in enumerate(axes):
        size = image.shape[axis]
        unchanged = (factors and factors[place] == 1) or (wanted and wanted[place] == size)
        if size.constant is None and unchanged and regions[place] == (0.0, 1.0):
            plan.append(_Axis(0, 1.0, 0))
        elif size.constant is None:
            raise RefusedError(f"the size of axis {axis}, which it changes, is open")
        elif factors is not None:
            out = math.floor(size.constant * factors[place])
            plan.append(_Axis(size.constant, factors[place], out, regions[place]))
        else:
            assert wanted is not None
            out = g.ints(sizes, "sizes")[place]
            plan.append(_Axis(size.constant, out / size.constant, out, regions[place]))
    policy = _attr(node, "keep_aspect_ratio_policy")
    if wanted is not None and policy != "stretch":
        choose = min if policy == "not_larger" else max
        scale = choose(axis.scale for axis in plan)
        plan = [
            _Axis(axis.size, scale, math.floor(scale * axis.size + 0.5), axis.roi) for axis in plan
        ]
    return axes, plan


def _resized_axis(g: Lowering, node: OnnxNode, image: Tensor, axis: int, change: _Axis) -> Tensor:
    image = g.cheap(image)
    at_source = _positions(node, change)
    mode = _attr(node, "mode")
    if mode == "nearest":
        places, weights = _nearest(_attr(node, "nearest_mode"), at_source)[:, None], None
    else:
        places, weights = _taps(node, mode, at_source, change.scale)
        if _attr(node, "exclude_outside"):
            weights = np.where((places < 0) | (places >= change.size), 0.0, weights)
            weights = weights / weights.sum(1, keepdims=True)
    crops = _attr(node, "coordinate_transformation_mode") == "tf_crop_and_resize"
    outside = (at_source < 0) | (at_source > change.size - 1) if crops else None
    table = g.array(np.clip(places, 0, change.size - 1).astype(np.int32))
    factors = None if weights is None else g.array(weights.astype(np.float32))
    beyond = None if outside is None or not outside.any() else g.array(outside)
    kind, count = c_type(image.dtype), places.shape[1]
    rest = f"({kind}){float(_attr(node, 'extrapolation_value')).hex()}"

    def at(code: Code, index: Index) -> str:
        own, total = list(index), ""
        column = (lambda k: "0") if count == 1 else str
        row = c_index(Dim.of(change.out_size), index[axis])
        for k in range(count):
            place = table.at(code, [row, column(k)])
            own[axis] = c_index(Dim.of(change.size), code.let("int64_t", f"{place}", "i"))
            value = image.at(code, own)
            if factors is not None:
                value = f"{value} * ({kind}){factors.at(code, [row, column(k)])}"
            total = code.let(kind, value if not total else f"{total} + {value}")
        if beyond is not None:
            total = f"{beyond.at(code, [row])} ? {rest} : {total}"
        return code.let(kind, code.rounded(image.dtype, total))

    shape = tuple(Dim.of(change.out_size) if a == axis else s for a, s in enumerate(image.shape))
    return Tensor(image.dtype, shape, at, cost=count + image.cost * count if count > 1 else DEAR)


def _positions(node: OnnxNode, change: _Axis) -> _Floats:
    """Where each element of the result lies on the source's axis."""
    mode = _attr(node, "coordinate_transformation_mode")
    x = np.arange(change.out_size, dtype=np.float64)
    size, scale = change.size, change.scale
    resized = scale * size
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and resized > 1):
        return (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return x * 0
    if mode == "half_pixel_symmetric":
        offset = size / 2 * (1 - change.out_size / resized)
        return offset + (x + 0.5) / scale - 0.5
    if mode == "align_corners":
        return x * 0 if resized == 1 else x * (size - 1) / (resized - 1)
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_crop_and_resize":
        start, end = change.roi
        if change.out_size > 1:
            step = (end - start) * (size - 1) / (resized - 1)
            return start * (size - 1) + x * step
        return x * 0 + (start + end) * (size - 1) / 2
    raise RefusedError(f"coordinate_transformation_mode {mode}")


def _nearest(mode: str, at_source: _Floats) -> NDArray[np.int64]:
    if mode == "round_prefer_floor":
        nearest = np.ceil(at_source - 0.5)
    elif mode == "round_prefer_ceil":
        nearest = np.floor(at_source + 0.5)
    elif mode == "floor":
        nearest = np.floor(at_source)
    elif mode == "ceil":
        nearest = np.ceil(at_source)
    else:
        raise RefusedError(f"nearest_mode {mode}")
    return nearest.astype(np.int64)


def _taps(
    node: OnnxNode, mode: str, at_source: _Floats, scale: float
) -> tuple[NDArray[np.int64], _Floats]:
    """Source elements and weights, one row an element of the result."""
    if mode not in ("linear", "cubic"):
        raise RefusedError(f"mode {mode}")
    reach = 1 if mode == "linear" else 2
    # Shrinking with antialias widens the kernel until it covers what is left out.
    narrow = min(scale, 1.0) if _attr(node, "antialias") else 1.0
    first = math.floor(-reach / narrow) + 1
    base = np.floor(at_source)
    steps = np.arange(first, -first + 2)
    distance = np.abs((steps[None, :] - (at_source - base)[:, None]) * narrow)
    if mode == "linear":
        weights = np.clip(1 - distance, 0, 1)
    else:
        a = float(np.float32(_attr(node, "cubic_coeff_a")))
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((distance - 5) * distance + 8) * distance * a - 4 * a
        weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    if narrow < 1:
        weights = weights / weights.sum(1, keepdims=True)
    return (base[:, None] + steps[None, :]).astype(np.int64), weights


RULES: dict[tuple[str, str], Rule] = {("", "Resize"): _resize, ("", "Upsample"): _resize}
