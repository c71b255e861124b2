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
from atsc.compiler.importers.onnx.inputs import ModelInput, input_kinds
from atsc.compiler.importers.onnx.model_file import CONFIG_NAME, read_json
from atsc.compiler.ir import Graph

F32Array = NDArray[np.float32]

_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"
_LEVEL_OPTION = "session.qdq_matmulnbits_accuracy_level"
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


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
        inputs = self._session.get_inputs()
        config = read_json(path.parent / CONFIG_NAME).get("model", {})
        self._kinds = input_kinds([_described(value) for value in inputs], config)
        pasts = [value for value in inputs if self._kinds.get(value.name) == "past"]
        self._given = [value for value in inputs if value not in pasts]
        self._caches = _empty_caches(pasts, graph, path, capacities)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._logits, self._presents = _outputs(self._session.get_outputs(), list(self._caches))
        (shape,) = (o.shape for o in self._session.get_outputs() if o.name == self._logits)
        self._has_last_row_alone = len(shape) == 2 or list(shape[1:2]) == [1]
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
        feeds = {value.name: self._input(value, ids) for value in self._given}
        try:
            found = self._session.run(None, {**feeds, **self._caches})
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"the model cannot be run by onnxruntime ({reason})") from error
        outputs = dict(zip(self._outputs, found, strict=True))
        self._caches = {name: outputs[present] for name, present in self._presents.items()}
        self._position += len(ids)
        logits: F32Array = outputs[self._logits].astype(np.float32)
        return logits.reshape(-1, logits.shape[-1])

    def _input(self, value: Any, ids: NDArray[np.int64]) -> NDArray[Any]:
        """An input that is no cache, for the tokens that come now."""
        begin, end = self._position, self._position + len(ids)
        width = value.shape[1] if len(value.shape) == 2 and isinstance(value.shape[1], int) else end
        arrays = {
            "ids": ids[None],
            "mask": (np.arange(width) < end)[None],
            "positions": np.arange(begin, end)[None],
            "places": np.arange(begin, end),
            "past_length": np.full([1] * len(value.shape), begin),
        }
        # Flags that are numbers say how many rows of logits are wanted; the rest is not read.
        unread = np.full([d if isinstance(d, int) else 1 for d in value.shape], len(ids))
        return arrays.get(self._kinds.get(value.name, ""), unread).astype(_DTYPES[value.type])


def _described(value: Any) -> ModelInput:
    dims = [d if isinstance(d, int) else None for d in value.shape]
    return ModelInput(value.name, dims, "int" in value.type)


def _outputs(outputs: Iterable[Any], pasts: list[str]) -> tuple[str, dict[str, str]]:
    """The name of the logits, and of what each cache becomes: by layer and part where names tell
    these, in order otherwise.
    """
    names = [(o.name, bool(_cache_slot(o.name)) or len(o.shape) == 4) for o in outputs]
    presents = [name for name, is_cache in names if is_cache]
    (logits,) = (name for name, is_cache in names if not is_cache)
    slots = {_cache_slot(name): name for name in presents}
    if None in slots or any(_cache_slot(name) not in slots for name in pasts):
        return logits, dict(zip(pasts, presents, strict=True))
    return logits, {name: slots[_cache_slot(name)] for name in pasts}


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
    """A size that a file leaves open is 0 where it is the only one, and the graph's otherwise."""
    shapes = {
        int(str(node.attrs["layer"])): (int(str(node.attrs["kv_heads"])), node.attrs["head_size"])
        for node in graph.attention_nodes()
    }
    caches: dict[str, NDArray[Any]] = {}
    for value in inputs:
        sizes = [d if isinstance(d, int) else None for d in value.shape]
        capacity, slot = capacities.get(value.name, 0), _cache_slot(value.name)
        known = sizes[1:].count(None) < 2
        if value.type not in _DTYPES or not (known or (slot and slot[0] in shapes)):
            raise ModelError(f"{path}: input {value.name} ({value.type}) is no cache that we know")
        if known:
            shape = [1, *(capacity if d is None else d for d in sizes[1:])]
        else:
            assert slot is not None
            heads, size = shapes[slot[0]]
            shape = [1, heads, capacity, int(str(size))]
        caches[value.name] = np.zeros(shape, _DTYPES[value.type])
    return caches
