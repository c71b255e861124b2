"""A general graph: ONNX operators in execution order, as importers hand them to code generation.

Unlike the decoder's `Graph`, it keeps ONNX's own operators: what they mean is said by their rules
in codegen/graph. Functions are expanded and constants folded; weights are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.dims import Dim

NIBBLES = ("int4", "uint4")
"""Element types of which a byte holds two, the first in its low half."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A tensor that the caller gives."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    """Numbers and plain symbols."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant of the model; `read` maps or makes its content."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]
    """bf16 as uint16 bit patterns, 4-bit integers as flat bytes; all else as numpy has it."""

    @staticmethod
    def of(array: NDArray[Any]) -> Constant:
        """An array in memory."""
        return Constant(str(array.dtype), array.shape, lambda: array)

    @property
    def num_bytes(self) -> int:
        """As it is stored."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if self.dtype in NIBBLES:
            return (count + 1) // 2
        return count * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One operator of ai.onnx (`domain` empty) or another domain."""

    name: str
    op: str
    domain: str
    opset: int
    """Version of the domain's operator set."""
    inputs: tuple[str, ...]
    """Empty names are absent inputs."""
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]
    """Numbers, text, tuples of those, numpy arrays, or a TensorGraph for each branch."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Its inputs, and what its branches read, of which some they may make themselves."""
        branches = [value for value in self.attrs.values() if isinstance(value, TensorGraph)]
        inner = [name for branch in branches for node in branch.nodes for name in node.reads]
        return (*self.inputs, *inner, *(name for branch in branches for name in branch.outputs))

    def __str__(self) -> str:
        domain = self.domain or "ai.onnx"
        return f"node {self.name} ({self.op} of {domain} {self.opset})"


@dataclass(frozen=True, slots=True)
class TensorGraph:
    """A whole model."""

    name: str
    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Constant]
    source_files: tuple[str, ...] = ()
    companion_files: tuple[str, ...] = ()
