"""Units and barrier-free groups of a small decoder layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from atsc.compiler.ir import (
    ArraySource,
    BlockFormat,
    DType,
    FloatFormat,
    Graph,
    ModelInfo,
    Node,
    TensorType,
    Value,
    Weight,
)
from atsc.passes.partition import partition_units, schedule_groups

INTER = 2048
HIDDEN = 1024


def matrix(name: str, outputs: int, width: int) -> Weight:
    codes = ArraySource(DType.U8, (outputs, width // 32, 16), lambda: np.zeros(0))
    scales = ArraySource(DType.F32, (outputs, width // 32), lambda: np.zeros(0))
    fmt = BlockFormat(4, 32, False)
    return Weight(name, (outputs, width), fmt, {"codes": codes, "scales": scales})


def vector(name: str, *shape: int) -> Weight:
    source = ArraySource(DType.F32, shape, lambda: np.zeros(0))
    return Weight(name, shape, FloatFormat(DType.F32), {"data": source})


def layer() -> Graph:
    """embed (tied), two attention layers' worth of q8 linears with gate and up, head."""
    f32, q8 = DType.F32, DType.Q8
    values = {"x0": TensorType(f32, ("M", HIDDEN))}
    weights = [matrix("table", 8192, HIDDEN), vector("cos", 64, 32), vector("sin", 64, 32)]
    nodes = [Node("embed", "embed", ("ids", "table"), ("x0",))]

    def emit(op: str, name: str, reads: tuple[str, ...], width: int, dtype: DType = f32) -> None:
        values[name] = TensorType(dtype, ("M", width))
        outputs = ("", name) if op == "rms_norm" else (name,)
        attrs = {"layer": int(name[-1])} if op == "attention" else {}
        nodes.append(Node(op, name, reads, outputs, attrs))

    for i in range(2):
        weights += [
            vector(f"n{i}", HIDDEN),
            vector(f"m{i}", HIDDEN),
            matrix(f"wqkv{i}", HIDDEN + 512, HIDDEN),
            matrix(f"wo{i}", HIDDEN, HIDDEN),
            matrix(f"wgate{i}", INTER, HIDDEN),
            matrix(f"wup{i}", INTER, HIDDEN),
            matrix(f"wdown{i}", HIDDEN, INTER),
        ]
        emit("rms_norm", f"norm{i}", (f"x{i}", f"n{i}"), HIDDEN, q8)
        emit("linear", f"qkv{i}", (f"norm{i}", f"wqkv{i}"), HIDDEN + 512)
        emit("attention", f"attn{i}", (f"qkv{i}", "", "", "cos", "sin"), HIDDEN)
        emit("quantize", f"attnq{i}", (f"attn{i}",), HIDDEN, q8)
        emit("linear", f"o{i}", (f"attnq{i}", f"wo{i}", "", "", f"x{i}"), HIDDEN)
        emit("rms_norm", f"norm2{i}", (f"o{i}", f"m{i}"), HIDDEN, q8)
        emit("linear", f"gate{i}", (f"norm2{i}", f"wgate{i}"), INTER)
        emit("linear", f"up{i}", (f"norm2{i}", f"wup{i}", "", f"gate{i}"), INTER)
        emit("quantize", f"upq{i}", (f"up{i}",), INTER, q8)
        emit("linear", f"x{i + 1}", (f"upq{i}", f"wdown{i}", "", "", f"o{i}"), HIDDEN)
    emit("quantize", "last", ("x2",), HIDDEN, q8)
    nodes.append(Node("linear", "head", ("last", "table"), ("logits",)))
    values["logits"] = TensorType(f32, ("R", 8192))
    return Graph(
        ModelInfo("layer", 8192, 64),
        (Value("ids", TensorType(DType.I32, ("M",))),),
        (Value("logits", values["logits"]),),
        tuple(nodes),
        values,
        {weight.name: weight for weight in weights},
    )


def test_units_are_cut_at_256_kib_and_gate_and_up_are_two() -> None:
    graph = layer()
    units = partition_units(graph, lambda weight: weight.num_bytes)
    names = [graph.nodes[i].name for unit in units for i in unit.nodes]
    assert names == [node.name for node in graph.nodes], "every node once, in order"
    assert [unit.name for unit in units] == [
        "shared",
        "embed",
        *[
            name.format(i)
            for i in range(2)
            for name in ("wqkv{}", "attn{}", "wo{}", "wgate{}", "wup{}", "wdown{}")
        ],
        "table",
    ]
    assert [unit.kind.value for unit in units[:5]] == [
        "shared",
        "host",
        "weights",
        "kv-cache",
        "weights",
    ]
    assert units[0].weights == ("cos", "sin")
    assert units[2].weights == ("n0", "wqkv0")
    assert [graph.nodes[i].name for i in units[2].nodes] == ["norm0", "qkv0"]
    stored = [name for unit in units for name in unit.weights]
    assert sorted(stored) == sorted(graph.weights), "every weight is stored once"


def test_groups_have_one_barrier_after_each_shared_stage() -> None:
    graph = layer()
    schedule = schedule_groups(graph)
    groups: dict[int, list[str]] = {}
    for node, group in zip(graph.nodes, schedule.group, strict=True):
        groups.setdefault(group, []).append(node.name)
    assert list(groups.values())[:6] == [
        ["embed"],
        ["norm0", "qkv0"],
        ["attn0"],
        ["attnq0", "o0"],
        ["norm20", "gate0", "up0"],
        ["upq0", "x1"],
    ]
    aligned = [n.name for n, a in zip(graph.nodes, schedule.aligned, strict=True) if a]
    assert aligned == ["up0", "up1"]
    replicated = {n.op for n, r in zip(graph.nodes, schedule.replicated, strict=True) if r}
    assert replicated == {"rms_norm", "quantize"}


def test_a_linear_that_reads_all_of_the_one_before_waits_for_it() -> None:
    graph = layer()
    nodes = list(graph.nodes)
    index = next(i for i, node in enumerate(nodes) if node.name == "up0")
    # Its input x is read whole, and other threads compute parts of it.
    nodes[index] = replace(nodes[index], inputs=("gate0", "wup0"))
    schedule = schedule_groups(graph.replace(nodes=tuple(nodes)))
    assert schedule.group[index] == schedule.group[index - 1] + 1
    assert not schedule.aligned[index]
