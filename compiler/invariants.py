"""What every valid Graph satisfies; checked after the import and after each pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import (
    BlockFormat,
    DType,
    FloatFormat,
    Graph,
    Node,
    TensorType,
    Value,
    Weight,
)
from atsc.compiler.ops import Operand, op_of


def infer_values(
    inputs: Iterable[Value], nodes: Sequence[Node], weights: Mapping[str, Weight]
) -> dict[str, TensorType]:
    """The types of a graph's inputs and of all that its nodes compute.

    Raises:
        ModelError: a node reads something that is not computed before it, or does not fit its
            operator's slots, attributes or shapes.
    """
    values = {value.name: value.type for value in inputs}
    for node in nodes:
        types = _infer_node(node, values, weights)
        for name, value_type in zip(node.outputs, types, strict=False):
            if name and (name in values or name in weights):
                raise ModelError(f"node {node.name}: its output {name} exists already")
            if name:
                values[name] = value_type
    return values


def _infer_node(
    node: Node, values: Mapping[str, TensorType], weights: Mapping[str, Weight]
) -> tuple[TensorType, ...]:
    op = op_of(node)
    attrs = op.complete(node.attrs)
    if len(node.inputs) > len(op.inputs) or len(node.outputs) > len(op.outputs):
        raise ModelError(f"node {node.name}: more inputs or outputs than {node.op} has")
    operands: list[Operand] = []
    for index, slot in enumerate(op.inputs):
        name = node.inputs[index] if index < len(node.inputs) else ""
        if not name and not slot.endswith("?"):
            raise ModelError(f"node {node.name}: input {slot} of {node.op} is missing")
        if name and name not in values and name not in weights:
            raise ModelError(f"node {node.name}: reads {name}, which is not computed before it")
        operands.append(values.get(name) or weights.get(name) if name else None)
    while operands and operands[-1] is None:
        operands.pop()
    if not any(node.outputs):
        raise ModelError(f"node {node.name}: has no output")
    try:
        return op.infer(attrs, operands)
    except AssertionError:
        raise ModelError(
            f"node {node.name}: a weight where {node.op} wants a value, "
            "or a value where it wants a weight"
        ) from None
    except ModelError as error:
        raise ModelError(f"node {node.name}: {error}") from None


def check_graph(graph: Graph) -> None:
    """Check names, order, slots, attributes, types, caches and weight parts.

    Raises:
        ModelError: something is wrong, with the node or weight.
    """
    names = [node.name for node in graph.nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ModelError(f"two nodes are named {twice}")
    values = infer_values(graph.inputs, graph.nodes, graph.weights)
    if values != dict(graph.values):
        wrong = sorted(
            n for n in values | dict(graph.values) if values.get(n) != graph.values.get(n)
        )
        raise ModelError(
            f"value {wrong[0]}: is {values.get(wrong[0])}, "
            f"the graph says {graph.values.get(wrong[0])}"
        )
    for output in graph.outputs:
        if values.get(output.name) != output.type:
            raise ModelError(
                f"output {output.name}: is {values.get(output.name)}, the graph says {output.type}"
            )
    layers = [node.attrs["layer"] for node in graph.attention_nodes()]
    if layers != list(range(len(layers))):
        raise ModelError(f"attention nodes number their caches {layers}")
    readers = graph.consumers()
    for name, weight in graph.weights.items():
        if name not in readers:
            raise ModelError(f"weight {name} is read by no node")
        _check_weight(name, weight)


def _check_weight(name: str, weight: Weight) -> None:
    if name != weight.name:
        raise ModelError(f"weight {weight.name} is filed under {name}")
    expected = _part_shapes(weight)
    for part, shape in expected.items():
        if part not in weight.parts or weight.parts[part].shape != shape:
            found = weight.parts[part].shape if part in weight.parts else "nothing"
            raise ModelError(f"weight {name}: part {part} has shape {found}, expected {shape}")
    if weight.parts.keys() != expected.keys():
        raise ModelError(f"weight {name}: parts {sorted(weight.parts)}, format {weight.format}")
    if "codes" in weight.parts and weight.parts["codes"].dtype is not DType.U8:
        raise ModelError(f"weight {name}: codes are {weight.parts['codes'].dtype.value}")


def _part_shapes(weight: Weight) -> dict[str, tuple[int, ...]]:
    fmt = weight.format
    if isinstance(fmt, FloatFormat):
        return {"data": weight.shape}
    assert isinstance(fmt, BlockFormat)
    rows, width = weight.shape
    blocks = -(-width // fmt.block_size)
    shapes: dict[str, tuple[int, ...]] = {
        "codes": (rows, blocks, fmt.block_size * fmt.bits // 8),
        "scales": (rows, blocks),
    }
    if fmt.has_zero_points:
        shapes["zero_points"] = (rows, blocks)
    return shapes
