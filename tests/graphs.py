"""Graphs from text, for tests of passes: the lines that `print_graph` writes, without the types."""

from __future__ import annotations

import ast
import re
import zlib

import numpy as np
from interpreter import Interpreter

from atsc.compiler.invariants import check_graph, infer_values
from atsc.compiler.ir import (
    AttrValue,
    BlockFormat,
    DType,
    Graph,
    ModelInfo,
    Node,
    TensorType,
    Value,
    Weight,
)
from atsc.compiler.ops.linear import random_block_weight, random_float_weight
from atsc.compiler.text import print_node
from atsc.passes.pipeline import Pass, run_passes

_WEIGHT = re.compile(r"weight (\S+): (\w+)\[([\d, ]+)\]")
_NODE = re.compile(r"(.+?) = (\w+)\(([^)]*)\)(?: \{(.*)\})?")
IDS = Value("ids", TensorType(DType.I32, ("M",)))


def parse_graph(text: str) -> Graph:
    """`weight NAME: FORMAT[SHAPE]`, `OUTPUTS = OP(INPUTS) {ATTRS}`, `out NAME` a line.

    Formats: f32, f16, bf16, int4bSIZE, int8bSIZE. The one input is `ids`. Weights are random, the
    same for the same name; a node is named after its first output.
    """
    weights: dict[str, Weight] = {}
    nodes: list[Node] = []
    output = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := _WEIGHT.fullmatch(line):
            weights[match[1]] = _weight(match[1], match[2], match[3])
        elif line.startswith("out "):
            output = line.removeprefix("out ")
        else:
            nodes.append(_node(line))
    values = infer_values([IDS], nodes, weights)
    graph = Graph(
        info=ModelInfo("test", 7, 64),
        inputs=(IDS,),
        outputs=(Value(output, values[output]),),
        nodes=tuple(nodes),
        values=values,
        weights=weights,
    )
    check_graph(graph)
    return graph


def _weight(name: str, fmt: str, shape: str) -> Weight:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    sizes = tuple(int(size) for size in shape.split(","))
    if block := re.fullmatch(r"int(\d)b(\d+)", fmt):
        rows, width = sizes
        made = BlockFormat(int(block[1]), int(block[2]), False)
        return random_block_weight(rng, (rows, width), made, name=name)
    return random_float_weight(rng, sizes, DType(fmt), name)


def _node(line: str) -> Node:
    match = _NODE.fullmatch(line)
    assert match, line
    outputs, inputs = (
        tuple("" if name == "_" else name for name in group.split(", "))
        for group in (match[1], match[3])
    )
    attrs = dict(item.split("=") for item in (match[4] or "").split(", ") if item)
    name = next(filter(None, outputs))
    return Node(match[2], name, inputs, outputs, {key: _attr(v) for key, v in attrs.items()})


def _attr(text: str) -> AttrValue:
    try:
        value: AttrValue = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value


def rewritten(step: Pass, text: str, *, tolerance: float = 1e-5) -> str:
    """What a pass makes of a graph, as lines; what the graph computes stays the same."""
    before = parse_graph(text)
    after = run_passes(before, [step])
    ids = np.array([1, 5, 2, 0, 6])
    for graph in (before, after):
        assert graph.outputs[0].name == before.outputs[0].name
    first, second = (Interpreter(graph).round(ids) for graph in (before, after))
    scale = float(np.abs(first).max())
    np.testing.assert_allclose(second, first, rtol=0, atol=tolerance * scale)
    return "\n".join(print_node(node) for node in after.nodes)


def lines(text: str) -> str:
    """A block of expected lines without its indentation."""
    return "\n".join(filter(None, map(str.strip, text.splitlines())))
