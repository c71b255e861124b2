"""Small random decoders as exporters of plain ONNX operators write them, in many spellings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, LAYERS, CONTEXT = 40, 32, 4, 2, 16, 48, 2, 64
_BIG = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Spelling:
    """What a decoder has, and how it is written; the first word of each comment is the default."""

    mask: str = "additive"  # boolean; wrong: future, ahead, blind (not oneself), padding, biased
    window: int = 0
    rope: str = "halves"  # pairs, partial, chunks (partial, no turned copy),
    # glm (partial pairs), ernie (pairs, as GLM has them),
    # yarn, none, last_none, learned, only_q; wrong: dynamic
    rope_in_heads_last: bool = False  # rope on [B, M, H, D], before the transpose
    norm: str = "rms"  # layer, rms_div, cast
    order: str = "pre"  # post: OLMo2; sandwich: GLM4; parallel: Phi-2; parallel_two: GPT-NeoX
    qk_norm: str = "none"  # before, after rope, rows (before the reshape)
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


class Decoder:
    """Builds the model of one spelling."""

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

    def norm(self, x: str, width: int) -> str:
        weight = self.weight(width, offset=1.0)
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

    def mask(self) -> str:
        """Additive [1, 1, M, T], or boolean."""
        tokens, total = self.size_of("input_ids", 1), self.size_of("attention_mask", 1)
        columns = self.const(CONTEXT, np.int64) if self.is_static else total
        zero, one = self.const(0, np.int64), self.const(1, np.int64)
        past = self.op("Sub", total, tokens)
        key = self.op("Range", zero, columns, one)
        row = self.op("Add", self.op("Range", zero, tokens, one), past)
        if self.s.whole_mask:
            row = "position_ids"
        row = self.op("Reshape", row, self.ints(-1, 1))
        if self.s.mask in ("ahead", "blind"):
            row = self.op("Add" if self.s.mask == "ahead" else "Sub", row, one)
        seen = self.op("LessOrEqual", key, row)
        if self.s.window:
            first = self.op("Sub", row, self.const(self.s.window, np.int64))
            seen = self.op("And", seen, self.op("Greater", key, first))
        padding = self.op("Cast", "attention_mask", to=TensorProto.BOOL)
        padding = self.op("Unsqueeze", padding, self.ints(1, 2))
        if self.is_static and not self.s.whole_mask:
            rest = [self.ints(0, 0, 0, 0, 0, 0, 0), self.op("Sub", columns, total)]
            rest[1] = self.op("Unsqueeze", rest[1], self.ints(0))
            padding = self.op("Pad", padding, self.op("Concat", *rest, axis=0))
        if self.s.mask == "padding":
            seen = self.op("Expand", padding, self.dims(1, 1, tokens, total))
        elif self.s.mask == "future":
            seen = self.op("GreaterOrEqual", key, row)
        else:
            seen = self.op("And", self.op("Unsqueeze", seen, self.ints(0, 1)), padding)
        if self.s.mask == "boolean":
            return str(seen)
        low = self.const(float(ml_dtypes.finfo(self.float_type).min))
        mask = self.op("Where", seen, self.const(0.0), low)
        if self.s.wide_low:
            values = (np.array(v, np.float32) for v in (0, np.finfo(np.float32).min))
            zero, low = (self.op("Constant", value=numpy_helper.from_array(v)) for v in values)
            mask = self.op("Cast", self.op("Where", seen, zero, low), to=self.element)
        if self.s.mask == "biased":
            slope = self.op("Cast", self.op("Sub", key, row), to=TensorProto.FLOAT)
            mask = self.op("Add", mask, self.op("Mul", slope, self.const(0.1)))
        return str(mask)

    @property
    def float_type(self) -> Any:
        """The type of activations."""
        return np.dtype(self.s.narrow or "float32")

    @property
    def element(self) -> int:
        """The same, as ONNX numbers it."""
        return int(helper.np_dtype_to_tensor_dtype(self.float_type))

    def position_ids(self) -> str:
        one = self.const(1, np.int64)
        if self.s.positions == "shifted":
            return str(self.op("Add", "position_ids", one))
        if self.s.positions == "input":
            return "position_ids"
        if self.s.positions == "gap":
            late = self.op("Greater", "position_ids", self.const(4, np.int64))
            skipped = self.op("Mul", self.op("Cast", late, to=TensorProto.INT64), self.ints(3))
            return str(self.op("Add", "position_ids", skipped))
        count = self.op("Sub", self.op("CumSum", "attention_mask", one), one)
        tokens = self.op("Neg", self.size_of("input_ids", 1))
        start = self.op("Unsqueeze", tokens, self.ints(0))
        return str(self.op("Slice", count, start, self.ints(_BIG), self.ints(1)))

    def angles(self) -> tuple[str, str]:
        """cos and sin [1, 1, M, D], or of the rotated part, or of pairs."""
        rotary = SIZE // 2 if self.s.rope in ("partial", "chunks", "glm") else SIZE
        frequencies = 100.0 ** (-np.arange(0, rotary, 2) / rotary)
        position = self.op("Cast", self.position_ids(), to=self.element)
        if self.s.rope == "dynamic":
            total = self.op("Cast", self.size_of("attention_mask", 1), to=TensorProto.FLOAT)
            position = self.op("Div", position, self.op("Sqrt", total))
        angle = self.op(
            "Mul", self.op("Unsqueeze", position, self.ints(2)), self.const(frequencies)
        )
        if self.s.rope == "pairs":
            angle = self.op("Unsqueeze", angle, self.ints(3))
            angle = self.op("Concat", angle, angle, axis=3)
            rows, tokens = self.dims(1, self.size_of("position_ids", 1), rotary), 0
            angle = self.op("Reshape", angle, rows)
            assert tokens == 0
        else:
            angle = self.op("Concat", angle, angle, axis=-1)
        axis = self.ints(2 if self.s.rope_in_heads_last else 1)
        parts = [self.op("Unsqueeze", self.op(f, angle), axis) for f in ("Cos", "Sin")]
        if self.s.rope in ("glm", "ernie"):
            parts = [self.interleaved(self.slice(part, 0, rotary // 2)) for part in parts]
        if self.s.rope == "yarn":
            parts = [self.op("Mul", part, self.const(1.2)) for part in parts]
        return parts[0], parts[1]

    def interleaved(self, half: str) -> str:
        """Each of the first angles twice, as repeat_interleave is exported."""
        twice = self.op(
            "Expand", self.op("Unsqueeze", half, self.ints(-1)), self.ints(1, 1, 1, 1, 2)
        )
        return str(self.op("Reshape", twice, self.ints(0, 0, 0, -1), allowzero=0))

    def slice(self, x: str, start: int, stop: int, step: int = 1) -> str:
        parts = [self.ints(v) for v in (start, stop, -1, step)]
        return str(self.op("Slice", x, *parts))

    def rotate(self, x: str, angles: tuple[str, str]) -> str:
        whole, stay = x, ""
        if self.s.rope in ("partial", "chunks", "glm"):
            x, stay = self.slice(whole, 0, SIZE // 2), self.slice(whole, SIZE // 2, _BIG)
        if self.s.rope == "chunks":
            return str(self.op("Concat", *self.chunks(x, angles), stay, axis=-1))
        if self.s.rope in ("pairs", "glm", "ernie"):
            second = self.op("Neg", self.slice(x, 1, _BIG, 2))
            parts = [
                self.op("Unsqueeze", v, self.ints(-1)) for v in (second, self.slice(x, 0, _BIG, 2))
            ]
            turned = self.op("Reshape", self.op("Concat", *parts, axis=-1), self.op("Shape", x))
        else:
            half = (SIZE // 2 if stay else SIZE) // 2
            second = self.op("Neg", self.slice(x, half, _BIG))
            turned = self.op("Concat", second, self.slice(x, 0, half), axis=-1)
        cos, sin = angles
        y = self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin))
        return str(self.op("Concat", y, stay, axis=-1) if stay else y)

    def chunks(self, x: str, angles: tuple[str, str]) -> list[str]:
        """Both halves turned, each for itself."""
        a, b = self.op("Split", x, outputs=2, axis=-1, num_outputs=2)
        cos, sin = (self.slice(angle, 0, SIZE // 4) for angle in angles)
        first = self.op("Sub", self.op("Mul", a, cos), self.op("Mul", b, sin))
        return [first, self.op("Add", self.op("Mul", a, sin), self.op("Mul", b, cos))]

    def heads(self, x: str, count: int, angles: tuple[str, str] | None, normed: bool) -> str:
        """[1, H, M, D] of rows."""
        tokens = self.size_of("input_ids", 1)
        x = self.op("Reshape", x, self.dims(self.size_of("input_ids", 0), tokens, count, SIZE))
        if normed and self.s.qk_norm == "before":
            x = self.norm(x, SIZE)
        if angles and self.s.rope_in_heads_last:
            x = self.rotate(x, angles)
        x = self.op("Transpose", x, perm=[0, 2, 1, 3])
        if angles and not self.s.rope_in_heads_last:
            x = self.rotate(x, angles)
        return self.norm(x, SIZE) if normed and self.s.qk_norm == "after" else x

    def repeated(self, x: str) -> str:
        group, total = HEADS // KV_HEADS, self.size_of(x, 2)
        if self.s.repeat == "grouped":
            return str(self.op("Unsqueeze", x, self.ints(2)))
        wide = self.op("Unsqueeze", x, self.ints(2))
        if self.s.repeat == "tile":
            wide = self.op("Tile", wide, self.ints(1, 1, group, 1, 1))
        else:
            wide = self.op("Expand", wide, self.dims(1, KV_HEADS, group, total, SIZE))
        return str(self.op("Reshape", wide, self.dims(1, HEADS, total, SIZE)))

    def attention(self, layer: int, x: str, mask: str, angles: tuple[str, str] | None) -> str:
        widths = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        if self.s.packed:
            rows = self.linear(x, HIDDEN, sum(widths))
            parts = self.op("Split", rows, self.ints(*widths), outputs=3, axis=-1)
        else:
            parts = [self.linear(x, HIDDEN, width) for width in widths]
        if self.s.qk_norm == "rows":
            parts = [self.norm(parts[0], widths[0]), self.norm(parts[1], widths[1]), parts[2]]
        if self.s.fused == "rows":
            return self.fused_rows(layer, parts, mask, angles)
        normed = self.s.qk_norm != "none"
        q = self.heads(parts[0], HEADS, angles, normed)
        k = self.heads(parts[1], KV_HEADS, angles if self.s.rope != "only_q" else None, normed)
        v = self.heads(parts[2], KV_HEADS, None, False)
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        present = [f"present.{layer}.{part}" for part in ("key", "value")]
        k, v = (self.joined(*parts) for parts in zip(past, (k, v), present, strict=True))
        k, v = self.repeated(k), self.repeated(v)
        if self.s.fused == "heads":
            mixed = self.op("Attention", q, k, v, mask, softcap=self.s.softcap)
            return self.side_by_side(mixed)
        if self.s.repeat == "grouped":
            tokens = self.size_of("input_ids", 1)
            group = HEADS // KV_HEADS
            q = self.op("Reshape", q, self.dims(1, KV_HEADS, group, tokens, SIZE))
            mask = self.op("Unsqueeze", mask, self.ints(1))
        perm = [0, 1, 2, 4, 3] if self.s.repeat == "grouped" else [0, 1, 3, 2]
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=perm))
        scale = self.const(0.11 if self.s.multipliers else SIZE**-0.5)
        scores = self.op("Mul", scores, scale)
        if self.s.softcap:
            cap = self.const(self.s.softcap)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        if self.s.mask == "boolean":
            scores = self.op("Where", mask, scores, self.const(-np.inf))
        else:
            scores = self.op("Add", scores, mask)
        weights = self.op("Softmax", scores, axis=-1)
        if self.s.guard:
            weights = self.op("Where", self.op("IsNaN", weights), self.const(0.0), weights)
        mixed = self.op("MatMul", weights, v)
        if self.s.repeat == "grouped":
            tokens = self.size_of("input_ids", 1)
            mixed = self.op("Reshape", mixed, self.dims(1, HEADS, tokens, SIZE))
        return self.side_by_side(mixed)

    @property
    def is_static(self) -> bool:
        """Whether the caches have one size for all rounds."""
        return self.s.cache not in ("concat", "behind")

    def joined(self, past: str, new: str, present: str) -> str:
        """The cache with new keys or values [1, H, M, D]."""
        if not self.is_static:
            order = [new, past] if self.s.cache == "behind" else [past, new]
            return str(self.op("Concat", *order, axis=2, output=present))
        places = self.op("Squeeze", "position_ids", self.ints(0))
        if self.s.cache == "late":
            places = self.op("Add", places, self.ints(1))
        if self.s.cache in ("tensor_scatter", "circular"):
            first = self.op("Gather", places, self.ints(0))
            mode = "circular" if self.s.cache == "circular" else "linear"
            node = self.op("TensorScatter", past, new, first, axis=2, mode=mode, output=present)
            return str(node)
        if self.s.cache == "scatter_elements":
            index = self.op("Unsqueeze", places, self.ints(0, 1, 3))
            index = self.op("Expand", index, self.op("Shape", new))
            return str(self.op("ScatterElements", past, index, new, axis=2, output=present))
        index = self.op("Unsqueeze", places, self.ints(1))
        parts = [self.op("Transpose", part, perm=[2, 0, 1, 3]) for part in (past, new)]
        written = self.op("ScatterND", parts[0], index, parts[1])
        return str(self.op("Transpose", written, perm=[1, 2, 0, 3], output=present))

    def side_by_side(self, mixed: str) -> str:
        mixed = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        rows = self.dims(self.size_of("input_ids", 0), self.size_of("input_ids", 1), HEADS * SIZE)
        return self.linear(self.op("Reshape", mixed, rows), HEADS * SIZE, HIDDEN)

    def fused_rows(
        self, layer: int, parts: list[str], mask: str, angles: tuple[str, str] | None
    ) -> str:
        if angles:
            cos, sin = (
                self.slice(self.op("Squeeze", a, self.ints(1)), 0, SIZE // 2) for a in angles
            )
            counts = (HEADS, KV_HEADS)
            turned = [
                self.op("RotaryEmbedding", x, cos, sin, num_heads=count)
                for x, count in zip(parts, counts, strict=False)
            ]
            parts = [*turned, parts[2]]
        names = [f"{{}}.{layer}.{part}" for part in ("key", "value")]
        outputs = [f"mixed_{layer}", *(name.format("present") for name in names)]
        inputs = [*parts, mask, *(name.format("past_key_values") for name in names)]
        node = helper.make_node(
            "Attention",
            inputs,
            outputs,
            name=f"attention_{layer}",
            q_num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        )
        self.nodes.append(node)
        return self.linear(outputs[0], HEADS * SIZE, HIDDEN)

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

    def layer(self, index: int, x: str, mask: str, angles: tuple[str, str] | None) -> str:
        if self.s.order.startswith("parallel"):
            return self.parallel_layer(index, x, mask, angles)
        before, after = self.s.order != "post", self.s.order in ("post", "sandwich")
        y = self.attention(index, self.norm(x, HIDDEN) if before else x, mask, angles)
        x = self.add(x, self.norm(y, HIDDEN) if after else y)
        y = self.mlp(self.norm(x, HIDDEN) if before else x)
        return self.add(x, self.norm(y, HIDDEN) if after else y)

    def parallel_layer(self, index: int, x: str, mask: str, angles: tuple[str, str] | None) -> str:
        """Attention and MLP of the same rows."""
        y = self.norm(x, HIDDEN)
        z = self.norm(x, HIDDEN) if self.s.order == "parallel_two" else y
        mixed = self.attention(index, y, mask, angles)
        return self.add(self.add(mixed, self.mlp(z)), x)

    def mlp(self, x: str) -> str:
        if self.s.mlp == "plain":
            return self.linear(self.activation(self.linear(x, HIDDEN, INNER)), INNER, HIDDEN)
        if self.s.mlp == "packed":
            both = self.linear(x, HIDDEN, 2 * INNER)
            gate, up = self.op("Split", both, outputs=2, axis=-1, num_outputs=2)
        else:
            gate, up = self.linear(x, HIDDEN, INNER), self.linear(x, HIDDEN, INNER)
        return self.linear(self.op("Mul", self.activation(gate), up), INNER, HIDDEN)

    def body(self) -> None:
        table = self.weight(VOCAB, HIDDEN, scale=1.0)
        x = self.op("Gather", table, "input_ids", axis=0)
        if self.s.multipliers:
            x = self.op("Mul", x, self.const(2.5))
        if self.s.rope == "learned":
            index = self.op("Add", "position_ids", self.const(2, np.int64))
            x = self.op("Add", x, self.op("Gather", self.weight(50, HIDDEN), index, axis=0))
        mask = self.mask()
        angles = None if self.s.rope in ("none", "learned") else self.angles()
        for index in range(LAYERS):
            last = self.s.rope == "last_none" and index == LAYERS - 1
            x = self.layer(index, x, mask, None if last else angles)
        x = self.norm(x, HIDDEN)
        if self.s.keep_logits:
            start = self.op("Unsqueeze", self.op("Neg", "num_logits_to_keep"), self.ints(0))
            x = self.op("Slice", x, start, self.ints(_BIG), self.ints(1))
        scale = self.const(0.25 if self.s.multipliers else 1.0)
        last = "narrow_logits" if self.s.narrow else "logits"
        head = self.op("Transpose", table, perm=[1, 0])
        logits = self.op("MatMul", x, head)
        if self.s.head_bias:
            logits = self.op("Add", logits, self.weight(VOCAB))
        self.op("Mul", logits, scale, output=last)
        if self.s.narrow:
            self.op("Cast", last, output="logits", to=TensorProto.FLOAT)

    def save(self, folder: Path) -> Path:
        """Write the model and its configuration, and return the path of the model."""
        self.body()
        i64, f32, batch = TensorProto.INT64, TensorProto.FLOAT, self.s.batch
        info = helper.make_tensor_value_info
        inputs = [
            info("input_ids", i64, [batch, "tokens"]),
            info("attention_mask", i64, [batch, CONTEXT if self.s.whole_mask else "total"]),
            info("position_ids", i64, [batch, "tokens"]),
        ]
        outputs = [info("logits", f32, [batch, "rows", VOCAB])]
        for layer in range(LAYERS):
            for part in ("key", "value"):
                lengths = (CONTEXT, CONTEXT) if self.is_static else ("past", "total")
                shapes = ([batch, KV_HEADS, length, SIZE] for length in lengths)
                past, present = shapes
                inputs.append(info(f"past_key_values.{layer}.{part}", self.element, past))
                outputs.append(info(f"present.{layer}.{part}", self.element, present))
        if self.s.keep_logits:
            inputs.append(info("num_logits_to_keep", i64, []))
        nodes, weights = self.nodes, self.weights
        if self.s.merged:
            inputs.append(info("use_cache_branch", TensorProto.BOOL, [1]))
            nodes = [self._choice(outputs)]
        graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
        opset = (
            24
            if self.s.cache in ("tensor_scatter", "circular")
            else 23
            if self.s.fused != "no"
            else 18
        )
        opsets, ir_version = [helper.make_opsetid("", opset)], 8 if opset == 18 else 11
        model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
        onnx.save(model, folder / "model.onnx")
        config = {"max_position_embeddings": CONTEXT, "eos_token_id": 1}
        (folder / "config.json").write_text(json.dumps(config))
        return folder / "model.onnx"

    def _choice(self, outputs: list[onnx.ValueInfoProto]) -> onnx.NodeProto:
        """An If with the decoder as one branch, and zeros of fitting shape as the other."""
        taken = helper.make_graph(
            self.nodes, "with_past", [], [_copy(v, "inner_") for v in outputs]
        )
        for node in taken.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name in {v.name for v in outputs}:
                        names[index] = f"inner_{name}"
        other_nodes, other_outputs = [], []
        for value in outputs:
            dims = [1 if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
            zeros = numpy_helper.from_array(np.zeros(dims, np.float32))
            name = f"other_{value.name}"
            other_nodes.append(helper.make_node("Constant", [], [name], value=zeros))
            other_outputs.append(_copy(value, "other_"))
        other = helper.make_graph(other_nodes, "no_past", [], other_outputs)
        names = [value.name for value in outputs]
        return helper.make_node(
            "If", ["use_cache_branch"], names, name="choice", then_branch=taken, else_branch=other
        )


def _copy(value: onnx.ValueInfoProto, prefix: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    copy.name = prefix + value.name
    return copy
