"""The vocabulary of the compiler: types, weights, nodes and graphs. All of it is immutable.

A `Graph` is one decoder round in execution order. Values and weights are referred to by name; an
empty name stands for an absent optional input. Shapes hold ints and two symbols: `M`, the tokens of
this round, and `R`, the rows of logits that the caller asked for. The batch dimension is dropped on
import (batch is 1). KV caches are no values: an `attention` node owns the cache that its attribute
`layer` numbers.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Dim = int | str
AttrValue = int | float | str | bool | tuple[int, ...] | tuple[float, ...]

TOKENS = "M"
LOGIT_ROWS = "R"


class DType(enum.Enum):
    """Element types of values and of weight parts."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I8 = "i8"
    U8 = "u8"
    Q8 = "q8"
    """Activations as int8 in blocks of 32 along the last axis, with an fp32 scale a block, the
    largest in two digits (ops/quantize.py); the layout is in runtime/src/kernel.h."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape of a value."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Value:
    """A named input or output of a graph."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Weights stored as plain floats."""

    dtype: DType

    def __str__(self) -> str:
        return self.dtype.value


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Weights stored as unsigned codes in blocks along K: `w = (code - zero_point) * scale`.

    Without zero points, `zero_point` is `2 ** (bits - 1)`. Source: com.microsoft MatMulNBits.
    """

    bits: int
    block_size: int
    has_zero_points: bool

    @property
    def implicit_zero_point(self) -> int:
        """The zero point of a block that stores none."""
        return 1 << (self.bits - 1)

    def __str__(self) -> str:
        return f"int{self.bits}b{self.block_size}{'z' if self.has_zero_points else ''}"


Format = FloatFormat | BlockFormat


@dataclass(frozen=True, slots=True)
class ArraySource:
    """A constant array that is read when it is needed, normally from a memory-mapped file.

    `read` returns an array of `shape`; bf16 arrives as uint16 bit patterns with dtype BF16. The
    array may be a read-only view of a mapped file, strided if the file holds the transpose.
    """

    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.generic]] = field(repr=False, compare=False)

    @staticmethod
    def of(array: NDArray[np.generic], dtype: DType | None = None) -> ArraySource:
        """Wrap an array in memory; `dtype` is needed for bf16 bit patterns only."""
        return ArraySource(dtype or dtype_of(array), array.shape, lambda: array)


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant tensor with a storage format.

    `shape` is the logical shape; a matrix is [N, K], outputs first, as a linear layer reads it.
    Parts by format:
        FloatFormat: `data` [*shape].
        BlockFormat: `codes` uint8 [N, ceil(K / block_size), block_size * bits / 8], 4-bit codes
            with the even k in the low nibble (com.microsoft MatMulNBits); `scales` f32 or f16
            [N, ceil(K / block_size)]; `zero_points`, where the format has them, u8 (unpacked, one a
            block) or float, of the same shape as `scales`.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    parts: Mapping[str, ArraySource]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts as the source stores them."""
        return sum(
            int(np.prod(p.shape, dtype=np.int64)) * itemsize(p.dtype) for p in self.parts.values()
        )


@dataclass(frozen=True, slots=True)
class Node:
    """One operator application; `op` names a module of `atsc.compiler.ops`."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)

    def replace(self, **changes: object) -> Node:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_attrs(self, **attrs: AttrValue) -> Node:
        """A copy with some attributes set."""
        return dataclasses.replace(self, attrs={**self.attrs, **attrs})


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model says about itself besides its graph."""

    name: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    source_files: tuple[str, ...] = ()
    """The model's files, for messages and for `verify`."""
    companion_files: tuple[str, ...] = ()
    """Tokenizer, chat template, configuration: they travel with the plan."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in execution order, the types of all values, and the weights they read.

    Raises nothing itself; `atsc.compiler.invariants.check_graph` says what is valid.
    """

    info: ModelInfo
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, TensorType]
    weights: Mapping[str, Weight]

    def replace(self, **changes: object) -> Graph:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def producer(self) -> dict[str, Node]:
        """Value name -> the node that computes it."""
        return {output: node for node in self.nodes for output in node.outputs if output}

    def consumers(self) -> dict[str, list[Node]]:
        """Value or weight name -> the nodes that read it, in execution order."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, node.inputs)):
                readers.setdefault(name, []).append(node)
        return readers

    def attention_nodes(self) -> Iterator[Node]:
        """The nodes that own a KV cache, in execution order."""
        return (node for node in self.nodes if node.op == "attention")


_ITEMSIZE = {
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I64: 8,
    DType.I32: 4,
    DType.I8: 1,
    DType.U8: 1,
}
_NUMPY = {
    "float32": DType.F32,
    "float16": DType.F16,
    "int64": DType.I64,
    "int32": DType.I32,
    "int8": DType.I8,
    "uint8": DType.U8,
}


def itemsize(dtype: DType) -> int:
    """Bytes of one element; Q8 has no size of its own (codegen/layout.py)."""
    return _ITEMSIZE[dtype]


def dtype_of(array: NDArray[np.generic]) -> DType:
    """The DType of a numpy array."""
    return _NUMPY[array.dtype.name]
