"""Where every weight part lies in weights.bin: units in execution order, parts within units."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atsc.codegen.layout import (
    PART_ALIGNMENT,
    UNIT_ALIGNMENT,
    StoredWeight,
    align,
    is_tiled_by,
    store,
)
from atsc.compiler.ir import ArraySource, DType, FloatFormat, Graph, Weight
from atsc.compiler.ops import op_of
from atsc.compiler.weights import read_f32
from atsc.passes.partition import Unit, UnitKind


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """One 4096-aligned range of weights.bin; empty where the unit has no weights."""

    kind: UnitKind
    name: str
    nodes: tuple[str, ...]
    offset: int
    bytes: int
    weights: tuple[tuple[StoredWeight, int], ...]
    """Each weight with the offset in weights.bin of its first part; parts follow one another, each
    at the next multiple of 64."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The whole of weights.bin."""

    units: tuple[StoredUnit, ...]
    part_offsets: Mapping[str, tuple[int, ...]]
    """Weight name -> offset in weights.bin of each part."""
    num_bytes: int

    def stored(self) -> dict[str, StoredWeight]:
        """Weight name -> how it is stored."""
        return {s.weight.name: s for unit in self.units for s, _ in unit.weights}


def store_weights(graph: Graph) -> dict[str, StoredWeight]:
    """Decide how each weight is stored, by how it is read: what is no operator's matrix (norms,
    biases, cos and sin) in float32, which is what its kernels read.
    """
    matrices, in_linear, meets_floats = set(), set(), set()
    for node in graph.nodes:
        op = op_of(node)
        if op.matrix_slot:
            matrices.add(op.slot(node, op.matrix_slot))
        if node.op == "linear":
            in_linear.add(node.inputs[1])
            if graph.values[node.inputs[0]].dtype is not DType.Q8:
                meets_floats.add(node.inputs[1])
    meets_int8 = in_linear - meets_floats
    return {
        name: store(weight, is_tiled_by(weight, name in in_linear), name in meets_int8)
        if name in matrices
        else store(widened(weight), False)
        for name, weight in graph.weights.items()
    }


def widened(weight: Weight) -> Weight:
    """A float weight as float32."""
    if weight.format == FloatFormat(DType.F32) or not isinstance(weight.format, FloatFormat):
        return weight
    data = weight.parts["data"]
    wide = ArraySource(DType.F32, data.shape, lambda: read_f32(data))
    return dataclasses.replace(weight, format=FloatFormat(DType.F32), parts={"data": wide})


def lay_out(graph: Graph, units: Sequence[Unit], stored: Mapping[str, StoredWeight]) -> Storage:
    """Assign offsets."""
    laid: list[StoredUnit] = []
    part_offsets: dict[str, tuple[int, ...]] = {}
    end = 0
    for unit in units:
        begin = end = align(end, UNIT_ALIGNMENT)
        placed = []
        for name in unit.weights:
            placed.append((stored[name], end))
            offsets = []
            for part in stored[name].parts:
                offsets.append(end)
                end += align(part.num_bytes, PART_ALIGNMENT)
            part_offsets[name] = tuple(offsets)
        names = tuple(graph.nodes[index].name for index in unit.nodes)
        laid.append(StoredUnit(unit.kind, unit.name, names, begin, end - begin, tuple(placed)))
    return Storage(tuple(laid), part_offsets, end)
