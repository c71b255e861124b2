"""Small random decoders as exporters of plain ONNX operators write them, in many spellings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from decomposed_attention import Attention
from decomposed_parts import BIG, CONTEXT, HIDDEN, INNER, KV_HEADS, LAYERS, SIZE, VOCAB
from onnx import TensorProto, helper, numpy_helper


class Decoder(Attention):
    """Builds the model of one spelling."""

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
            x = self.op("Slice", x, start, self.ints(BIG), self.ints(1))
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
