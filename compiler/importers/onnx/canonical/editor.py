"""Changing an ONNX graph: new nodes and constants, replaced values, parts that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir

from atsc.compiler.importers.onnx.canonical.rounds import Array, Node, Rounds, Value

OWN_DOMAIN = "atsc"
"""Of operators that no ONNX domain has; never found in a file."""


class Refusal(Exception):
    """Why a part of the graph is not what a rewrite stands for."""


class Editor:
    """A graph being rewritten; nodes that are no longer read are left for the caller to remove."""

    def __init__(self, graph: onnx_ir.Graph, rounds: Rounds) -> None:
        self.graph = graph
        self.rounds = rounds
        self.context_length: int | None = None
        """What the configuration says, if it says anything, or a table of positions has."""
        self.places: int | None = None
        """Tokens for which caches of a fixed size have room; None: they grow."""
        self.refused: dict[str, str] = {}
        """Reasons by name of node; empty for nodes that only belong to such a one."""
        self.tolerance = 1e-3 if _is_half(graph) else 1e-4
        """How far an exact rewrite may be from what the graph computes, relative L2."""
        self._lengths: tuple[Value, Value] | None = None
        self._names: dict[str, int] = {}

    def node(
        self,
        op_type: str,
        inputs: list[Value | None],
        name: str,
        *,
        domain: str = "",
        num_outputs: int = 1,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Append a node, under a name that is free; the graph is sorted afterwards."""
        self._names[name] = copies = self._names.get(name, 0) + 1
        name = name if copies == 1 else f"{name}#{copies}"
        outputs = [onnx_ir.Value(name=f"{name}/out{k or ''}") for k in range(num_outputs)]
        node = onnx_ir.Node(
            domain,
            op_type,
            inputs,
            onnx_ir.convenience.convert_attributes(attrs),
            outputs=outputs,
            name=name,
        )
        self.graph.append(node)
        return tuple(outputs)

    def constant(self, name: str, array: Array) -> Value:
        """A new initializer."""
        free, copies = name, 1
        while free in self.graph.initializers:
            copies += 1
            free = f"{name}#{copies}"
        tensor = onnx_ir.tensor(np.ascontiguousarray(array), name=free)
        value = onnx_ir.Value(name=free, const_value=tensor, shape=onnx_ir.Shape(array.shape))
        value.dtype = tensor.dtype
        self.graph.register_initializer(value)
        return value

    def reshape(self, value: Value, dims: list[int], name: str) -> Value:
        """The same bytes in another shape."""
        target = self.constant(f"{name}/shape", np.array(dims, np.int64))
        return self.node("Reshape", [value, target], name)[0]

    def replace(self, old: Value, new: Value) -> None:
        """Let every reader of one value read another; outputs of the model keep their names."""
        for use in tuple(old.uses()):
            use.node.replace_input_with(use.idx, new)
        for index, output in enumerate(self.graph.outputs):
            if output is old:
                if new.is_graph_input() or new.is_graph_output() or new.is_initializer():
                    (new,) = self.node("Identity", [new], f"{old.name}/Identity")
                name, old.name = old.name, f"{old.name}/replaced"
                new.name = name
                self.graph.outputs[index] = new

    def supersede(self, node: Node, new: Value) -> None:
        """Put a value in the place of a node's one output, and remove the node.

        Rewrites that follow ask who else reads a value; a node that is left would count.
        """
        self.replace(node.outputs[0], new)
        self.graph.remove(node, safe=True)

    def input(self, kind: str, name: str, dims: list[str]) -> Value:
        """The input of one kind, added if the model has none: all inputs of a round are known."""
        for value in self.graph.inputs:
            if self.rounds.kind(value) == kind:
                return value
        value = onnx_ir.Value(name=name, shape=onnx_ir.Shape(dims))
        value.dtype = onnx_ir.DataType.INT64
        self.graph.inputs.append(value)
        self.rounds.add_input(value, kind)
        return value

    def positions(self) -> Value:
        """position_ids."""
        return self.input("positions", "position_ids", ["batch", "tokens"])

    def lengths(self) -> tuple[Value, Value]:
        """The inputs seqlens_k and total_sequence_length of GroupQueryAttention."""
        if self._lengths is None:
            mask = self.input("mask", "attention_mask", ["batch", "total"])
            (total,) = self.node("Shape", [mask], "atsc/total_length", start=1, end=2)
            one = self.constant("atsc/one", np.array([1], np.int64))
            (last,) = self.node("Sub", [total, one], "atsc/last_position")
            self._lengths = last, total
        return self._lengths

    def refuse(self, node: Node, reason: str) -> None:
        """Note that a node stays, and why."""
        self.refused[_named(node)] = reason

    def silence(self, node: Node) -> None:
        """Note that a node stays because of another one: there is nothing to say about it."""
        self.refused.setdefault(_named(node), "")


def _is_half(graph: onnx_ir.Graph) -> bool:
    """Whether constants may be half floats: the numbers of a formula are rounded with them."""
    half = (onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)
    casts = (node for node in graph if node.op_type == "Cast")
    return any(value.dtype in half for value in graph.inputs) or any(
        node.attributes["to"].value in half for node in casts
    )


def _named(node: Node) -> str:
    node.name = node.name or node.outputs[0].name or node.op_type
    return node.name


def relative_error(actual: Array, expected: Array) -> float:
    """The relative error of an array."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    return _length(actual - expected) / (_length(expected) or 1.0)


def _length(array: Array) -> float:
    """The L2 norm; numpy's own wakes BLAS's threads, which costs milliseconds on a busy machine."""
    return float(np.sqrt(np.square(array).sum()))
