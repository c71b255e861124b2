"""Cuts position tables to the context that the user asked for.

Exporters write cos and sin for the model's whole context (2 x 33 MB at 131072 positions); a plan
holds as many positions as its KV caches do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atsc.compiler.errors import UsageError
from atsc.compiler.ir import ArraySource, Graph, Weight
from atsc.compiler.ops import op_of

DEFAULT_CONTEXT = 4096
CACHE_ALIGNMENT = 64
_POSITION_SLOTS = {
    "attention": ("cos", "sin"),
    "rope": ("cos", "sin"),
    "add_positions": ("table",),
}


def max_context(graph: Graph) -> int:
    """The most tokens that the model's position tables and its own configuration allow."""
    rows = [graph.weights[name].shape[0] for name in _position_tables(graph)]
    return min([graph.info.context_length, *rows])


def choose_context(graph: Graph, wanted: int | None) -> int:
    """The context of a plan: what is wanted, else DEFAULT_CONTEXT or the model's if that is less.

    Raises:
        UsageError: more is wanted than the model has positions for.
    """
    limit = max_context(graph)
    if wanted is None:
        return min(limit, DEFAULT_CONTEXT)
    if wanted > limit:
        raise UsageError(f"--ctx {wanted}: {graph.info.name} has positions for {limit} tokens only")
    return wanted


def cache_capacity(context: int, window: int, chunk: int) -> int:
    """Tokens that a KV cache holds: of an attention window, a ring of the window and one chunk."""
    ring = -(-(window + chunk) // CACHE_ALIGNMENT) * CACHE_ALIGNMENT
    return min(context, ring) if window else context


@dataclass(frozen=True, slots=True)
class LimitContext:
    """The pass: position tables keep their first `context` rows."""

    context: int
    name: str = "limit-context"

    def run(self, graph: Graph) -> Graph:
        """A graph whose cos and sin tables hold `context` rows."""
        tables = {
            name: _first_rows(graph.weights[name], self.context) for name in _position_tables(graph)
        }
        return graph.replace(weights={**graph.weights, **tables})


def _position_tables(graph: Graph) -> list[str]:
    names = [
        op_of(node).slot(node, slot)
        for node in graph.nodes
        for slot in _POSITION_SLOTS.get(node.op, ())
    ]
    return list(dict.fromkeys(filter(None, names)))


def _first_rows(weight: Weight, rows: int) -> Weight:
    data = weight.parts["data"]
    shape = (min(rows, data.shape[0]), *data.shape[1:])
    part = ArraySource(data.dtype, shape, lambda: data.read()[: shape[0]])
    return replace(weight, shape=shape, parts={"data": part})
