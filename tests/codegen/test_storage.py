"""Weights are stored as their kernels read them."""

from __future__ import annotations

import numpy as np

from atsc.codegen.layout import part_chunks
from atsc.codegen.storage import store_weights
from atsc.compiler.ir import DType, Graph, ModelInfo, Node, TensorType, Value
from atsc.compiler.ops.linear import random_float_weight


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
