"""Runs a Graph with the operators' numpy references: the meaning of a graph, slowly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.ir import Graph
from atsc.compiler.ops import RoundState, op_of


class Interpreter:
    """One sequence: a prefill, then rounds over the KV caches that it leaves."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.state = RoundState()

    def round(self, ids: NDArray[Any], logit_rows: NDArray[Any] | None = None) -> NDArray[Any]:
        """Logits float32 [R, V] of new tokens [M]; all rows unless some are listed."""
        state = self.state
        state.logit_rows = logit_rows
        values: dict[str, Any] = {self.graph.inputs[0].name: np.asarray(ids, np.int32)}
        for node in self.graph.nodes:
            op = op_of(node)
            inputs = [
                None if not name else values.get(name, self.graph.weights.get(name))
                for name in node.inputs
            ]
            results = op.reference(op.complete(node.attrs), inputs, state)
            values.update({n: r for n, r in zip(node.outputs, results, strict=False) if n})
        state.position += len(ids)
        logits: NDArray[Any] = values[self.graph.outputs[0].name]
        return logits


def replay(graph: Graph, ids: NDArray[Any], prompt_len: int) -> NDArray[Any]:
    """Logits of all ids: a prefill of the first `prompt_len`, then single steps."""
    interpreter = Interpreter(graph)
    rows = [interpreter.round(ids[:prompt_len])]
    rows += [interpreter.round(ids[i : i + 1]) for i in range(prompt_len, len(ids))]
    return np.concatenate(rows)
