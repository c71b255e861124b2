"""Tiny decoders in ONNX for tests: ids -> Gather -> the nodes under test -> logits.

The same file runs in onnxruntime and is imported by us, so that both read the same bytes and the
same attributes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from interpreter import Interpreter
from numpy.typing import NDArray
from onnx import TensorProto, helper

from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.ir import Graph

MICROSOFT = "com.microsoft"
Array = NDArray[Any]


class MiniDecoder:
    """Collects nodes and initializers; `x` [B, M, W] is the first value, `logits` the last."""

    def __init__(self, table: Array, opset: int = 22) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "M"])]
        self.element = helper.np_dtype_to_tensor_dtype(table.dtype)
        self.outputs = [helper.make_tensor_value_info("logits", self.element, ["B", "M", "V"])]
        self.opset = opset
        self.num_rows = len(table)
        self.constant("table", table)
        self.node("Gather", ["table", "input_ids"], ["x"])

    def constant(
        self,
        name: str,
        array: Array,
        element: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> str:
        """An initializer; for element types that numpy lacks, `array` holds its bytes."""
        array = np.ascontiguousarray(array)
        element = element or helper.np_dtype_to_tensor_dtype(array.dtype)
        made = helper.make_tensor(name, element, shape or array.shape, array.tobytes(), raw=True)
        self.initializers.append(made)
        return name

    def node(
        self,
        op: str,
        inputs: list[str],
        outputs: list[str],
        domain: str = "",
        name: str = "",
        **attrs: Any,
    ) -> str:
        """A node named after its operator unless told otherwise; returns its first output."""
        made = helper.make_node(op, inputs, outputs, name=name or f"the_{op}", domain=domain)
        made.attribute.extend(
            helper.make_attribute(key, value) for key, value in attrs.items() if value is not None
        )
        self.nodes.append(made)
        return outputs[0]

    def lengths(self, column: bool = False) -> tuple[str, str]:
        """seqlens_k and total_sequence_length from attention_mask, as the builder spells them."""
        self.inputs.append(
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["B", "T"])
        )
        self.constant("one", np.array([1], np.int64))
        self.constant("index", np.array(1, np.int64))
        self.node("ReduceSum", ["attention_mask", "one"], ["sum"], keepdims=int(column))
        self.node("Sub", ["sum", "one"], ["last"])
        self.node("Cast", ["last"], ["seqlens"], name="cast_seqlens", to=TensorProto.INT32)
        self.node("Shape", ["attention_mask"], ["mask_shape"])
        self.node("Gather", ["mask_shape", "index"], ["width"], name="gather_width", axis=0)
        self.node("Cast", ["width"], ["total"], name="cast_total", to=TensorProto.INT32)
        return "seqlens", "total"

    def cache(self, layer: int, kv_heads: int, head_size: int) -> tuple[list[str], list[str]]:
        """The past inputs and present outputs of a layer."""
        names: list[list[str]] = []
        for prefix, infos in (("past_key_values", self.inputs), ("present", self.outputs)):
            names.append([f"{prefix}.{layer}.{part}" for part in ("key", "value")])
            for name in names[-1]:
                shape = ["B", kv_heads, f"{prefix}_length", head_size]
                infos.append(helper.make_tensor_value_info(name, self.element, shape))
        return names[0], names[1]

    def model(self) -> onnx.ModelProto:
        """What was collected."""
        graph = helper.make_graph(
            self.nodes, "decoder", self.inputs, self.outputs, self.initializers
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def save(self, folder: Path, *, external: bool = False) -> Path:
        """Write the model and its genai_config.json."""
        path = folder / "model.onnx"
        onnx.save(
            self.model(),
            path,
            save_as_external_data=external,
            location="model.onnx.data",
            size_threshold=0,
        )
        config = {"model": {"context_length": 128, "decoder": {"filename": "model.onnx"}}}
        (folder / "genai_config.json").write_text(json.dumps(config))
        return path

    def imported(self, accuracy_level: int | None = None) -> Graph:
        """The canonical graph; all constants are inline, so the file may vanish."""
        with tempfile.TemporaryDirectory() as folder:
            return import_onnx(self.save(Path(folder)), accuracy_level=accuracy_level)

    def ours(self, rounds: list[Array]) -> Array:
        """Logits by our references, one round after the other over the same caches."""
        interpreter = Interpreter(self.imported())
        return np.concatenate([interpreter.round(ids) for ids in rounds])

    def onnxruntime(self, rounds: list[Array]) -> Array:
        """The same by onnxruntime."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        # It makes MatMulNBits of DequantizeLinear, which would round activations by default.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(self.model().SerializeToString(), options)
        dtype = helper.tensor_dtype_to_np_dtype(self.element)
        past = {
            value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), dtype)
            for value in session.get_inputs()
            if value.name.startswith("past")
        }
        rows, position = [], 0
        for ids in rounds:
            feeds: dict[str, Array] = {"input_ids": ids[None].astype(np.int64), **past}
            names = {value.name for value in session.get_inputs()}
            if "attention_mask" in names:
                feeds["attention_mask"] = np.ones((1, position + len(ids)), np.int64)
            if "position_ids" in names:
                feeds["position_ids"] = np.arange(position, position + len(ids))[None]
            logits, *present = session.run(None, feeds)
            past = dict(zip(past, present, strict=True))
            rows.append(np.asarray(logits)[0].astype(np.float32))
            position += len(ids)
        return np.concatenate(rows)

    def assert_agrees(self, rounds: list[Array] | None = None, tolerance: float = 2e-6) -> None:
        """Our logits are onnxruntime's, within a relative L2 error."""
        rounds = rounds or [np.arange(self.num_rows)]
        theirs, ours = self.onnxruntime(rounds), self.ours(rounds)
        assert ours.shape == theirs.shape
        assert np.isfinite(ours).all()
        error = np.linalg.norm(ours - theirs) / max(float(np.linalg.norm(theirs)), 1e-30)
        assert error <= tolerance, f"relative L2 error {error:.3g}"
