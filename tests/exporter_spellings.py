"""More ways to write a decoder than decomposed.py has, a class for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from decomposed import Decoder
from decomposed_logits import IDS, PROMPT
from decomposed_parts import CONTEXT, HIDDEN, SIZE, VOCAB
from onnx import TensorProto, helper, numpy_helper

Change = Callable[[onnx.ModelProto], None]
TYPES = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def run(path: Path, kinds: Mapping[str, str]) -> np.ndarray:
    """Logits by onnxruntime: a prefill, then single steps. The first output is the logits, and the
    caches come in the order in which they go in.

    Args:
        path: the model.
        kinds: what inputs that are no caches are: ids, mask, positions, places, past or zeros.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # It makes MatMulNBits of DequantizeLinear, which would round activations by default.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    caches = {
        value.name: np.zeros([d if isinstance(d, int) else 0 for d in (1, *value.shape[1:])], "f4")
        for value in inputs
        if value.name not in kinds
    }
    rows, position = [], 0
    for count in (PROMPT, *[1] * (len(IDS) - PROMPT)):
        total = position + count
        known = {
            "ids": IDS[None, position:total],
            "mask": np.ones((1, total)),
            "positions": np.arange(position, total)[None],
            "places": np.arange(position, total),
            "past": np.array(position),
            "zeros": np.zeros((1, count)),
        }
        feeds = {
            value.name: known[kinds[value.name]]
            .astype(TYPES[value.type])
            .reshape(
                [1] * len(value.shape)
                if kinds[value.name] == "past"
                else known[kinds[value.name]].shape
            )
            for value in inputs
            if value.name in kinds
        }
        logits, *present = session.run(None, feeds | caches)
        rows.append(logits.reshape(-1, logits.shape[-1]))
        caches = dict(zip(caches, present, strict=True))
        position = total
    return np.concatenate(rows)


def retyped(name: str, element: int, shape: Sequence[int | str], new_name: str = "") -> Change:
    """Another type, shape and name of an input."""

    def change(model: onnx.ModelProto) -> None:
        (value,) = (v for v in model.graph.input if v.name == name)
        value.CopyFrom(helper.make_tensor_value_info(new_name or name, element, shape))
        renamed({name: new_name or name})(model)

    return change


def renamed(names: Mapping[str, str]) -> Change:
    """Other names of inputs and outputs; what begins with one of the keys is renamed."""

    def new(name: str) -> str:
        for old, other in names.items():
            if name.startswith(old):
                return other + name.removeprefix(old)
        return name

    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            value.name = new(value.name)
        for node in model.graph.node:
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]

    return change


def moved_axes(order: Sequence[int], part: str = "") -> Change:
    """Caches in another order of axes; `part` says that keys alone are."""

    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if "." in value.name and value.name.endswith(part):
                dims = value.type.tensor_type.shape.dim
                old = [
                    onnx.TensorShapeProto.Dimension.FromString(d.SerializeToString()) for d in dims
                ]
                for dim, axis in zip(dims, order, strict=True):
                    dim.CopyFrom(old[axis])

    return change


def with_opsets(model: onnx.ModelProto) -> None:
    """Operators of opset 21, and of onnxruntime's own domain."""
    del model.opset_import[:]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model.opset_import.extend(opsets)
    model.ir_version = 10


def with_input(name: str, shape: Sequence[int | str]) -> Change:
    """One more input, which nothing reads unless the decoder itself does."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))

    return change


class FloatPositions(Decoder):
    """Positions are floats as they come."""

    def angles(self) -> tuple[str, str]:
        frequencies = 100.0 ** (-np.arange(0, SIZE, 2) / SIZE)
        column = self.op("Unsqueeze", "position_ids", self.ints(2))
        angle = self.op("Mul", column, self.const(frequencies))
        angle = self.op("Concat", angle, angle, axis=-1)
        cos, sin = (self.op("Unsqueeze", self.op(f, angle), self.ints(1)) for f in ("Cos", "Sin"))
        return cos, sin


class Places(Decoder):
    """Positions of one axis."""

    def position_ids(self) -> str:
        return str(self.op("Unsqueeze", "cache_position", self.ints(0)))


class CountedFromPast(Decoder):
    """Positions counted from the number of tokens in the caches."""

    def position_ids(self) -> str:
        count, one = self.size_of("input_ids", 1), self.const(1, np.int64)
        places = self.op("Range", self.const(0, np.int64), count, one)
        return str(self.op("Unsqueeze", self.op("Add", places, "start_pos"), self.ints(0)))


class TokensOutside(Decoder):
    """Caches of [B, T, H, D]."""

    def joined(self, past: str, new: str, present: str) -> str:
        new = self.op("Transpose", new, perm=[0, 2, 1, 3])
        whole = self.op("Concat", past, new, axis=1, output=present)
        return str(self.op("Transpose", whole, perm=[0, 2, 1, 3]))


class TurnedKeys(Decoder):
    """Keys in caches of [B, H, D, T]."""

    def joined(self, past: str, new: str, present: str) -> str:
        if past.endswith("value"):
            return super().joined(past, new, present)
        new = self.op("Transpose", new, perm=[0, 1, 3, 2])
        whole = self.op("Concat", past, new, axis=3, output=present)
        return str(self.op("Transpose", whole, perm=[0, 1, 3, 2]))


class MaskTable(Decoder):
    """A table of masks, cut to the rows and columns of the round."""

    def mask(self) -> str:
        total = self.op("Unsqueeze", self.size_of("attention_mask", 1), self.ints(0))
        past = self.op(
            "Sub", total, self.op("Unsqueeze", self.size_of("input_ids", 1), self.ints(0))
        )
        seen = np.tril(np.ones((1, 1, CONTEXT, CONTEXT), bool))
        self.weights.append(numpy_helper.from_array(np.where(seen, 0, -1e9).astype("f4"), "masks"))
        rows = self.op("Slice", "masks", past, total, self.ints(2))
        return str(self.op("Slice", rows, self.ints(0), total, self.ints(3)))


class AngleTables(Decoder):
    """Angles of half floats gathered by position."""

    def angles(self) -> tuple[str, str]:
        angle = np.outer(np.arange(CONTEXT), 100.0 ** (-np.arange(0, SIZE, 2) / SIZE))
        parts = []
        for name, table in (("cos", np.cos(angle)), ("sin", np.sin(angle))):
            whole = np.concatenate([table, table], 1).astype(np.float16)
            self.weights.append(numpy_helper.from_array(whole, name))
            rows = self.op("Gather", name, "position_ids", axis=0)
            wide = self.op("Cast", rows, to=TensorProto.FLOAT)
            parts.append(str(self.op("Unsqueeze", wide, self.ints(1))))
        return parts[0], parts[1]


class TurnedTable(Decoder):
    """The head is the table of half floats, transposed and then cast."""

    table = ""

    def op(self, kind: str, *inputs: str, **attrs: Any) -> Any:
        if kind == "Transpose" and inputs[0] == self.table:
            half = super().op("Transpose", "half", perm=[1, 0])
            return super().op("Cast", half, to=TensorProto.FLOAT)
        return super().op(kind, *inputs, **attrs)

    def weight(self, *shape: int, scale: float = 0.2, offset: float = 0.0) -> str:
        if self.table or len(shape) != 2:
            return super().weight(*shape, scale=scale, offset=offset)
        array = (scale * self.rng.standard_normal(shape)).astype(np.float16)
        self.weights.append(numpy_helper.from_array(array, "half"))
        self.table = str(self.op("Cast", "half", to=TensorProto.FLOAT))
        return self.table


class ColumnsOfCodes(Decoder):
    """The table is one of int4 columns, from which rows are gathered, and which the head reads."""

    table = ""

    def op(self, kind: str, *inputs: str, **attrs: Any) -> Any:
        if kind == "Gather" and inputs[1] == "input_ids":
            self.table = inputs[0]
            codes = self.rng.integers(0, 256, HIDDEN * VOCAB // 2, np.uint8).tobytes()
            shape = (HIDDEN, VOCAB)
            self.weights.append(
                helper.make_tensor("codes", TensorProto.INT4, shape, codes, raw=True)
            )
            scales = self.rng.uniform(0.05, 0.15, (HIDDEN // 16, VOCAB)).astype(np.float32)
            self.weights.append(numpy_helper.from_array(scales, "scales"))
            columns = super().op(
                "GatherBlockQuantized", "codes", "input_ids", "scales",
                domain="com.microsoft", block_size=16, gather_axis=1, quantize_axis=0,
            )  # fmt: skip
            return super().op("Transpose", columns, perm=[1, 2, 0])
        if kind == "Transpose" and inputs[0] == self.table:
            return super().op("DequantizeLinear", "codes", "scales", axis=0, block_size=16)
        return super().op(kind, *inputs, **attrs)


class TypedTokens(Decoder):
    """Rows of a second table are added by type of token."""

    def op(self, kind: str, *inputs: str, **attrs: Any) -> Any:
        made = super().op(kind, *inputs, **attrs)
        if kind == "Gather" and inputs[1] == "input_ids":
            types = super().op("Gather", self.weight(2, HIDDEN), "token_type_ids", axis=0)
            made = super().op("Add", made, types)
        return made


class CallersMask(Decoder):
    """The mask is an input as attention adds it."""

    def mask(self) -> str:
        return "attention_mask"


class CallersAngles(Decoder):
    """cos and sin are inputs."""

    def angles(self) -> tuple[str, str]:
        return "rope_cos", "rope_sin"
