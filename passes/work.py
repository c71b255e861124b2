"""What nodes do in one round, in operations and bytes, and the time that a roofline gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atsc.compiler.ir import Graph, TensorType, Weight
from atsc.compiler.ops import Operand, op_of


@dataclass(frozen=True, slots=True)
class NodeWork:
    """One node in one round."""

    flops: int
    num_bytes: int
    """Read and written, weights as the plan stores them."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """One side of a machine."""

    bytes_per_s: float
    ops_per_s: float
    kernel_ns: float
    """Least time of a node."""

    def time_ns(self, work: Sequence[NodeWork]) -> int:
        """Nodes one after the other, each at the limit of its bytes or of its operations."""
        total = 0.0
        for node in work:
            seconds = max(node.num_bytes / self.bytes_per_s, node.flops / self.ops_per_s)
            total += seconds * 1e9 + self.kernel_ns
        return round(total)


def node_work(
    graph: Graph, index: int, stored_bytes: Mapping[str, int], rows: int, context: int
) -> NodeWork:
    """A node's work.

    Args:
        graph: where the node is from.
        index: of the node.
        stored_bytes: weight name -> bytes as the plan stores it.
        rows: tokens of the round.
        context: tokens in the KV cache after it.
    """
    node = graph.nodes[index]
    op = op_of(node)
    operands = [_operand(graph, name) for name in node.inputs]
    cost = op.cost(op.complete(node.attrs), operands, rows, context)
    num_bytes = cost.bytes_read + cost.bytes_written
    matrix = op.slot(node, op.matrix_slot) if op.matrix_slot else ""
    if node.op == "linear" and matrix in stored_bytes:
        num_bytes += stored_bytes[matrix] - graph.weights[matrix].num_bytes
    return NodeWork(cost.flops, num_bytes)


def _operand(graph: Graph, name: str) -> Operand:
    found: TensorType | Weight | None = graph.values.get(name)
    return found if found is not None else graph.weights.get(name)
