"""What the values of an ONNX graph are in a given round, computed without the model's weights.

A decoder's graph has two halves. One computes activations from token ids, caches and weights. The
other computes shapes, masks, positions and angles from the sizes of the inputs, attention_mask and
position_ids alone; for a batch of one contiguous sequence these inputs are known in any round, so
the whole half can be evaluated there, by onnx's ReferenceEvaluator. That is how the rewrites beside
this module prove what a graph does, instead of recognising how an exporter spelled it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from atsc.compiler.importers.onnx.canonical.evaluated import EVALUATED
from atsc.compiler.importers.onnx.canonical.node_shapes import TABLES, number, shapes_of

Array = NDArray[Any]
Value = onnx_ir.Value
Node = onnx_ir.Node
Given = Mapping[Value, Array]

MOVEMENTS = (
    *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Concat"),
    *("Slice", "Split", "Gather", "GatherElements", "GatherND", "Pad"),
    *("Identity", "Cast", "Dropout"),
)
"""Operators of the default domain that only move elements, or change their float type."""
SCATTERS = {"ScatterND": 2, "ScatterElements": 2, "TensorScatter": 1}
"""Operators of the default domain that write into their first input, and the slot of what."""
_SAME_SHAPE = {"Identity", "Cast", "Dropout", "DequantizeLinear", *SCATTERS}
_MOST_ELEMENTS = 4096
"""Larger constants, as stored or as nodes make them, are weights, which shapes do not hang on."""


class NotEvaluable(Exception):
    """A value depends on activations, or the graph cannot be computed in that round."""


@dataclass(frozen=True, slots=True)
class Round:
    """So many tokens go in after so many that are in the caches."""

    past: int
    tokens: int

    @property
    def total(self) -> int:
        """Tokens in the caches afterwards."""
        return self.past + self.tokens


SMALL = (Round(0, 1), Round(0, 4), Round(3, 1), Round(2, 5))
"""Rounds at which rewrites are checked: first, later, one token, several; sizes all different."""
TYPICAL = SMALL[-1]


_OF_ROUND: Mapping[str, Callable[[Round, tuple[int, ...]], Array]] = {
    "mask": lambda at, shape: np.arange(shape[-1]) < at.total,
    "positions": lambda at, shape: np.arange(at.past, at.total),
    "places": lambda at, shape: np.arange(at.past, at.total),
    "past_length": lambda at, shape: np.array(at.past),
    "flag": lambda at, shape: np.array(1),
}
"""Kind of input -> its elements, broadcast to a shape."""


def _numpy_type(value: Value) -> Any:
    """Integers where the file does not tell; a flag that is boolean stays a number too."""
    dtype = value.dtype
    return np.int64 if dtype in (None, onnx_ir.DataType.BOOL) else dtype.numpy()


class Rounds:
    """Values of one graph at rounds of our choice."""

    def __init__(self, graph: onnx_ir.Graph, kinds: Mapping[str, str]) -> None:
        """`kinds` says for each input of the graph what it is (importers/onnx/inputs.py)."""
        self.graph = graph
        self._kinds = {value: kinds.get(value.name or "", "") for value in graph.inputs}
        self._depends: dict[Value, str] = {}
        self._values: dict[tuple[Value, Round], Array] = {}
        self._shapes: dict[tuple[Value, Round], tuple[int, ...]] = {}
        self._attributes: dict[Node, tuple[object, ...]] = {}
        self._operators: dict[tuple[object, ...], ReferenceEvaluator] = {}

    def depends(self, value: Value) -> str:
        """`data`: on ids, caches or products of weights; `round`: on sizes; `constant`."""
        for node in _ancestors(value, lambda v: v in self._depends):
            if _reads_shape(node):
                found = "round"
            else:
                read = {self._source(v) for v in node.inputs if v is not None}
                found = "data" if "data" in read else "round" if "round" in read else "constant"
                unknown = node.domain == "com.microsoft" and _key_of(node) not in EVALUATED
                if unknown and found == "round":
                    found = "data"
            for output in node.outputs:
                self._depends[output] = found
        return self._source(value)

    def is_data(self, value: Value | None) -> bool:
        """Whether the value carries activations."""
        return value is not None and self.depends(value) == "data"

    def kind(self, value: Value) -> str:
        """What an input of the graph is; empty for anything else."""
        return self._kinds.get(value, "")

    def add_input(self, value: Value, kind: str) -> None:
        """Say what a new input of the graph is."""
        self._kinds[value] = kind

    def is_past(self, value: Value) -> bool:
        """Whether the value is a cache that is an input of the model."""
        return self._kinds.get(value) == "past"

    def _source(self, value: Value) -> str:
        if value in self._depends:
            return self._depends[value]
        if value.const_value is not None and value not in self._kinds:
            return "constant"
        kind = self._kinds.get(value, "unknown")
        return "data" if kind in ("ids", "past", "unknown", "") else "round"

    def value(self, value: Value, at: Round) -> Array:
        """A value that depends on the round alone.

        Raises:
            NotEvaluable: it depends on activations, or cannot be computed.
        """
        return self.region(value, at, {})

    def region(self, value: Value, at: Round, given: Given) -> Array:
        """A value computed from those given, and from what depends on the round alone.

        Raises:
            NotEvaluable: it depends on other activations too, or cannot be computed.
        """
        local: dict[Value, Array] = dict(given)

        def known(v: Value) -> bool:
            return v in local or (v, at) in self._values

        for node in _ancestors(value, known):
            if all(known(v) for v in node.outputs if v.name):
                continue
            if _reads_shape(node):
                results = [self._shape_node(node, at)]
            else:
                inputs = [None if v is None else self._need(v, at, local) for v in node.inputs]
                results = self._run(node, inputs)
            own = not self.is_data(node.outputs[0])
            for output, result in zip(node.outputs, results, strict=False):
                if own:
                    self._values[output, at] = result
                else:
                    local[output] = result
        return self._need(value, at, local)

    def _need(self, value: Value, at: Round, local: Given) -> Array:
        if value in local:
            return local[value]
        if (value, at) in self._values:
            return self._values[value, at]
        kind = self._kinds.get(value)
        if kind is not None and kind in _OF_ROUND:
            shape = self.shape(value, at)
            array = _OF_ROUND[kind](at, shape)
            return np.broadcast_to(array, shape).astype(_numpy_type(value))
        if value.const_value is not None and kind is None:
            return np.asarray(value.const_value.numpy())
        raise NotEvaluable(f"it depends on {value.name}")

    def _shape_node(self, node: Node, at: Round) -> Array:
        source = node.inputs[0]
        assert source is not None
        shape = np.array(self.shape(source, at), np.int64)
        if node.op_type == "Size":
            return np.array(np.prod(shape), np.int64)
        return shape[number(node, "start", 0) : number(node, "end", None)]

    def _run(self, node: Node, inputs: list[Array | None]) -> list[Array]:
        names = [f"i{k}" if array is not None else "" for k, array in enumerate(inputs)]
        key = self._key(node, names)
        try:
            if (own := EVALUATED.get(_key_of(node))) is not None:
                return [own(node, inputs)]
            if key not in self._operators:
                self._operators[key] = ReferenceEvaluator(self._model_of(node, names))
            feeds = {
                name: array
                for name, array in zip(names, _of_one_float(inputs), strict=True)
                if name
            }
            with np.errstate(all="ignore"):
                return [np.asarray(result) for result in self._operators[key].run(None, feeds)]
        except Exception as error:  # the evaluator raises whatever numpy and onnx raise
            raise NotEvaluable(f"{node.name or node.op_type}: {error}") from error

    def _key(self, node: Node, names: list[str]) -> tuple[object, ...]:
        """What makes two nodes compute the same."""
        if node not in self._attributes:
            attributes = sorted(node.attributes.values(), key=lambda attr: attr.name)
            self._attributes[node] = tuple((a.name, _attr_key(a)) for a in attributes)
        return (node.domain, node.op_type, *names, len(node.outputs), self._attributes[node])

    def _model_of(self, node: Node, names: list[str]) -> onnx.ModelProto:
        """The node alone, as a model."""
        proto = onnx_ir.serde.serialize_node(node)
        del proto.input[:], proto.output[:]
        proto.input.extend(names)
        proto.output.extend(f"o{k}" for k in range(len(node.outputs)))
        info = onnx.helper.make_empty_tensor_value_info
        graph = onnx.helper.make_graph(
            [proto], "node", [info(n) for n in names if n], [info(n) for n in proto.output]
        )
        versions = {"": 18, **self.graph.opset_imports}
        opsets = [onnx.helper.make_opsetid(domain, v) for domain, v in versions.items()]
        return onnx.helper.make_model(graph, opset_imports=opsets)

    def shape(self, value: Value, at: Round) -> tuple[int, ...]:
        """The shape of any value in a round; weights are not read for it.

        Raises:
            NotEvaluable: the shape cannot be told.
        """

        def known(v: Value) -> bool:
            return (v, at) in self._shapes

        for node in _ancestors(value, known, through_shapes=True):
            shapes = self._node_shapes(node, at)
            for output, shape in zip(node.outputs, shapes, strict=False):
                self._shapes[output, at] = shape
        return self._shape_of(value, at)

    def _shape_of(self, value: Value, at: Round) -> tuple[int, ...]:
        if (value, at) in self._shapes:
            return self._shapes[value, at]
        if value.const_value is not None and value not in self._kinds:
            return tuple(value.const_value.shape.numpy())
        kind, shape = self._kinds.get(value, ""), value.shape
        if kind in ("ids", "positions"):
            return (1, at.tokens)
        if kind == "places":
            return (at.tokens,)
        if kind == "mask":
            return (1, self._mask_width(value, at))
        if shape is None:
            raise NotEvaluable(f"the shape of {value.name} is not known")
        sizes = [d if isinstance(d, int) else None for d in shape]
        if kind in ("flag", "past_length"):
            return tuple(d or 1 for d in sizes)
        if kind != "past" or len(sizes) != 4:
            raise NotEvaluable(f"the shape of {value.name} is not known")
        free = [i for i in range(1, 4) if sizes[i] is None]
        if len(free) > 1:
            raise NotEvaluable(f"{value.name} {shape} does not tell which dimension grows")
        return tuple(1 if i == 0 else at.past if i in free else d or 0 for i, d in enumerate(sizes))

    def _mask_width(self, value: Value, at: Round) -> int:
        """As many as there are tokens, or places in caches of fixed size."""
        width = None if value.shape is None else value.shape[1]
        return width if isinstance(width, int) else at.total

    def _node_shapes(self, node: Node, at: Round) -> list[tuple[int, ...]]:
        output = node.outputs[0]
        if not self.is_data(output) and self.depends(output) == "round":
            return [self.value(output, at).shape for output in node.outputs]
        shapes = [() if v is None else self._shape_of(v, at) for v in node.inputs]
        moves = node.op_type in MOVEMENTS or node.op_type.startswith("Reduce")
        from_table = node.op_type in TABLES and not self.is_data(node.inputs[0])
        if moves and not from_table and node.op_type not in _SAME_SHAPE:
            inputs = [
                None if v is None else self._stand_in(v, shape, at)
                for v, shape in zip(node.inputs, shapes, strict=True)
            ]
            return [result.shape for result in self._run(node, inputs)]
        if node.op_type in _SAME_SHAPE or "Norm" in node.op_type:
            return [shapes[0]] * len(node.outputs)
        try:
            return shapes_of(node, shapes, at.total)
        except ValueError as error:
            raise NotEvaluable(f"{node.name}: {error}") from None

    def _stand_in(self, value: Value, shape: tuple[int, ...], at: Round) -> Array:
        """Something of the same shape: an index, or activations and weights that take no memory."""
        is_weight = self.depends(value) == "constant" and math.prod(shape) > _MOST_ELEMENTS
        if self.is_data(value) or is_weight:
            return np.broadcast_to(np.float32(0), shape)
        return self.value(value, at)


def _key_of(node: Node) -> tuple[str, str]:
    return (node.domain, node.op_type)


def _attr_key(attr: onnx_ir.Attr) -> str | bytes:
    if attr.type is onnx_ir.AttributeType.TENSOR:
        tensor = attr.value
        return bytes(tensor.tobytes()) + str((tensor.dtype, tensor.shape)).encode()
    return repr(attr.value)


def _of_one_float(arrays: list[Array | None]) -> list[Array | None]:
    """Floats of several types as float32: given activations are, whatever type the graph has."""
    kinds = {a.dtype for a in arrays if a is not None and _is_float(a)}
    if len(kinds) < 2:
        return arrays
    return [a.astype(np.float32) if a is not None and _is_float(a) else a for a in arrays]


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _reads_shape(node: Node) -> bool:
    return node.op_type in ("Shape", "Size") and not node.domain


def _ancestors(
    value: Value, known: Callable[[Value], bool], *, through_shapes: bool = False
) -> Iterator[Node]:
    """The nodes that a value needs, makers first; those whose outputs are known are left out.

    What only the shape is read of counts where the shapes themselves are wanted.
    """
    done: set[Node] = set()
    stack: list[tuple[Value, bool]] = [(value, False)]
    while stack:
        current, ready = stack.pop()
        node = current.producer()
        if node is None or node in done or (not ready and known(current)):
            continue
        if ready:
            done.add(node)
            yield node
            continue
        stack.append((current, True))
        if through_shapes or not _reads_shape(node):
            stack.extend((v, False) for v in node.inputs if v is not None)


def constant_of(value: Value | None) -> Array | None:
    """A small constant's elements, or None."""
    if value is None or value.const_value is None or value.const_value.size > 64:
        return None
    if value.is_graph_input():
        return None
    return np.asarray(value.const_value.numpy())


def data_inputs(rounds: Rounds, node: Node) -> list[Value]:
    """The inputs of a node that carry activations."""
    return [v for v in node.inputs if v is not None and rounds.is_data(v)]


def readers(values: Iterable[Value]) -> list[Node]:
    """The nodes that read any of the values, each once."""
    found: dict[Node, None] = {}
    for value in values:
        for use in value.uses():
            found[use.node] = None
    return list(found)
