"""What a value of an ONNX graph is to the importer while it lowers nodes.

Most values are `Rows`, activations of the canonical graph. The rest exists only here: constants
before they become weights, the graph's inputs, and shape arithmetic, which is carried as exact
affine expressions, so that what a node computes from the attention mask is proved, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import ArraySource


@dataclass(frozen=True, slots=True)
class Rows:
    """Float activations, canonically [M, width].

    With `group`, the ONNX value is [B, M * width / group, group] or [B, M, width / group, group]:
    the same bytes, seen as heads.
    """

    name: str
    width: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Constant:
    """An initializer or constant, perhaps seen through Transpose or Reshape.

    `shape` and `read` are as this view has them, except that 4-bit elements stay packed bytes.
    """

    root: str
    """Name of the initializer; views of one root share their bytes."""
    shape: tuple[int, ...]
    elements: onnx_ir.DataType
    source: ArraySource
    transposed: bool = False
    quantized: Quantized | None = None
    """What DequantizeLinear makes these floats from; `source` computes them where it must."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for views of the same elements in the same order."""
        return (self.root, self.transposed, None if self.quantized is None else self.quantized.key)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether the elements are fp32, fp16 or bf16."""
        return self.elements in FLOATS


@dataclass(frozen=True, slots=True)
class Quantized:
    """The operands of a DequantizeLinear of a constant: `(codes - zero_points) * scales`."""

    codes: Constant
    scales: Constant
    zero_points: Constant | None
    axis: int
    """What `scales` runs along where it is a vector, or in blocks where there are some."""
    block_size: int
    """0: one scale for each index of `axis`, or one for all."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same floats."""
        points = None if self.zero_points is None else self.zero_points.identity
        return (self.codes.identity, self.scales.identity, points, self.axis, self.block_size)


@dataclass(frozen=True, slots=True)
class LengthTest:
    """A condition: whether the sequence, past included, is longer than `limit` tokens."""

    limit: int
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Symbol:
    """A graph input or output that has no counterpart in the canonical graph."""

    kind: str
    """`present`, or that of an input (inputs.py)."""
    name: str


@dataclass(frozen=True, slots=True)
class BlockOffsets:
    """Rows of a float table [V, blocks, 1] by token id: to be added to the blocks of a row."""

    constant: Constant


@dataclass(frozen=True, slots=True)
class Unknown:
    """The output of a node that could not be lowered; its readers are not reported again."""


@dataclass(frozen=True, slots=True)
class Affine:
    """`constant + tokens * M + past * P`: M tokens of this round, P in the KV cache before it."""

    constant: int = 0
    tokens: int = 0
    past: int = 0

    def __add__(self, other: Affine) -> Affine:
        return Affine(
            self.constant + other.constant, self.tokens + other.tokens, self.past + other.past
        )

    def __neg__(self) -> Affine:
        return Affine(-self.constant, -self.tokens, -self.past)

    def __sub__(self, other: Affine) -> Affine:
        return self + -other

    def __mul__(self, other: Affine) -> Affine:
        scale, terms = (self, other) if self.is_constant else (other, self)
        if not scale.is_constant:
            raise ArithmeticError("the product of two symbolic sizes")
        factor = scale.constant
        return Affine(terms.constant * factor, terms.tokens * factor, terms.past * factor)

    @property
    def is_constant(self) -> bool:
        """Whether the value is a known integer."""
        return not self.tokens and not self.past


M = Affine(tokens=1)
TOTAL = Affine(tokens=1, past=1)


@dataclass(frozen=True, slots=True)
class Ints:
    """Small integers, known or affine: an object array of `Affine`."""

    values: NDArray[Any]

    @staticmethod
    def of(values: Any) -> Ints:
        """Wrap integers and Affines, nested as the shape needs."""
        array = np.asarray(values, dtype=object)
        wrapped = np.empty(array.shape, dtype=object)
        for index in np.ndindex(array.shape):
            value = array[index]
            wrapped[index] = value if isinstance(value, Affine) else Affine(int(value))
        return Ints(wrapped)

    def known(self) -> tuple[int, ...] | None:
        """The flat integers, or None if one is symbolic."""
        flat = list(self.values.reshape(-1))
        return tuple(v.constant for v in flat) if all(v.is_constant for v in flat) else None

    def is_only(self, value: Affine) -> bool:
        """Whether this is one element with that value, in any shape."""
        flat = list(self.values.reshape(-1))
        return flat == [value]


Operand = Rows | Constant | Symbol | BlockOffsets | Unknown | Ints | LengthTest
FLOATS = (onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
NIBBLES = (onnx_ir.DataType.INT4, onnx_ir.DataType.UINT4)
INTEGERS = (onnx_ir.DataType.INT64, onnx_ir.DataType.INT32)


def transpose(constant: Constant) -> Constant:
    """A matrix the other way round, as a view.

    Raises:
        ModelError: its elements are 4-bit integers, packed in the order of the other way.
    """
    if constant.elements in NIBBLES:
        raise ModelError(f"{constant.root} is a transposed matrix of {constant.elements.name}")
    source = constant.source
    shape = constant.shape[::-1]
    return Constant(
        constant.root,
        shape,
        constant.elements,
        _view(source, shape, lambda array: array.T),
        not constant.transposed,
        constant.quantized,
    )


def reshape(constant: Constant, shape: tuple[int, ...]) -> Constant:
    """Contiguous bytes with another shape, as a view."""
    source = constant.source
    if constant.elements in NIBBLES:
        return Constant(constant.root, shape, constant.elements, source)
    return Constant(
        constant.root,
        shape,
        constant.elements,
        _view(source, shape, lambda array: array.reshape(shape)),
        constant.transposed,
    )


def _view(
    source: ArraySource,
    shape: tuple[int, ...],
    change: Callable[[NDArray[np.generic]], NDArray[np.generic]],
) -> ArraySource:
    return ArraySource(source.dtype, shape, lambda: change(source.read()))
