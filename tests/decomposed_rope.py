"""Rotary embeddings in many spellings (decomposed.py)."""

from __future__ import annotations

import numpy as np
from decomposed_parts import BIG, SIZE, Parts
from onnx import TensorProto


class Rope(Parts):
    """Positions, angles and turning."""

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
        return str(self.op("Slice", count, start, self.ints(BIG), self.ints(1)))

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

    def rotate(self, x: str, angles: tuple[str, str]) -> str:
        whole, stay = x, ""
        if self.s.rope in ("partial", "chunks", "glm"):
            x, stay = self.slice(whole, 0, SIZE // 2), self.slice(whole, SIZE // 2, BIG)
        if self.s.rope == "chunks":
            return str(self.op("Concat", *self.chunks(x, angles), stay, axis=-1))
        if self.s.rope in ("pairs", "glm", "ernie"):
            second = self.op("Neg", self.slice(x, 1, BIG, 2))
            parts = [
                self.op("Unsqueeze", v, self.ints(-1)) for v in (second, self.slice(x, 0, BIG, 2))
            ]
            turned = self.op("Reshape", self.op("Concat", *parts, axis=-1), self.op("Shape", x))
        else:
            half = (SIZE // 2 if stay else SIZE) // 2
            second = self.op("Neg", self.slice(x, half, BIG))
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
