"""Tensors of a general graph while it is turned into kernels, and the code of those.

A tensor is a function from an index to a C expression. Those of operators that only compute
elementwise or move data stay functions (`Tensor.at` of one calls `at` of its inputs): fusing them
is composing them. What is read more than once, or is dear to compute, is stored by a kernel of its
own and then is a `Buffer`. Integers that come from shapes alone are known at compile time as
expressions (`Tensor.known`) and need no kernel at all.

Kernels compute again what is fused for each of its readers, so only cheap tensors are fused into
readers that read an element more than once (`CHEAP`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atsc.codegen.tail import ElementType
from atsc.compiler.dims import Dim, product

if TYPE_CHECKING:
    from atsc.codegen.graph.products import Pending

CHEAP = 4
"""Operations that may be done again for each reader."""
DEAR = 64
"""The cost of a loop: never done twice."""

Index = Sequence[str]
"""C expressions of type int64_t, one a dimension; `0` wherever the dimension is 1."""
At = Callable[["Code", Index], str]
Known = NDArray[Any]
"""Of dtype object: a Dim an element."""

C_TYPES: dict[ElementType, str] = {
    "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t",
    "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
    "bool": "bool",
}  # fmt: skip
"""As stored; fp16 and bf16 are computed on as float."""
_WIDENED: dict[ElementType, tuple[str, str, str]] = {
    "float16": ("half_to_float", "float_to_half", "round_half"),
    "bfloat16": ("brain_to_float", "float_to_brain", "round_brain"),
}


def c_type(dtype: ElementType) -> str:
    """The C type that elements are computed in."""
    return "float" if dtype in _WIDENED else C_TYPES[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A value of the graph; see the module's head."""

    dtype: ElementType
    shape: tuple[Dim, ...]
    at: At
    cost: int = 0
    """Operations per element; 0 for what only moves elements."""
    known: Known | None = None
    """Integers (or truth values) as Dims, in the shape of the tensor."""
    literal: NDArray[Any] | None = None
    """A constant's content."""
    view: View | None = None
    """Where its elements are, if they are in memory at regular distances."""
    product: Pending | None = None
    """What it is an elementwise function of and is computed together with: products.py."""
    quantised: Quantised | None = None
    """The integers that it stands for, if it was dequantised from 8 bits."""

    @property
    def rank(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Elements."""
        return product(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """(codes - zero) * scale: of all elements, or with those of an axis."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    axis: int | None
    """None: a scale of all elements."""
    dequantised: Callable[[Tensor], Tensor]
    """The floats of codes."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory that a tensor is stored in: an input, a constant, or what a kernel writes."""

    name: str
    dtype: ElementType
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A buffer, and how many of its elements one step along each dimension of a tensor is."""

    buffer: Buffer
    strides: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stored(Tensor):
    """A tensor in memory, row-major."""

    buffer: Buffer = field(kw_only=True)


def stored(buffer: Buffer, shape: tuple[Dim, ...] | None = None) -> Stored:
    """A buffer as a tensor; of another shape with as many elements, if one is given."""
    shape = buffer.shape if shape is None else shape

    def at(code: Code, index: Index) -> str:
        return code.load(buffer, linear(code, shape, index))

    return Stored(buffer.dtype, shape, at, buffer=buffer, view=View(buffer, row_major(shape)))


def row_major(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The strides of a contiguous tensor."""
    return tuple(product(shape[axis + 1 :]) for axis in range(len(shape)))


def linear(code: Code, shape: Sequence[Dim], index: Index) -> str:
    """The place of an element in row-major order."""
    steps = [(size, at) for size, at in zip(shape, index, strict=True) if size.constant != 1]
    for sizes, names, whole in code.flat:
        # What was divided into several indices is put together again.
        for first in range(len(steps) - len(sizes) + 1):
            part = steps[first : first + len(sizes)]
            if [at for _, at in part] == names and [size for size, _ in part] == sizes:
                steps[first : first + len(sizes)] = [(product(sizes), whole)]
                break
    parts = []
    for (_, at), stride in zip(steps, row_major([size for size, _ in steps]), strict=True):
        if at != "0":
            parts.append(at if stride.constant == 1 else f"{at} * {code.dim(stride)}")
    return " + ".join(parts) or "0"


class Code:
    """The statements of one kernel as they are generated; parameters are named as they turn up.

    Names depend on the order of use alone, so equal computations give equal sources whatever their
    nodes, buffers and symbols are called.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.buffers: dict[Buffer, str] = {}
        self.symbols: dict[str, str] = {}
        self.headers: dict[str, None] = {"scalar.h": None}
        self.may_fail = False
        self.flat: list[tuple[list[Dim], list[str], str]] = []
        """Sizes and names of indices that one index was divided into, and that one."""
        self.axes: list[str] = []
        """The indices of the matrix product that is being finished: batches, row, column."""
        self._names = 0
        self._known: dict[tuple[str, str], str] = {}
        self._indent = 1

    def fresh(self, stem: str = "v") -> str:
        """A name not used yet."""
        self._names += 1
        return f"{stem}{self._names}"

    def line(self, text: str) -> None:
        """Append a statement."""
        self.lines.append("  " * self._indent + text)

    def let(self, kind: str, expression: str, stem: str = "v") -> str:
        """A constant of a C type; the same expression in the same scope is computed once."""
        if (name := self._known.get((kind, expression))) is None:
            name = self._known[kind, expression] = self.fresh(stem)
            self.line(f"const {kind} {name} = {expression};")
        return name

    def index(self, expression: str) -> str:
        """An index as a constant, unless it is one already."""
        return expression if expression.isalnum() else self.let("int64_t", expression, "i")

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head { ... }`; what is computed inside is forgotten after it."""
        self.line(f"{head} {{")
        known, self._known = self._known, dict(self._known)
        self._indent += 1
        yield
        self._indent -= 1
        self._known = known
        self.line("}")

    def choose(
        self, kind: str, condition: str, then: Callable[[], str], other: Callable[[], str]
    ) -> str:
        """One of two values, of which only one is computed."""
        name = self.fresh()
        self.line(f"{kind} {name};")
        with self.block(f"if ({condition})"):
            self.line(f"{name} = {then()};")
        with self.block("else"):
            self.line(f"{name} = {other()};")
        return name

    def dim(self, size: Dim | int) -> str:
        """A size as a C expression."""
        size = Dim.of(size)
        for symbol in sorted(size.symbols()):
            self.symbols.setdefault(symbol, f"s{len(self.symbols)}")
        return size.c(self.symbols)

    def buffer(self, buffer: Buffer) -> str:
        """The pointer to an input."""
        return self.buffers.setdefault(buffer, f"t{len(self.buffers)}")

    def load(self, buffer: Buffer, place: str) -> str:
        """An element of an input, in its computing type."""
        element = f"{self.buffer(buffer)}[{place}]"
        if buffer.dtype in _WIDENED:
            self._need(buffer.dtype)
            element = f"{_WIDENED[buffer.dtype][0]}({element})"
        return self.let(c_type(buffer.dtype), element)

    def split(self, whole: str, sizes: Sequence[Dim]) -> list[str]:
        """One index as the indices of a row-major box."""
        open_sizes = [size for size in sizes if size.constant != 1]
        names, rest = [], whole
        for size in reversed(open_sizes[1:]):
            names.append(self.index(f"{rest} % {self.dim(size)}"))
            rest = self.index(f"{rest} / {self.dim(size)}")
        names = [*([rest] if open_sizes else []), *reversed(names)]
        if len(names) > 1 and (open_sizes, names, whole) not in self.flat:
            self.flat.append((open_sizes, names, whole))
        found = iter(names)
        return ["0" if size.constant == 1 else next(found) for size in sizes]

    def as_stored(self, dtype: ElementType, value: str) -> str:
        """A computed value as it is stored."""
        if dtype not in _WIDENED:
            return value
        self._need(dtype)
        return f"{_WIDENED[dtype][1]}({value})"

    def rounded(self, dtype: ElementType, value: str) -> str:
        """A computed value as it would be after it was stored and read again."""
        if dtype not in _WIDENED:
            return value
        self._need(dtype)
        return f"{_WIDENED[dtype][2]}({value})"

    def require(self, condition: str) -> None:
        """Let the kernel fail where an index or length that an input holds is not as it must be."""
        self.may_fail = True
        self.line(f"failed |= !({condition});")

    def checked(self, index: str, size: Dim) -> str:
        """An index that an input holds, negative from the end; beyond `size` the kernel fails."""
        self.may_fail = True
        limit = self.dim(size)
        given = self.let("int64_t", index, "i")
        place = self.let("int64_t", f"{given} < 0 ? {given} + {limit} : {given}", "i")
        inside = self.let("bool", f"{place} >= 0 && {place} < {limit}")
        self.line(f"failed |= !{inside};")
        return self.let("int64_t", f"{inside} ? {place} : 0", "i")

    def _need(self, dtype: ElementType) -> None:
        if dtype == "float16":
            self.headers.setdefault("half.h")


def known_tensor(values: Known, dtype: ElementType = "int64") -> Tensor:
    """Integers that are expressions over the graph's symbols."""
    values = np.asarray(values, object)
    flat = [Dim.of(value) for value in values.reshape(-1)]
    shape = tuple(Dim.of(size) for size in values.shape)
    kind = c_type(dtype)

    def at(code: Code, index: Index) -> str:
        place = linear(code, shape, index)
        texts = [f"({kind}){code.dim(dim)}" for dim in flat]
        if len(texts) == 1:
            return texts[0]
        table = code.let(f"{kind}", f"({kind}[]){{{', '.join(texts)}}}[{place}]")
        return table

    if dtype not in ("int64", "int32", "bool"):
        return Tensor(dtype, shape, at, cost=1)
    content = np.array(flat, object).reshape(values.shape)
    return Tensor(dtype, shape, at, cost=1, known=content)


def scalar_literal(dtype: ElementType, value: Any) -> str:
    """A number as a C literal of the computing type, exact."""
    kind = c_type(dtype)
    if kind in ("float", "double"):
        number = float(value)
        if number != number:
            return f'({kind})__builtin_nan("")'
        if number in (float("inf"), float("-inf")):
            return f"({kind}){'-' if number < 0 else ''}__builtin_inf()"
        return f"({kind}){number.hex()}"
    if kind == "bool":
        return "true" if value else "false"
    number = int(value)
    if kind == "int64_t" and number == -(2**63):
        return "(int64_t)(-9223372036854775807LL - 1)"
    return f"({kind}){number}{'ULL' if number > 2**63 - 1 else 'LL'}"


def c_index(dim: Dim, at: str) -> str:
    """An index into a dimension that may be 1."""
    return "0" if dim.constant == 1 else at
