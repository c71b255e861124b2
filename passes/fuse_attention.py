"""fuse-attention: what stands between the projections and attention goes into attention.

In this order, nearest first, as attention applies them the other way round:

    rope on q and k with the same angles     -> cos, sin
    rms_norm of every head of q and of k     -> q_norm, k_norm
    q, k, v columns of one packed projection -> the packed first input

A pattern is refused where a value in between has another reader, or where attention has it already.
"""

from __future__ import annotations

from dataclasses import dataclass

from atsc.compiler.ir import Graph, Node
from atsc.compiler.ops import op_of
from atsc.passes.rewrite import Readers, int_attr, rebuild


@dataclass(frozen=True)
class FuseAttention:
    """Fuses rope, q/k norms and the split of packed projections; see the module."""

    name: str = "fuse-attention"

    def run(self, graph: Graph) -> Graph:
        """The graph with larger attention nodes."""
        readers = Readers(graph)
        nodes = []
        for node in graph.nodes:
            if node.op == "attention":
                for rewrite in (_rope, _norms, _pack):
                    node = rewrite(readers, node) or node
            nodes.append(node)
        return rebuild(graph, nodes)


def _slots(node: Node) -> dict[str, str]:
    op = op_of(node)
    return {slot.rstrip("?"): op.slot(node, slot.rstrip("?")) for slot in op.inputs}


def _with_slots(node: Node, **changes: str) -> Node:
    names = list((_slots(node) | changes).values())
    while not names[-1]:
        names.pop()
    return node.replace(inputs=tuple(names))


def _makers(readers: Readers, node: Node, op: str) -> tuple[Node, Node] | None:
    """The nodes of one operator that make q and k for this attention alone."""
    slots = _slots(node)
    if not slots["k"]:
        return None
    q, k = readers.producer(slots["q"]), readers.producer(slots["k"])
    if q is None or k is None or q.op != op or k.op != op:
        return None
    alone = readers.read_once(slots["q"]) and readers.read_once(slots["k"])
    return (q, k) if alone else None


def _rope(readers: Readers, node: Node) -> Node | None:
    slots, makers = _slots(node), _makers(readers, node, "rope")
    if makers is None or slots["cos"] or slots["q_norm"]:
        return None
    q, k = makers
    size = node.attrs["head_size"]
    if q.inputs[1:] != k.inputs[1:] or q.attrs != k.attrs or q.attrs["head_size"] != size:
        return None
    fused = node.with_attrs(interleaved=q.attrs.get("interleaved", False))
    return _with_slots(fused, q=q.inputs[0], k=k.inputs[0], cos=q.inputs[1], sin=q.inputs[2])


def _norms(readers: Readers, node: Node) -> Node | None:
    slots, makers = _slots(node), _makers(readers, node, "rms_norm")
    if makers is None or slots["q_norm"]:
        return None
    q, k = makers
    size, eps = node.attrs["head_size"], q.attrs["eps"]
    widths = {"q": node.attrs["num_heads"], "k": node.attrs["kv_heads"]}
    for maker, heads in ((q, widths["q"]), (k, widths["k"])):
        group = maker.attrs.get("group") or (size if heads == 1 else 0)
        if group != size or maker.attrs["eps"] != eps or len(maker.inputs) > 2:
            return None
    fused = node.with_attrs(qk_norm_eps=eps)
    return _with_slots(fused, q=q.inputs[0], k=k.inputs[0], q_norm=q.inputs[1], k_norm=k.inputs[1])


def _pack(readers: Readers, node: Node) -> Node | None:
    slots = _slots(node)
    if not slots["k"]:
        return None
    makers = [readers.producer(slots[slot]) for slot in ("q", "k", "v")]
    size = int_attr(node, "head_size")
    heads, kv_heads = int_attr(node, "num_heads") * size, int_attr(node, "kv_heads") * size
    bounds = [0, heads, heads + kv_heads, heads + 2 * kv_heads]
    sources = set()
    for index, maker in enumerate(makers):
        if maker is None or maker.op != "columns":
            return None
        if (maker.attrs["start"], maker.attrs["stop"]) != (bounds[index], bounds[index + 1]):
            return None
        sources.add(maker.inputs[0])
    return _with_slots(node, q=sources.pop(), k="", v="") if len(sources) == 1 else None
