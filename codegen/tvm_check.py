"""Compare a generated kernel with onnx's reference evaluator on random data.

Sizes that are open are bound twice, fixed ones get two seeds; of each pair one draw is smooth and
one coarse, so that ties and half integers occur. The kernel runs in ranges from the back, which no
right kernel can tell from one range. Results and workspace lie between guards.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from atsc.codegen.tail import ELEMENT_BYTES, ElementType, TensorType
from atsc.codegen.toolchain import Unit, compile_units, link_library
from atsc.codegen.tvm_request import Answer, Request
from atsc.compiler.dims import product
from atsc.compiler.errors import CodegenError

FLAGS = ("-mavx2", "-mfma", "-mf16c")
_BINDINGS = ((3, 5, 7, 2), (4, 6, 2, 8), (8, 16, 24, 32), (12, 24, 36, 48), (1, 1, 1, 1))
"""Values for symbols in order; the first two that the node's reference accepts are used."""
_NUM_DRAWS = 2
_GUARD_BYTES = 4096
_GUARD = 0xA5
_INDICES = {
    "Gather": 1, "GatherElements": 1, "GatherND": 1, "OneHot": 0, "ScatterElements": 1,
    "ScatterND": 1, "Scatter": 1, "ReverseSequence": 1, "TensorScatter": 2,
    "NegativeLogLikelihoodLoss": 1, "SoftmaxCrossEntropyLoss": 1,
}  # fmt: skip
"""Which input of an operator holds indices, small numbers that are none of its data."""
_TOLERANCES = {"float16": (2e-2, 1e-2), "float32": (1e-3, 2e-5), "float64": (1e-7, 1e-9)}
"""Relative and absolute; other types must be equal. Half precision: the reference rounds each step
of its own to half, the kernel only results."""


def name_of(request: Request) -> str:
    """The name of a request's kernel."""
    node = onnx.load_from_string(request.model).graph.node[0]
    digest = hashlib.sha256(request.to_text().encode()).hexdigest()[:12]
    return f"tvm_{node.op_type.lower()}_{digest}"


def check(request: Request, answer: Answer) -> None:
    """Compile a kernel and compare it with the reference.

    Raises:
        CodegenError: it differs, writes where it should not, or cannot be checked.
    """
    name = name_of(request)
    source = answer.source.replace("NAME", name)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        link_library(compile_units([Unit(name, source, (*FLAGS, "-fvisibility=default"))]), library)
        function = ctypes.CDLL(str(library))[name]
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
        function.restype = ctypes.c_int32
        done, reason = 0, ""
        for values in _BINDINGS if request.symbols else _BINDINGS[:1] * _NUM_DRAWS:
            bound = dict(zip(request.symbols, values * 4, strict=False))
            rng = np.random.default_rng(done)
            try:
                inputs = _draw(request, bound, rng, coarse=done % 2 == 1)
                expected = _reference(request, inputs)
            except CodegenError as error:
                reason = str(error)
                continue
            _compare(request, _run(function, request, answer, inputs, bound), expected, bound)
            done += 1
            if done == _NUM_DRAWS:
                return
    raise CodegenError(f"no random data to check it with: {reason}")


def _draw(
    request: Request, bound: Mapping[str, int], rng: np.random.Generator, coarse: bool
) -> list[np.ndarray]:
    """Random inputs."""
    node = onnx.load_from_string(request.model).graph.node[0]
    shapes = [_shape(kind, bound) for kind in request.inputs]
    indices = _INDICES.get(node.op_type, -1)
    graph = onnx.load_from_string(request.model).graph
    drawn = []
    for value, kind, shape in zip(graph.input, request.inputs, shapes, strict=True):
        if indices >= 0 and value.name == f"x{indices}" and kind.dtype in ("int32", "int64"):
            # A quarter of all indices would be illegal if they were drawn beyond the smallest axis.
            bounds = [size for other in shapes if len(other) for size in other if size > 0]
            drawn.append(rng.integers(0, min(bounds, default=1), shape).astype(kind.dtype))
        else:
            drawn.append(_random(kind.dtype, shape, rng, coarse))
    return drawn


def _random(
    dtype: ElementType, shape: tuple[int, ...], rng: np.random.Generator, coarse: bool
) -> np.ndarray:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.startswith("float"):
        numbers = rng.integers(-6, 7, shape) / 2 if coarse else rng.standard_normal(shape) * 1.5
        return np.asarray(numbers, dtype)
    low, high = (0, 4) if coarse else (1, 100)
    return rng.integers(low if dtype.startswith("u") or not coarse else -3, high, shape).astype(
        dtype
    )


def _shape(kind: TensorType, bound: Mapping[str, int]) -> tuple[int, ...]:
    shape = tuple(dim.evaluate(bound) for dim in kind.shape)
    if any(size < 0 for size in shape):
        raise CodegenError(f"a shape of {shape}")
    return shape


def _reference(request: Request, inputs: list[np.ndarray]) -> list[np.ndarray]:
    try:
        model = onnx.load_from_string(request.model)
        names = [value.name for value in model.graph.input]
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    except Exception as error:
        # The evaluator raises whatever its numpy code does.
        raise CodegenError(f"the reference fails: {str(error).splitlines()[:1]}") from error
    return [np.asarray(result) for result in results]


def _guarded(num_bytes: int) -> tuple[np.ndarray, int]:
    """A buffer with guards on both sides, and the address between them, 64-byte aligned."""
    buffer = np.full(num_bytes + 2 * _GUARD_BYTES + 64, _GUARD, np.uint8)
    start = buffer.ctypes.data + _GUARD_BYTES
    return buffer, start + -start % 64


def _intact(buffer: np.ndarray, start: int, num_bytes: int) -> bool:
    before = start - buffer.ctypes.data
    outside = np.concatenate([buffer[:before], buffer[before + num_bytes :]])
    return bool((outside == _GUARD).all())


def _run(
    function: Any,
    request: Request,
    answer: Answer,
    inputs: list[np.ndarray],
    bound: Mapping[str, int],
) -> list[np.ndarray]:
    sizes = [array.nbytes for array in inputs]
    shapes = [_shape(kind, bound) for kind in request.outputs]
    for kind, shape in zip(request.outputs, shapes, strict=True):
        sizes.append(int(product(shape).constant or 0) * ELEMENT_BYTES[kind.dtype])
    sizes.append(answer.workspace_bytes.evaluate(bound))
    buffers = [_guarded(size) for size in sizes]
    for (_, start), array in zip(buffers, inputs, strict=False):
        flat = np.ascontiguousarray(array)
        ctypes.memmove(start, flat.ctypes.data, flat.nbytes)
    tensors = (ctypes.c_void_p * len(buffers))(*(start for _, start in buffers))
    values = [bound[symbol] for symbol in request.symbols]
    dims = (ctypes.c_int64 * max(1, len(values)))(*values)
    grid = answer.grid.evaluate(bound)
    edges = sorted({0, grid // 3, grid // 3 * 2, grid})
    for lo, hi in reversed(list(itertools.pairwise(edges))):
        if function(tensors, dims, tensors[len(buffers) - 1], lo, hi) != 0:
            raise CodegenError("the kernel refuses data that the reference accepts")
    for (buffer, start), size in zip(buffers, sizes, strict=True):
        if not _intact(buffer, start, size):
            raise CodegenError(f"the kernel writes outside of its tensors for sizes {dict(bound)}")
    results = []
    for (_, start), kind, shape in zip(
        buffers[len(inputs) :], request.outputs, shapes, strict=False
    ):
        count = int(np.prod(shape)) * ELEMENT_BYTES[kind.dtype]
        content = ctypes.string_at(start, count)
        results.append(np.frombuffer(content, np.dtype(kind.dtype)).reshape(shape))
    return results


def _compare(
    request: Request,
    found: list[np.ndarray],
    expected: list[np.ndarray],
    bound: Mapping[str, int],
) -> None:
    for index, (array, wanted) in enumerate(zip(found, expected, strict=True)):
        where = f"output {index}" + (f" for sizes {dict(bound)}" if bound else "")
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise CodegenError(
                f"{where} is {array.dtype}{list(array.shape)}, the reference's "
                f"{wanted.dtype}{list(wanted.shape)}"
            )
        relative, absolute = _TOLERANCES.get(str(array.dtype), (0.0, 0.0))
        if not np.allclose(array, wanted, relative, absolute, equal_nan=array.dtype.kind == "f"):
            raise CodegenError(f"{where} differs from the reference")
