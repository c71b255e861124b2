"""Attention, its mask and its caches in many spellings (decomposed.py)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from decomposed_parts import CONTEXT, HEADS, HIDDEN, KV_HEADS, SIZE
from decomposed_rope import Rope
from onnx import TensorProto, helper, numpy_helper


class Attention(Rope):
    """From rows to rows: heads, caches, scores, and their mask."""

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

    def heads(self, x: str, count: int, angles: tuple[str, str] | None, normed: bool) -> str:
        """[1, H, M, D] of rows."""
        tokens = self.size_of("input_ids", 1)
        x = self.op("Reshape", x, self.dims(self.size_of("input_ids", 0), tokens, count, SIZE))
        if normed and self.s.qk_norm == "before":
            x = self.norm(x, SIZE)
        if angles and self.s.rope_in_heads_last:
            x = self.rotate(x, angles)
        x = self.op("Transpose", x, perm=[0, 2, 1, 3])
        if normed and self.s.qk_norm in ("each", "crossed"):
            parts = self.op("Split", x, outputs=count, axis=1, num_outputs=count)
            parts = [self.norm(part, SIZE) for part in parts]
            x = self.op("Concat", *parts[:: 1 if self.s.qk_norm == "each" else -1], axis=1)
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
