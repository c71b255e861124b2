"""Collects the nodes of an ONNX graph and streams its initializers to a file of external data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

from atsc.compiler.importers.onnx.decoder import Array, Linear, Matrix
from atsc.compiler.ir import DType, FloatFormat, Format

Progress = Callable[[str, int, int], None]

_ALIGNMENT_BYTES = 64
_FLOAT_TYPES = {
    DType.F32: TensorProto.FLOAT,
    DType.F16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
}


class GraphWriter:
    """Nodes and initializers so far; initializers are streamed to the weights' file at once."""

    def __init__(
        self,
        stream: BinaryIO,
        data_name: str,
        accuracy_level: int,
        total_bytes: int,
        progress: Progress | None,
    ) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._constants: set[str] = set()
        self._stream = stream
        self._data_name = data_name
        self._accuracy_level = accuracy_level
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str] | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> str:
        """Append a node and return its first output, `NAME/output_0` unless given."""
        outputs = outputs or [f"{name}/output_0"]
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def constant(self, value: int | list[int]) -> str:
        """An int64 constant, made once."""
        name = f"/model/constants/INT64/{value}"
        if name not in self._constants:
            self._constants.add(name)
            array = np.array(value, np.int64)
            tensor = helper.make_tensor("", TensorProto.INT64, array.shape, array.flatten())
            self.node("Constant", [], f"/model/constant_nodes/INT64/{value}", [name], value=tensor)
        return name

    def floats(self, name: str, array: Array) -> str:
        """A float32 initializer."""
        return self.stream(name, TensorProto.FLOAT, array.shape, [np.asarray(array, np.float32)])

    def stream(self, name: str, dtype: int, shape: Sequence[int], chunks: Iterable[Array]) -> str:
        """An initializer whose bytes arrive in pieces."""
        self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT_BYTES))
        offset = self._stream.tell()
        for chunk in chunks:
            self._stream.write(np.ascontiguousarray(chunk).data.cast("B"))
        length = self._stream.tell() - offset
        expected = math.prod(shape) * helper.tensor_dtype_to_np_dtype(dtype).itemsize
        assert length == expected, f"{name}: {length} bytes for shape {tuple(shape)}"
        tensor = TensorProto(
            name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL
        )
        facts = {"location": self._data_name, "offset": str(offset), "length": str(length)}
        for key, value in facts.items():
            tensor.external_data.add(key=key, value=value)
        self.initializers.append(tensor)
        return name

    def matrix(
        self,
        stem: str,
        matrices: Sequence[Matrix],
        *,
        codes_shape: Sequence[int] | None = None,
        suffixes: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Initializers for the parts of matrices of one format, stacked along N.

        Returns the names, in the order that MatMulNBits takes them.
        """
        first = matrices[0]
        names = []
        for part in first.parts:
            shape = list(first.part_shape(part))
            shape[len(first.shape) - 2] = sum(matrix.shape[-2] for matrix in matrices)
            if part == "codes" and codes_shape is not None:
                shape = list(codes_shape)
            suffix = (suffixes or _suffixes(first.format))[part]
            dtype = _part_type(first.format, part)
            chunks = chain.from_iterable(matrix.parts[part]() for matrix in matrices)
            names.append(self.stream(stem + suffix, dtype, shape, self._counted(chunks, dtype)))
        return names

    def _counted(self, chunks: Iterator[Array], dtype: int) -> Iterator[Array]:
        for chunk in chunks:
            stored = chunk.astype(np.float32) if dtype == TensorProto.FLOAT else chunk
            yield stored
            self._done_bytes += stored.nbytes
            if self._progress is not None:
                self._progress("writing weights", self._done_bytes, self._total_bytes)

    def matmul(self, name: str, x: str, matrices: Sequence[Matrix], output: str = "") -> str:
        """A product with matrices of one format, stacked along N."""
        names = self.matrix(weight_name(name), matrices)
        return self.matmul_with(name, x, matrices, names, output)

    def matmul_with(
        self, name: str, x: str, matrices: Sequence[Matrix], names: Sequence[str], output: str = ""
    ) -> str:
        """A product with initializers that exist already."""
        fmt = matrices[0].format
        outputs = [output or f"{name}/output_0"]
        if isinstance(fmt, FloatFormat):
            weight = self.node("Transpose", names, f"{name}/Transpose", perm=[1, 0])
            if fmt.dtype is not DType.F32:
                weight = self.node("Cast", [weight], f"{name}/Cast", to=TensorProto.FLOAT)
            return self.node("MatMul", [x, weight], name, outputs)
        return self.node(
            "MatMulNBits",
            [x, *names],
            f"{name}_Q{fmt.bits}",
            outputs,
            "com.microsoft",
            K=matrices[0].shape[1],
            N=sum(matrix.shape[0] for matrix in matrices),
            bits=fmt.bits,
            block_size=fmt.block_size,
            accuracy_level=self._accuracy_level,
        )

    def linear(self, name: str, x: str, linears: Sequence[Linear]) -> str:
        """A product and its bias; several linears of one format become one, stacked along N."""
        y = self.matmul(f"{name}/MatMul", x, [linear.matrix for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        if not biases:
            return y
        bias = self.floats(weight_name(f"{name}/Add"), np.concatenate(biases))
        return self.node("Add", [y, bias], f"{name}/Add")


def weight_name(node_name: str) -> str:
    """The builder's name for the weight of a node: `/model/x/MatMul` -> `model.x.MatMul.weight`."""
    kind = "bias" if node_name.endswith("/Add") else "weight"
    return f"{node_name.removeprefix('/').replace('/', '.')}.{kind}"


def _suffixes(fmt: Format) -> Mapping[str, str]:
    """What the builder's default algorithm appends to a weight's name, for each part."""
    if isinstance(fmt, FloatFormat):
        return {"data": ""}
    return {"codes": f"_Q{fmt.bits}", "scales": "_scales", "zero_points": "_zero_points"}


def _part_type(fmt: Format, part: str) -> int:
    if part == "codes":
        return TensorProto.UINT8
    return _FLOAT_TYPES[fmt.dtype] if isinstance(fmt, FloatFormat) else TensorProto.FLOAT
