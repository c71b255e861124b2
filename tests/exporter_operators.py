"""Operators that exporters may write a decoder with, where decomposed.py has others."""

from __future__ import annotations

from typing import Any

import onnx
from decomposed import Decoder
from decomposed_parts import HEADS, HIDDEN, KV_HEADS, SIZE
from onnx import helper, numpy_helper


class Norms(Decoder):
    """RMS norms by other reductions, and norms that are none."""

    kind = ""

    def norm(self, x: str, width: int) -> str:
        weight, eps, axis = self.weight(width, offset=1.0), self.const(1e-5), self.ints(-1)
        square = self.op("Mul", x, x)
        if self.kind in ("length", "unit"):
            if self.kind == "unit":
                y = self.op("LpNormalization", x, axis=-1, p=2)
            else:
                length = self.op("ReduceL2", x, axis)
                y = self.op("Div", x, self.op("Max", length, self.const(1e-12)))
            return str(self.op("Mul", self.op("Mul", y, self.const(width**0.5)), weight))
        if self.kind == "sum":
            mean = self.op("Div", self.op("ReduceSum", square, axis), self.const(float(width)))
        elif self.kind == "sum of squares":
            mean = self.op("Mul", self.op("ReduceSumSquare", x, axis), self.const(1 / width))
        else:
            mean = self.op("ReduceMean", square, axis)
        if self.kind == "eps outside":
            root = self.op("Add", self.op("Sqrt", mean), self.const(1e-3))
            return str(self.op("Mul", self.op("Div", x, root), weight))
        if self.kind == "least eps":
            root = self.op("Sqrt", self.op("Max", mean, eps))
            return str(self.op("Mul", self.op("Div", x, root), weight))
        total = self.op("Add", eps, mean)
        if self.kind == "weight first":
            inverse = self.op("Pow", total, self.const(-0.5))
            return str(self.op("Mul", self.op("Mul", weight, x), inverse))
        return str(self.op("Mul", self.op("Div", x, self.op("Sqrt", total)), weight))


def norms(kind: str) -> type[Norms]:
    """Norms of a kind."""
    return type("Norms", (Norms,), {"kind": kind})


class Repeats(Decoder):
    """Heads of keys and values repeated otherwise."""

    kind = ""

    def repeated(self, x: str) -> str:
        group, total = HEADS // KV_HEADS, self.size_of(x, 2)
        if self.kind == "in turn":  # another model: 0, 1, 0, 1
            return str(self.op("Tile", x, self.ints(1, group, 1, 1)))
        if self.kind == "by index":
            index = self.ints(*[head // group for head in range(HEADS)])
            return str(self.op("Gather", x, index, axis=1))
        if self.kind == "one by one":
            parts = self.op("Split", x, outputs=KV_HEADS, axis=1, num_outputs=KV_HEADS)
            return str(self.op("Concat", *[p for p in parts for _ in range(group)], axis=1))
        wide = self.op("Unsqueeze", self.op("Transpose", x, perm=[0, 2, 1, 3]), self.ints(3))
        wide = self.op("Expand", wide, self.dims(1, total, KV_HEADS, group, SIZE))
        wide = self.op("Reshape", wide, self.dims(1, total, HEADS, SIZE))
        return str(self.op("Transpose", wide, perm=[0, 2, 1, 3]))


def repeats(kind: str) -> type[Repeats]:
    """Repeated heads of a kind."""
    return type("Repeats", (Repeats,), {"kind": kind})


class Einsums(Decoder):
    """Every product by its letters, with heads in the matrices, as JAX has them."""

    def attention(self, layer: int, x: str, mask: str, angles: tuple[str, str] | None) -> str:
        assert angles is not None
        q = self.op("Einsum", x, self.weight(HIDDEN, HEADS, SIZE), equation="bmk,khd->bmhd")
        k = self.op("Einsum", x, self.weight(KV_HEADS, SIZE, HIDDEN), equation="bmk,hdk->bmhd")
        v = self.op("Einsum", x, self.weight(HIDDEN, KV_HEADS, SIZE), equation="bmk,khd->bmhd")
        q, k, v = (self.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v))
        q, k = self.rotate(q, angles), self.rotate(k, angles)
        k = self.joined(f"past_key_values.{layer}.key", k, f"present.{layer}.key")
        v = self.joined(f"past_key_values.{layer}.value", v, f"present.{layer}.value")
        k, v = self.repeated(k), self.repeated(v)
        scores = self.op("Einsum", q, k, equation="bhmd,bhtd->bhmt")
        scores = self.op("Add", self.op("Mul", scores, self.const(SIZE**-0.5)), mask)
        mixed = self.op(
            "Einsum", self.op("Softmax", scores, axis=-1), v, equation="bhmt,bhtd->bmhd"
        )
        out = self.weight(HEADS, SIZE, HIDDEN)
        return str(self.op("Einsum", mixed, out, equation="bmhd,hdk->bmk"))

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        return str(self.op("Einsum", x, self.weight(outputs, inputs), equation="bmk,nk->bmn"))


class BatchedMatrices(Decoder):
    """Matrices with a batch axis of their own."""

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        matrix = self.op("Unsqueeze", self.weight(inputs, outputs), self.ints(0))
        return str(self.op("MatMul", x, matrix))


class SpelledSilu(Decoder):
    """x / (1 + exp(-x))."""

    def activation(self, x: str) -> str:
        below = self.op("Add", self.op("Exp", self.op("Neg", x)), self.const(1.0))
        return str(self.op("Div", x, below))


class Functions(Decoder):
    """Norms as calls of a function of the model; `with_function` adds it."""

    def norm(self, x: str, width: int) -> str:
        name = f"norm_{len(self.nodes)}"
        inputs = [x, self.weight(width, offset=1.0)]
        node = helper.make_node("RmsNorm", inputs, [name], domain="local", name=f"{name}/call")
        self.nodes.append(node)
        return name


def with_function(model: onnx.ModelProto) -> None:
    """The function that `Functions` calls."""
    make = helper.make_node
    body = [
        make("Constant", [], ["two"], value_float=2.0),
        make("Constant", [], ["eps"], value_float=1e-5),
        make("Constant", [], ["axis"], value_ints=[-1]),
        make("Pow", ["x", "two"], ["square"]),
        make("ReduceMean", ["square", "axis"], ["mean"]),
        make("Add", ["mean", "eps"], ["sum"]),
        make("Sqrt", ["sum"], ["root"]),
        make("Div", ["x", "root"], ["divided"]),
        make("Mul", ["w", "divided"], ["y"]),
    ]
    opsets = [helper.make_opsetid("", 18)]
    model.functions.append(
        helper.make_function("local", "RmsNorm", ["x", "w"], ["y"], body, opsets)
    )
    model.opset_import.append(helper.make_opsetid("local", 1))


class Sinks(Decoder):
    """A column beside the scores takes a share of every row, and is left out then."""

    def op(self, kind: str, *inputs: str, **attrs: Any) -> Any:
        if kind != "Softmax":
            return super().op(kind, *inputs, **attrs)
        shape = self.dims(1, HEADS, self.size_of("input_ids", 1), 1)
        column = self.op("Reshape", self.weight(HEADS), self.ints(1, HEADS, 1, 1))
        both = self.op("Concat", inputs[0], self.op("Expand", column, shape), axis=-1)
        return self.slice(super().op("Softmax", both, axis=-1), 0, -1)


class OldOpset(Decoder):
    """Axes and sizes as attributes, which they were up to opset 12; `with_opset_12` says so."""

    def op(self, kind: str, *inputs: str, **attrs: Any) -> Any:
        attrs.pop("num_outputs", None)
        names = {"Unsqueeze": "axes", "Squeeze": "axes", "ReduceMean": "axes", "Split": "split"}
        if kind in names and len(inputs) > 1:
            (maker,) = (node for node in self.nodes if inputs[1] in node.output)
            attrs[names[kind]] = numpy_helper.to_array(maker.attribute[0].t).reshape(-1).tolist()
            inputs = inputs[:1]
        return super().op(kind, *inputs, **attrs)


def with_opset_12(model: onnx.ModelProto) -> None:
    """As old exporters declare it."""
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 12))
    model.ir_version = 7
