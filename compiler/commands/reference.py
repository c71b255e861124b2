"""The reference that `atsc verify` compares with: onnxruntime on the CPU, in float arithmetic.

The graph runs as it is, but for products that round activations, which is an approximation and
no reference: MatMulNBits gets accuracy_level 1, also where onnxruntime makes it of
DequantizeLinear, and what quantize_dynamic wrote multiplies floats (dynamic_products.py). The one
form of MatMulNBits that has no kernel there is written in other terms (float_zero_points.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from atsc.compiler.commands.dynamic_products import use_exact_activations
from atsc.compiler.commands.float_zero_points import round_float_zero_points
from atsc.compiler.errors import ModelError
from atsc.compiler.ir import Graph

F32Array = NDArray[np.float32]

_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"
_LEVEL_OPTION = "session.qdq_matmulnbits_accuracy_level"
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Reference:
    """A model in onnxruntime, with its KV cache.

    Args:
        path: the .onnx file; its external data is read in place.
        graph: the same model as our importer reads it, for the shapes of the caches, which the file
            may leave open.
        num_threads: as many as the plan uses.

    Raises:
        ModelError: onnxruntime cannot load it.
    """

    def __init__(self, path: Path, graph: Graph, num_threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if num_threads:
            options.intra_op_num_threads = num_threads
        options.add_session_config_entry(_FOLDER_OPTION, str(path.parent.resolve()))
        options.add_session_config_entry(_LEVEL_OPTION, "1")
        model, self.forced_levels, capacities = _exact_model(path)
        try:
            self._session = onnxruntime.InferenceSession(
                model, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"{path}: onnxruntime cannot load it ({reason})") from error
        self._caches = _empty_caches(self._session.get_inputs(), graph, path, capacities)
        self._outputs = [output.name for output in self._session.get_outputs()]
        (logits,) = (out for out in self._session.get_outputs() if not _cache_slot(out.name))
        self._has_last_row_alone = logits.shape[1] == 1
        self._position = 0

    def forward(self, ids: NDArray[np.int64]) -> F32Array:
        """Logits [M, vocabulary] of the next M tokens.

        Raises:
            ModelError: onnxruntime cannot run it.
        """
        if self._has_last_row_alone:
            return np.concatenate([self._round(ids[i : i + 1]) for i in range(len(ids))])
        return self._round(ids)

    def _round(self, ids: NDArray[np.int64]) -> F32Array:
        end = self._position + len(ids)
        known = {
            "input_ids": ids[None].astype(np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self._position, end, dtype=np.int64)[None],
        }
        names = {value.name for value in self._session.get_inputs()}
        feeds = {name: array for name, array in known.items() if name in names}
        try:
            found = self._session.run(None, {**feeds, **self._caches})
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"the model cannot be run by onnxruntime ({reason})") from error
        outputs = dict(zip(self._outputs, found, strict=True))
        slots = {_cache_slot(name): name for name in self._outputs if _cache_slot(name)}
        self._caches = {name: outputs[slots[_cache_slot(name)]] for name in self._caches}
        self._position = end
        logits: F32Array = outputs["logits"][0].astype(np.float32)
        return logits


def _exact_model(path: Path) -> tuple[bytes, frozenset[int], dict[str, int]]:
    """The graph without its external data, the accuracy levels that it asks for itself, and the
    tokens that its preallocated caches hold.
    """
    model = onnx.load(path, load_external_data=False)
    levels = set()
    capacities = _capacities(model.graph)
    for node in _all_nodes(model.graph):
        if node.op_type == "DequantizeLinear":
            levels.add(0)
        if node.op_type != "MatMulNBits":
            continue
        given = [attr for attr in node.attribute if attr.name == "accuracy_level"]
        levels.add(given[0].i if given else 0)
        for attr in given:
            node.attribute.remove(attr)
        node.attribute.append(onnx.helper.make_attribute("accuracy_level", 1))
    if use_exact_activations(model.graph):
        levels.add(4)
    round_float_zero_points(model.graph, path.parent.resolve())
    return model.SerializeToString(), frozenset(levels), capacities


def _capacities(graph: onnx.GraphProto) -> dict[str, int]:
    """Input -> tokens, of the caches that are buffers of one window (sliding_window_cache)."""
    found: dict[str, int] = {}
    for node in graph.node:
        attrs = {attr.name: attr.i for attr in node.attribute}
        if attrs.get("sliding_window_cache"):
            found |= dict.fromkeys(node.input[3:5], attrs["local_window_size"])
    return found


def _all_nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.GRAPH:
                yield from _all_nodes(attr.g)


def _cache_slot(name: str) -> tuple[int, str] | None:
    """Layer number, and `key` or `value`: `past_key_values.3.key`, `present.3.key`."""
    match = re.search(r"\.(\d+)\..*\b(key|value)$", name)
    return (int(match[1]), match[2]) if match else None


def _empty_caches(
    inputs: Iterable[Any], graph: Graph, path: Path, capacities: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    shapes = {
        int(str(node.attrs["layer"])): (int(str(node.attrs["kv_heads"])), node.attrs["head_size"])
        for node in graph.attention_nodes()
    }
    caches: dict[str, NDArray[Any]] = {}
    for value in inputs:
        slot = _cache_slot(value.name)
        if slot is None:
            continue
        if slot[0] not in shapes or value.type not in _DTYPES:
            raise ModelError(f"{path}: input {value.name} ({value.type}) is no cache that we know")
        heads, size = shapes[slot[0]]
        shape = 1, heads, capacities.get(value.name, 0), int(str(size))
        caches[value.name] = np.zeros(shape, _DTYPES[value.type])
    return caches
