"""What a decomposed decoder is made of, and in which spellings (decomposed.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, LAYERS, CONTEXT = 40, 32, 4, 2, 16, 48, 2, 64
BIG = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Spelling:
    """What a decoder has, and how it is written; the first word of each comment is the default."""

    mask: str = "additive"  # boolean; wrong: future, ahead, blind (not oneself), padding, biased
    window: int = 0
    rope: str = "halves"  # pairs, partial, chunks (partial, no turned copy),
    # glm (partial pairs), ernie (pairs, as GLM has them),
    # yarn, none, last_none, learned, only_q; wrong: dynamic
    rope_in_heads_last: bool = False  # rope on [B, M, H, D], before the transpose
    norm: str = "rms"  # layer, layer_node (one operator), rms_div, cast
    order: str = "pre"  # post: OLMo2; sandwich: GLM4; parallel: Phi-2; parallel_two: GPT-NeoX
    qk_norm: str = "none"  # before, after rope, rows (before the reshape), each (head by head);
    # wrong: crossed (the heads turned round)
    repeat: str = "expand"  # tile, grouped
    activation: str = "silu"  # gelu_erf, gelu_tanh, relu2
    mlp: str = "gated"  # packed: gate and up side by side; plain
    softcap: float = 0.0
    multipliers: bool = False  # Granite: embedding, residual, logits, attention
    packed: bool = False  # q, k, v side by side
    keep_logits: bool = False
    merged: bool = False
    stored: str = "float32"  # float16, bfloat16: weights, cast to 32 bits
    narrow: str = ""  # float16, bfloat16: everything
    wide_low: bool = False  # the mask in 32 bits, its -3.4e38 cast to 16
    positions: str = "input"  # cumsum: of the mask; shifted: counted from 1; gap: 3 are left out
    batch: str | int = "batch"
    guard: bool = False
    bias: bool = False
    head_bias: bool = False
    lora: str = ""  # pair: kept beside each matrix; sum, turned: added to it (or its transpose)
    cache: str = "concat"  # of fixed size: scatter_nd, scatter_elements, tensor_scatter; wrong:
    # behind (old tokens behind new ones), late (written one place too far), circular
    whole_mask: bool = False  # attention_mask has all places of such a cache
    fused: str = "no"  # Attention of opset 23: heads after a Concat, or rows and caches as inputs


class Parts:
    """Nodes and weights as they come, and what every part of a decoder is made of."""

    def __init__(self, spelling: Spelling) -> None:
        self.s = spelling
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(7)

    def op(self, kind: str, *inputs: str, outputs: int = 1, output: str = "", **attrs: Any) -> Any:
        names = [output or f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(
            helper.make_node(kind, inputs, names, name=f"n{len(self.nodes)}_{kind}", **attrs)
        )
        return names[0] if outputs == 1 else names

    def const(self, value: Any, dtype: Any = np.float32) -> str:
        dtype = self.float_type if dtype is np.float32 else dtype
        tensor = numpy_helper.from_array(np.array(value, dtype))
        return str(self.op("Constant", value=tensor))

    def ints(self, *values: int) -> str:
        return self.const(list(values), np.int64)

    def weight(self, *shape: int, scale: float = 0.2, offset: float = 0.0) -> str:
        name = f"w{len(self.weights)}"
        array = (offset + scale * self.rng.standard_normal(shape)).astype(self.s.stored)
        self.weights.append(
            numpy_helper.from_array(array.astype(self.s.narrow or array.dtype), name)
        )
        if self.s.stored != "float32":
            return str(self.op("Cast", name, to=TensorProto.FLOAT))
        return name

    def size_of(self, value: str, axis: int) -> str:
        shape = self.op("Shape", value)
        return str(self.op("Gather", shape, self.const(axis, np.int64), axis=0))

    def dims(self, *parts: str | int) -> str:
        rows = [
            self.ints(p) if isinstance(p, int) else self.op("Unsqueeze", p, self.ints(0))
            for p in parts
        ]
        return str(self.op("Concat", *rows, axis=0))

    def slice(self, x: str, start: int, stop: int, step: int = 1) -> str:
        parts = [self.ints(v) for v in (start, stop, -1, step)]
        return str(self.op("Slice", x, *parts))

    @property
    def float_type(self) -> Any:
        """The type of activations."""
        return np.dtype(self.s.narrow or "float32")

    @property
    def element(self) -> int:
        """The same, as ONNX numbers it."""
        return int(helper.np_dtype_to_tensor_dtype(self.float_type))

    @property
    def is_static(self) -> bool:
        """Whether the caches have one size for all rounds."""
        return self.s.cache not in ("concat", "behind")

    def norm(self, x: str, width: int) -> str:
        weight = self.weight(width, offset=1.0)
        if self.s.norm == "layer_node":
            bias = self.weight(width)
            return str(self.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=1e-5))
        eps, two = self.const(1e-5), self.const(2.0)
        if self.s.norm == "layer":
            centred = self.op("Sub", x, self.op("ReduceMean", x, self.ints(-1)))
            square = self.op("Pow", centred, two)
            root = self.op(
                "Sqrt", self.op("Add", self.op("ReduceMean", square, self.ints(-1)), eps)
            )
            scaled = self.op("Mul", self.op("Div", centred, root), weight)
            return str(self.op("Add", scaled, self.weight(width)))
        if self.s.norm == "cast":
            x = self.op("Cast", x, to=TensorProto.FLOAT)
        square = self.op("Mul", x, x) if self.s.norm == "rms_div" else self.op("Pow", x, two)
        root = self.op("Sqrt", self.op("Add", self.op("ReduceMean", square, self.ints(-1)), eps))
        if self.s.norm == "rms_div":
            return str(self.op("Mul", self.op("Div", x, root), weight))
        inverse = self.op("Div", self.const(1.0), root)
        return str(self.op("Mul", weight, self.op("Mul", x, inverse)))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        turned, rank = self.s.lora == "turned", 4
        weight = self.weight(outputs, inputs) if turned else self.weight(inputs, outputs)
        if self.s.lora:
            down, up = self.weight(inputs, rank), self.weight(rank, outputs)
        if self.s.lora in ("sum", "turned"):
            change = self.op("MatMul", down, up)
            change = self.op("Transpose", change, perm=[1, 0]) if turned else change
            weight = self.op("Add", weight, self.op("Mul", self.const(0.5), change))
            weight = self.op("Transpose", weight, perm=[1, 0]) if turned else weight
        y = self.op("MatMul", x, weight)
        if self.s.lora == "pair":
            change = self.op("MatMul", self.op("MatMul", x, down), up)
            y = self.op("Add", y, self.op("Mul", change, self.const(0.5)))
        return str(self.op("Add", self.weight(outputs), y)) if self.s.bias else str(y)

    def activation(self, x: str) -> str:
        kind = self.s.activation
        if kind == "silu":
            return str(self.op("Mul", x, self.op("Sigmoid", x)))
        if kind == "relu2":
            return str(self.op("Pow", self.op("Relu", x), self.const(2.0)))
        if kind == "gelu_erf":
            inner = self.op("Erf", self.op("Div", x, self.const(2**0.5)))
        else:
            cube = self.op("Mul", self.op("Pow", x, self.const(3.0)), self.const(0.044715))
            inner = self.op("Mul", self.op("Add", x, cube), self.const((2 / np.pi) ** 0.5))
            inner = self.op("Tanh", inner)
        inner = self.op("Add", inner, self.const(1.0))
        return str(self.op("Mul", self.op("Mul", x, self.const(0.5)), inner))

    def add(self, x: str, y: str) -> str:
        if self.s.multipliers:
            y = self.op("Mul", y, self.const(0.3))
        return str(self.op("Add", x, y))
