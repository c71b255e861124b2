"""Canonical operators: one module an operator (or tight family), found by walking this package.

Each module defines `OPS`, a tuple of `OpDef`. An OpDef is the one place that says what an operator
means: its inputs, attributes, types, cost, and its numpy `reference`, which is the definition of
correct for every kernel. Kernels are the templates of the same name in codegen/templates.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import AttrValue, Node, TensorType, Weight

Attrs = Mapping[str, Any]
Operand = TensorType | Weight | None
"""What `infer` and `cost` see of an input: a value's type, a weight, or nothing."""


class Required:
    """Marks an attribute without a default."""


REQUIRED = Required()


@dataclass(slots=True)
class RoundState:
    """What a reference may know besides its inputs.

    `position` is the number of tokens in the KV cache before this round; `logit_rows` the rows that
    `select_rows` keeps; `caches` maps an attention node's `layer` to its K and V, each float32
    [T, kv_heads, head_size] rounded to fp16, and is updated in place.
    """

    position: int = 0
    logit_rows: NDArray[np.int64] | None = None
    caches: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one node in one round; bytes include weights and KV cache."""

    flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs on which every kernel of an operator must equal the reference."""

    attrs: Attrs
    inputs: tuple[Any, ...]
    """Arrays, Weights, `quantize.Q8Array`, or None for an absent input."""
    position: int = 0
    tolerance: float = 2e-5
    """Largest relative L2 error allowed."""


Reference = Callable[[Attrs, Sequence[Any], RoundState], tuple[Any, ...]]
Infer = Callable[[Attrs, Sequence[Operand]], tuple[TensorType, ...]]
CostOf = Callable[[Attrs, Sequence[Operand], int, int], Cost]
"""(attributes, inputs, rows in the round, tokens in the KV cache after it) -> Cost"""


@dataclass(frozen=True, slots=True)
class OpDef:
    """The definition of one canonical operator."""

    name: str
    inputs: tuple[str, ...]
    """Slot names in order; a trailing `?` marks an optional one."""
    outputs: tuple[str, ...]
    attrs: Mapping[str, AttrValue | Required]
    """Attribute -> default, or REQUIRED."""
    infer: Infer
    reference: Reference
    cost: CostOf
    samples: Callable[[], Iterator[Sample]]
    templates: tuple[str, ...]
    """Stems of the CPU templates, without the ISA suffix; the first serves few rows."""
    matrix_slot: str = ""
    """The slot whose weight takes three kernel pointers (codes or data, scales, zeros)."""
    replicable: bool = False
    """Cheap and row-wise: in a round of few rows every thread may compute it for itself."""
    aligned_slots: tuple[str, ...] = ()
    """Inputs that are read only at the items of the domain that are being computed."""

    def complete(self, attrs: Attrs) -> dict[str, Any]:
        """`attrs` with defaults filled in.

        Raises:
            ModelError: an attribute is unknown or missing.
        """
        unknown = attrs.keys() - self.attrs.keys()
        if unknown:
            raise ModelError(f"operator {self.name} has no attribute {', '.join(sorted(unknown))}")
        full = {**self.attrs, **attrs}
        missing = [key for key, value in full.items() if isinstance(value, Required)]
        if missing:
            raise ModelError(f"operator {self.name} needs attribute {', '.join(missing)}")
        return full

    def slot(self, node: Node, slot_name: str) -> str:
        """The name that `node` has in a slot; empty if it is absent."""
        index = [s.rstrip("?") for s in self.inputs].index(slot_name)
        return node.inputs[index] if index < len(node.inputs) else ""


@functools.cache
def all_ops() -> Mapping[str, OpDef]:
    """Name -> OpDef, of every module in this package."""
    found: dict[str, OpDef] = {}
    for module in pkgutil.iter_modules(__path__):
        for op in getattr(importlib.import_module(f"{__name__}.{module.name}"), "OPS", ()):
            found[op.name] = op
    return found


def op_of(node: Node) -> OpDef:
    """The definition of a node's operator.

    Raises:
        ModelError: there is no such canonical operator.
    """
    try:
        return all_ops()[node.op]
    except KeyError:
        raise ModelError(f"node {node.name}: {node.op} is no canonical operator") from None
