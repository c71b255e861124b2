"""Weights are stored as their kernels read them."""

from __future__ import annotations

import numpy as np

from atsc.codegen.layout import part_chunks
from atsc.codegen.storage import store_weights
from atsc.compiler.ir import (
    ArraySource,
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


def test_fp16_angles_are_stored_as_float32() -> None:
    """Exporters of fp16 models write cos and sin in fp16; kernels read float32."""
    rng = np.random.default_rng(0)
    weights = {
        "table": random_float_weight(rng, (10, 64), DType.F16, "table"),
        "cos": random_float_weight(rng, (40, 32), DType.F16, "cos"),
        "sin": random_float_weight(rng, (40, 32), DType.BF16, "sin"),
    }
    wide = TensorType(DType.F32, ("M", 64))
    graph = Graph(
        ModelInfo("m", 10, 40),
        (Value("ids", TensorType(DType.I32, ("M",))),),
        (Value("y", wide),),
        (
            Node("embed", "embed", ("ids", "table"), ("x",)),
            Node("rope", "rope", ("x", "cos", "sin"), ("y",), {"head_size": 64}),
        ),
        {"x": wide, "y": wide},
        weights,
    )
    stored = store_weights(graph)
    assert [part.num_bytes for part in stored["table"].parts] == [10 * 64 * 2]
    for name in ("cos", "sin"):
        (part,) = stored[name].parts
        (data,) = part_chunks(stored[name], part)
        assert data.dtype == np.float32 and part.num_bytes == data.nbytes == 40 * 32 * 4
    (cos,) = part_chunks(stored["cos"], stored["cos"].parts[0])
    assert np.array_equal(cos, weights["cos"].parts["data"].read().astype(np.float32))


def test_scales_are_rounded_only_for_int8_activations() -> None:
    """A matrix that any linear reads with float activations keeps its scales."""
    rng = np.random.default_rng(0)

    def matrix(name: str) -> Weight:
        made = random_block_weight(rng, (64, 64), BlockFormat(4, 32, False))
        scales = made.parts["scales"].read().astype(np.float32) / np.float32(3)
        return Weight(
            name, made.shape, made.format, made.parts | {"scales": ArraySource.of(scales)}
        )

    wide, int8 = TensorType(DType.F32, ("M", 64)), TensorType(DType.Q8, ("M", 64))
    reads = {"a": ("xq",), "b": ("x",), "c": ("x", "xq")}
    nodes = [Node("quantize", "quantize", ("x",), ("xq",))]
    nodes += [
        Node("linear", f"{name}{x}", (x, name), (f"{name}{x}",))
        for name, inputs in reads.items()
        for x in inputs
    ]
    graph = Graph(
        ModelInfo("m", 10, 40),
        (Value("x", wide),),
        (Value("aq", wide),),
        tuple(nodes),
        {"x": wide, "xq": int8} | {node.outputs[0]: wide for node in nodes[1:]},
        {name: matrix(name) for name in reads},
    )
    found = {name: stored.scale_dtype for name, stored in store_weights(graph).items()}
    assert found == {"a": DType.F16, "b": DType.F32, "c": DType.F32}
