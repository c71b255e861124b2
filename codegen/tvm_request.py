"""What TVM is asked for, and what it answers, as text: the words of a child process and of a cache.

A request is a model of one ONNX node. Sizes that are not known when it is compiled are named d0,
d1, ... in it, one name for each distinct expression.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import onnx
from onnx import helper, numpy_helper

from atsc.codegen.tail import ElementType, TensorType
from atsc.compiler.dims import Atom, Call, Dim, Operation
from atsc.compiler.errors import CodegenError

_ONNX_TYPES: dict[ElementType, int] = {
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.DOUBLE,
    "float16": onnx.TensorProto.FLOAT16,
    "int8": onnx.TensorProto.INT8,
    "int16": onnx.TensorProto.INT16,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "uint8": onnx.TensorProto.UINT8,
    "uint16": onnx.TensorProto.UINT16,
    "uint32": onnx.TensorProto.UINT32,
    "uint64": onnx.TensorProto.UINT64,
    "bool": onnx.TensorProto.BOOL,
}


@dataclass(frozen=True, slots=True)
class Request:
    """One node, and the types of the tensors that its kernel takes and makes."""

    model: bytes
    """A serialised ModelProto; inputs x0, x1, ... and outputs y0, y1, ... in order."""
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    sizes: tuple[Dim, ...]
    """What d0, d1, ... stand for."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """All symbols that sizes depend on, in order."""
        types = [*self.inputs, *self.outputs]
        dims = [*self.sizes, *(dim for kind in types for dim in kind.shape)]
        return tuple(sorted(set().union(*(dim.symbols() for dim in dims)))) if dims else ()

    def to_text(self) -> str:
        """One line of JSON; equal requests have equal texts."""
        return json.dumps(
            {
                "model": base64.b64encode(self.model).decode(),
                "inputs": [_type_to_json(kind) for kind in self.inputs],
                "outputs": [_type_to_json(kind) for kind in self.outputs],
                "sizes": [dim_to_json(dim) for dim in self.sizes],
            }
        )

    @staticmethod
    def from_text(text: str) -> Request:
        """What `to_text` wrote."""
        value = json.loads(text)
        return Request(
            base64.b64decode(value["model"]),
            tuple(_type_from_json(kind) for kind in value["inputs"]),
            tuple(_type_from_json(kind) for kind in value["outputs"]),
            tuple(dim_from_json(dim) for dim in value["sizes"]),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A kernel's source, with NAME for its name, or why there is none."""

    source: str = ""
    grid: Dim = Dim.of(1)  # noqa: RUF009 (immutable)
    workspace_bytes: Dim = Dim.of(0)  # noqa: RUF009
    refusal: str = ""

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(
            {
                "source": self.source,
                "grid": dim_to_json(self.grid),
                "workspace_bytes": dim_to_json(self.workspace_bytes),
                "refusal": self.refusal,
            }
        )

    @staticmethod
    def from_text(text: str) -> Answer:
        """What `to_text` wrote.

        Raises:
            ValueError, KeyError: the text is something else.
        """
        value = json.loads(text)
        grid, workspace = (dim_from_json(value[key]) for key in ("grid", "workspace_bytes"))
        return Answer(str(value["source"]), grid, workspace, str(value["refusal"]))


def request_of(
    node: onnx.NodeProto,
    opset: int,
    inputs: Sequence[TensorType | None],
    outputs: Sequence[TensorType],
    constants: Mapping[int, np.ndarray],
) -> Request:
    """Ask for one node.

    Args:
        node: of the default domain; names of its values do not matter.
        opset: its version.
        inputs: the type of each, None where one is left out.
        outputs: the type of each that it has.
        constants: values of inputs, by index, that become part of the kernel.

    Raises:
        CodegenError: an element type that TVM does not get.
    """
    names = {dim: f"d{i}" for i, dim in enumerate(_unknown_sizes([*inputs, *outputs]))}
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = ""
    del copy.input[:], copy.output[:]
    values, kept = [], []
    for index, kind in enumerate(inputs):
        copy.input.append("" if kind is None else f"x{index}")
        if index not in constants and kind is not None:
            values.append(_value_info(f"x{index}", kind, names))
            kept.append(kind)
    made = [_value_info(f"y{index}", kind, names) for index, kind in enumerate(outputs)]
    copy.output.extend(f"y{index}" for index in range(len(outputs)))
    fixed = [numpy_helper.from_array(array, f"x{index}") for index, array in constants.items()]
    graph = helper.make_graph([copy], "node", values, made, fixed)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    text = model.SerializeToString(deterministic=True)
    return Request(text, tuple(kept), tuple(outputs), tuple(names))


def _unknown_sizes(types: Sequence[TensorType | None]) -> list[Dim]:
    dims = [dim for kind in types if kind is not None for dim in kind.shape]
    return [dim for dim in dict.fromkeys(dims) if dim.constant is None]


def _value_info(name: str, kind: TensorType, names: Mapping[Dim, str]) -> onnx.ValueInfoProto:
    if kind.dtype not in _ONNX_TYPES:
        raise CodegenError(f"elements of type {kind.dtype} are not generated through TVM")
    shape = [names.get(dim, dim.constant) for dim in kind.shape]
    return helper.make_tensor_value_info(name, _ONNX_TYPES[kind.dtype], shape)


def dim_to_json(dim: Dim) -> list[Any]:
    """A size as nested lists."""
    return [[[_atom_to_json(atom) for atom in atoms], factor] for atoms, factor in dim.terms]


def dim_from_json(value: list[Any]) -> Dim:
    """What `dim_to_json` wrote."""
    return Dim(
        tuple((tuple(_atom_from_json(atom) for atom in atoms), factor) for atoms, factor in value)
    )


def _atom_to_json(atom: Atom) -> str | list[Any]:
    if isinstance(atom, str):
        return atom
    return [atom.operation, dim_to_json(atom.left), dim_to_json(atom.right)]


def _atom_from_json(value: str | list[Any]) -> Atom:
    if isinstance(value, str):
        return value
    operation, left, right = value
    return Call(cast(Operation, operation), dim_from_json(left), dim_from_json(right))


def _type_to_json(kind: TensorType) -> list[Any]:
    return [kind.dtype, [dim_to_json(dim) for dim in kind.shape]]


def _type_from_json(value: list[Any]) -> TensorType:
    return TensorType(cast(ElementType, value[0]), tuple(dim_from_json(dim) for dim in value[1]))
