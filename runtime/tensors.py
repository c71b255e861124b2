"""Named numpy arrays into a plan of a general graph and out of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import UsageError
from atsc.compiler.plan import GraphModel, GraphTensor
from atsc.runtime import capi

_ALIGNMENT = 64
_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9,
    "float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip
"""Element type -> TensorProto.DataType of ONNX."""


def run(
    call: Callable[..., None],
    handle: capi.Handle,
    graph: GraphModel,
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | None,
) -> dict[str, NDArray[Any]]:
    """Run a plan.

    Args:
        call: of the plan's C interface.
        handle: the plan.
        graph: its inputs and outputs.
        inputs: an array for each input; bf16 as uint16 bit patterns (or ml_dtypes.bfloat16).
        outputs: the names wanted; None takes all.

    Returns:
        Arrays of the outputs' types; bf16 as uint16 bit patterns.

    Raises:
        UsageError: what does not fit.
    """
    made = {tensor.name: tensor for tensor in graph.outputs}
    wanted = list(made) if outputs is None else list(dict.fromkeys(outputs))
    for name in wanted:
        if name not in made:
            raise UsageError(f"no output is called {name}: the model has {', '.join(made)}")
    arrays = _check_inputs(graph, inputs)
    given = (capi.Tensor * len(arrays))(*(_given(name, *pair) for name, pair in arrays.items()))
    asked = (capi.Tensor * len(wanted))(*(capi.Tensor(name=name.encode()) for name in wanted))
    call("plan_run", handle, given, len(given), asked, len(asked))
    results: dict[str, NDArray[Any]] = {}
    for name, tensor in zip(wanted, asked, strict=True):
        dtype = np.dtype(_numpy_name(made[name]))
        results[name] = array = _aligned_empty(tuple(tensor.shape[: tensor.rank]), dtype)
        tensor.data, tensor.bytes = array.ctypes.data, array.nbytes
    call("plan_run", handle, given, len(given), asked, len(asked))
    return results


def _check_inputs(
    graph: GraphModel, inputs: Mapping[str, Any]
) -> dict[str, tuple[NDArray[Any], int]]:
    """Contiguous arrays of the types wanted, with the numbers of those; sizes are the runtime's."""
    wanted = {tensor.name: tensor for tensor in graph.inputs}
    for name in inputs:
        if name not in wanted:
            raise UsageError(f"no input is called {name}: the model takes {', '.join(wanted)}")
    arrays = {}
    for name, tensor in wanted.items():
        if name not in inputs:
            raise UsageError(f"input {name} is missing: the model takes {', '.join(wanted)}")
        array = np.asarray(inputs[name])
        fits = {tensor.dtype, _numpy_name(tensor)}
        if array.dtype.name not in fits:
            raise UsageError(
                f"input {name} has elements of type {array.dtype.name}, expected {tensor.dtype}: "
                f"pass {name}.astype({_numpy_name(tensor)!r})"
            )
        if array.ndim != len(tensor.shape):
            raise UsageError(
                f"input {name} has shape {list(array.shape)}, expected {len(tensor.shape)} "
                f"dimensions [{', '.join(tensor.shape)}]"
            )
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        arrays[name] = np.ascontiguousarray(native).reshape(array.shape), _TYPES[tensor.dtype]
    return arrays


def _numpy_name(tensor: GraphTensor) -> str:
    return "uint16" if tensor.dtype == "bfloat16" else tensor.dtype


def _given(name: str, array: NDArray[Any], number: int) -> capi.Tensor:
    shape = (ctypes.c_int64 * capi.MAX_RANK)(*array.shape)
    return capi.Tensor(
        name=name.encode(),
        type=number,
        rank=array.ndim,
        shape=shape,
        data=array.ctypes.data,
        bytes=array.nbytes,
    )


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array that begins where kernels want it; others are copied."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + count].view(dtype).reshape(shape)
