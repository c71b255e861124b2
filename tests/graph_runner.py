"""Run a general graph without the runtime: kernels compiled into one library, called from Python.

What it shares with a plan is all that decides values: import, rules, kernels. Grids run in three
parts from the back, so that kernels whose items depend on each other fail.
"""

from __future__ import annotations

import ctypes
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from atsc.codegen.graph.build import tile_units
from atsc.codegen.graph.generated import generated
from atsc.codegen.graph.kernels import Call, header_text
from atsc.codegen.graph.lower import Program, lower
from atsc.codegen.graph.rules import RULES
from atsc.codegen.graph.tensor import Buffer
from atsc.codegen.tail import LEVELS, TailKernel
from atsc.codegen.toolchain import Unit, compile_units, link_library
from atsc.compiler.errors import AtscError, CodegenError, UsageError
from atsc.compiler.importers.onnx.general import general_of_proto

FLAGS = ("-fvisibility=default",)
_ALIGNMENT = 64


class GraphRunner:
    """A compiled model: call it with named arrays."""

    def __init__(self, model: onnx.ModelProto, level: str = "avx2") -> None:
        self._level = level
        graph = general_of_proto(model, lambda domain, op: (domain, op) in RULES)
        self.program: Program = lower(graph, RULES, generated)
        kernels = {call.kernel.name: call.kernel for call in self.program.calls}
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "graph.so"
            link_library(compile_units(_units(list(kernels.values()), level)), library)
            self._library = ctypes.CDLL(str(library))
        self._constants = {
            buffer: _aligned(np.ascontiguousarray(constant.read()))
            for buffer, constant in self.program.constants.items()
        }

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        symbols: dict[str, int] = {}
        arrays = dict(self._constants)
        for buffer in self.program.inputs:
            array = np.asarray(inputs[buffer.name])
            for dim, size in zip(buffer.shape, array.shape, strict=True):
                if dim.constant is None:
                    symbols.setdefault(str(dim), size)
            wanted = tuple(dim.evaluate(symbols) for dim in buffer.shape)
            if array.shape != wanted or not _same_type(array.dtype, buffer.dtype):
                raise UsageError(f"input {buffer.name}: {array.dtype}{array.shape}, not {wanted}")
            arrays[buffer] = _aligned(array)
        for check in self.program.checks:
            left, right = check.left.evaluate(symbols), check.right.evaluate(symbols)
            if left < right or (left > right and not check.is_least):
                raise UsageError(f"{check.what}: {check.left} is {left}, not {right}")
        for call in self.program.calls:
            self._run(call, arrays, symbols)
        return {
            buffer.name: arrays[buffer].view(ml_dtypes.bfloat16)
            if buffer.dtype == "bfloat16"
            else arrays[buffer]
            for buffer in self.program.outputs
        }

    def _run(self, call: Call, arrays: dict[Buffer, np.ndarray], symbols: dict[str, int]) -> None:
        kernel = call.kernel
        for buffer in call.outputs:
            shape = tuple(dim.evaluate(symbols) for dim in buffer.shape)
            arrays.setdefault(buffer, _aligned(np.zeros(shape, _numpy_type(buffer.dtype))))
        values = [dim.evaluate(symbols) for dim in call.symbols]
        named = dict(zip(kernel.symbols, values, strict=True))
        dims = (ctypes.c_int64 * max(1, len(values)))(*values)
        buffers = [arrays[buffer] for buffer in (*call.inputs, *call.outputs)]
        tensors = (ctypes.c_void_p * len(buffers))(*(array.ctypes.data for array in buffers))
        workspace = _aligned(np.zeros(kernel.workspace_bytes.evaluate(named), np.uint8))
        function = self._library[kernel.symbol(self._level)]
        function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
        grid = kernel.grid.evaluate(named)
        edges = sorted({0, grid // 3, grid // 3 * 2, grid})
        for lo, hi in reversed(list(itertools.pairwise(edges))):
            if function(tensors, dims, workspace.ctypes.data, lo, hi) != 0:
                raise RuntimeError(f"{call.node}: an index is out of range")


def compile_model(model: onnx.ModelProto) -> GraphRunner:
    """A model in memory, compiled.

    Raises:
        AtscError: it cannot be compiled.
    """
    return GraphRunner(model)


def _units(kernels: list[TailKernel], level: str) -> list[Unit]:
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[TailKernel]] = {}
    for kernel in kernels:
        key = (kernel.headers or (kernel.name,), kernel.flags, kernel.own_level(level))
        groups.setdefault(key, []).append(kernel)
    units = []
    for (headers, flags, own_level), group in groups.items():
        own = bool(group[0].headers)
        source = "".join(header_text(name) for name in headers) if own else ""
        source += "\n".join(kernel.source for kernel in group)
        unit_flags = (*LEVELS[own_level], *FLAGS, *flags)
        units.append(Unit("graph" if own else group[0].name, source, unit_flags))
    wanted = tuple(f"__{kernel.own_level(level)}" for kernel in kernels if kernel.levels)
    return [*units, *(unit for unit in tile_units(kernels, FLAGS) if unit.name.endswith(wanted))]


def _numpy_type(dtype: str) -> np.dtype:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def _same_type(found: np.dtype, dtype: str) -> bool:
    return found == _numpy_type(dtype) or (dtype == "bfloat16" and found.itemsize == 2)


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 bytes."""
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


__all__ = ["AtscError", "CodegenError", "GraphRunner", "compile_model"]
