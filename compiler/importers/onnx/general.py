"""Graphs that are no decoders: an ONNX model as a TensorGraph.

Functions that have no rule of their own are replaced by their bodies, until only operators are
left; what depends on constants alone is computed here, by onnx's reference implementation.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import ChainMap
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir
from numpy.typing import NDArray
from onnx import helper

from atsc.compiler.dims import Dim
from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.functions import HasRule, expanded, key_of
from atsc.compiler.importers.onnx.model_file import ModelFile, is_readable, open_model
from atsc.compiler.tensor_graph import (
    NIBBLES,
    Constant,
    GraphInput,
    OnnxNode,
    TensorGraph,
)

_MOST_FOLDED_BYTES = 64 << 20
_NEVER_FOLDED = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike",
                 "Multinomial", "Bernoulli", "If", "Loop", "Scan")  # fmt: skip
_TYPE_NAMES = {
    onnx_ir.DataType.FLOAT: "float32",
    onnx_ir.DataType.DOUBLE: "float64",
}


def import_general(path: Path, has_rule: HasRule) -> TensorGraph:
    """Read any ONNX model; weights stay on disk.

    Raises:
        ModelError: the model is damaged, or an input has no type and shape that kernels have.
    """
    file = open_model(path)
    return _to_graph(file, has_rule)


def general_of_proto(model: onnx.ModelProto, has_rule: HasRule, name: str = "model") -> TensorGraph:
    """A model in memory, as `import_general` reads a file."""
    try:
        parsed = onnx_ir.serde.deserialize_model(model)
    except (ValueError, TypeError, KeyError, onnx_ir.serde.SerdeError) as error:
        raise ModelError(f"{name}: not an ONNX model ({error})") from error
    return _to_graph(ModelFile(Path(name), parsed, {}, ()), has_rule)


def looks_like_decoder(path: Path) -> bool:
    """Whether a model is to be compiled as a language model: it has a KV cache to own.

    A genai_config.json beside it, or inputs whose names say past keys and values.

    Raises:
        ModelError: it cannot be read.
    """
    file = open_model(path)
    if file.config:
        return True
    names = [value.name or "" for value in file.model.graph.inputs]
    return any("past" in name or "cache" in name for name in names)


def _to_graph(file: ModelFile, has_rule: HasRule) -> TensorGraph:
    model = expanded(file, has_rule)
    graph = model.graph
    try:
        graph.sort()
    except ValueError as error:
        raise ModelError(f"{file.path}: its nodes cannot be put in order ({error})") from error
    opsets = {domain: version or 1 for domain, version in model.opset_imports.items()}
    opsets[""] = opsets.get("", opsets.get("ai.onnx", 1))
    body = _Reader(file, opsets).read(graph, {}, "")
    return dataclasses.replace(
        body,
        name=file.path.stem,
        inputs=tuple(_inputs(file, graph)),
        source_files=tuple(map(str, dict.fromkeys([file.path, *sorted(file.data_files())]))),
        companion_files=tuple(map(str, file.companions)),
    )


def _inputs(file: ModelFile, graph: onnx_ir.Graph) -> Iterable[GraphInput]:
    for value in graph.inputs:
        name = value.name or ""
        if name in graph.initializers:
            continue
        # A sequence or an optional has the type and shape of its elements too.
        plain = isinstance(value.type, onnx_ir.TensorType)
        if value.shape is None or value.dtype is None or not plain:
            raise ModelError(f"{file.path}: input {name} has no type and shape that kernels have")
        dims = [
            # Some exporters write -1 where they leave a size open.
            Dim.of(size)
            if isinstance(size, int) and size >= 0
            else Dim.of(_symbol(size) or f"{name}.{axis}")
            for axis, size in enumerate(value.shape)
        ]
        yield GraphInput(name, _type_name(value.dtype), tuple(dims))


def _symbol(size: int | onnx_ir.SymbolicDim) -> str:
    return str(size.value or "") if isinstance(size, onnx_ir.SymbolicDim) else ""


def _type_name(dtype: onnx_ir.DataType) -> str:
    return _TYPE_NAMES.get(dtype, dtype.name.lower())


def _constant(file: ModelFile, name: str, tensor: onnx_ir.TensorProtocol | None) -> Constant:
    if tensor is None:
        raise ModelError(f"{file.path}: initializer {name} has no data")
    shape = tuple(int(size) for size in tensor.shape.numpy())
    is_mapped = isinstance(tensor, onnx_ir.ExternalTensor) and is_readable(tensor)
    if is_mapped or _type_name(tensor.dtype) in NIBBLES:
        source = file.source(tensor)
        return Constant(_type_name(tensor.dtype), shape, source.read)
    name_of_type = _type_name(tensor.dtype)
    if name_of_type == "bfloat16":
        return Constant(name_of_type, shape, lambda: tensor.numpy().view(np.uint16))
    return Constant(name_of_type, shape, tensor.numpy)


@dataclass(slots=True)
class _Reader:
    """Turns graphs into ours, those of branches too."""

    file: ModelFile
    opsets: dict[str, int]
    names: dict[int, str] = field(default_factory=dict)
    """id of a value in a branch -> its name; branches beside each other may use the same ones."""

    def read(
        self, graph: onnx_ir.Graph, outer: MutableMapping[str, Constant], prefix: str
    ) -> TensorGraph:
        """Nodes, constants and outputs of a graph.

        Args:
            graph: in order.
            outer: constants of the graphs around it.
            prefix: of all names that it defines.
        """
        if prefix:
            made = [value for node in graph for value in node.outputs]
            for value in (*graph.initializers.values(), *made):
                self.names[id(value)] = f"{prefix}{value.name}" if value.name else ""
        constants: ChainMap[str, Constant] = ChainMap({}, outer)
        for initializer in graph.initializers.values():
            name = self._name(initializer)
            constants[name] = _constant(self.file, name, initializer.const_value)
        nodes: list[OnnxNode] = []
        for number, node in enumerate(graph):
            made_node = self._node(
                node, f"{prefix}{node.name or f'{node.op_type}_{number}'}", constants
            )
            if not _fold(node, made_node, self.opsets, constants, self.file):
                nodes.append(made_node)
        outputs = tuple(map(self._name, graph.outputs))
        own = dict(constants.maps[0])
        return TensorGraph(prefix, (), outputs, tuple(_used(nodes, outputs)), own)

    def _name(self, value: onnx_ir.Value | None) -> str:
        return "" if value is None else self.names.get(id(value), value.name or "")

    def _node(
        self, node: onnx_ir.Node, name: str, constants: MutableMapping[str, Constant]
    ) -> OnnxNode:
        domain, op = key_of(node)
        return OnnxNode(
            name=name,
            op=op,
            domain=domain,
            opset=node.version or self.opsets.get(domain, 1),
            inputs=tuple(map(self._name, node.inputs)),
            outputs=tuple(map(self._name, node.outputs)),
            attrs={
                key: self._attribute(attr, f"{name}/{key}/", constants)
                for key, attr in node.attributes.items()
            },
        )

    def _attribute(self, attr: Any, prefix: str, constants: MutableMapping[str, Constant]) -> Any:
        value = attr.value
        if attr.type == onnx_ir.AttributeType.GRAPH:
            return self.read(value, constants, prefix)
        if attr.type == onnx_ir.AttributeType.TENSOR:
            return value.numpy()
        if attr.type in (onnx_ir.AttributeType.INTS, onnx_ir.AttributeType.FLOATS):
            return tuple(value)
        return value


def _fold(
    node: onnx_ir.Node,
    made: OnnxNode,
    opsets: dict[str, int],
    constants: MutableMapping[str, Constant],
    file: ModelFile,
) -> bool:
    """Compute a node whose inputs are all constants; False if it has to stay."""
    inputs = [name for name in made.inputs if name]
    if made.op in _NEVER_FOLDED or any(name not in constants for name in inputs):
        return False
    if made.op == "DequantizeLinear" and _is_matrix_of_bytes(constants[inputs[0]]):
        return False
    if made.op == "Constant" and "value" in node.attributes:
        constants[made.outputs[0]] = _constant(file, made.name, node.attributes["value"].value)
        return True
    if sum(constants[name].num_bytes for name in inputs) > _MOST_FOLDED_BYTES:
        return False
    if any(constants[name].dtype == "bfloat16" for name in inputs):
        return False
    given = {name: _array(constants[name]) for name in inputs}
    results = _evaluate(node, made, given, opsets)
    if results is None or sum(result.nbytes for result in results) > _MOST_FOLDED_BYTES:
        return False
    for name, result in zip(made.outputs, results, strict=False):
        constants[name] = Constant.of(np.ascontiguousarray(result).reshape(result.shape))
    return True


def _is_matrix_of_bytes(constant: Constant) -> bool:
    """Products multiply such codes themselves, and make floats of them where they cannot."""
    return constant.dtype in ("int8", "uint8") and len(constant.shape) > 1


def _array(constant: Constant) -> NDArray[Any]:
    """A constant's content as the reference takes it: 4-bit integers one by one."""
    array = constant.read()
    if constant.dtype not in NIBBLES:
        return array
    element = onnx_ir.DataType[constant.dtype.upper()]
    pairs = np.stack([array & 15, array >> 4], axis=-1).reshape(-1)
    codes = pairs[: math.prod(constant.shape)].reshape(constant.shape).astype(np.int8)
    return (codes if constant.dtype == "uint4" else (codes ^ 8) - 8).astype(element.numpy())


def _evaluate(
    node: onnx_ir.Node,
    made: OnnxNode,
    inputs: dict[str, NDArray[Any]],
    opsets: dict[str, int],
) -> list[NDArray[Any]] | None:
    """What the reference implementation makes of a node; None if it cannot."""
    proto = onnx_ir.serde.serialize_node(node)
    for names, own in ((proto.input, made.inputs), (proto.output, made.outputs)):
        names[:] = own
    graph = helper.make_graph(
        [proto],
        "fold",
        [helper.make_tensor_value_info(k, _onnx_type(v), v.shape) for k, v in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in proto.output if name],
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = helper.make_model(graph, opset_imports=imports)
            found = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    except Exception:  # whatever it is: then code generation has to deal with the node
        return None
    arrays = [np.asarray(value) for value in found if isinstance(value, (np.ndarray, np.generic))]
    plain = all(array.dtype.kind in "fiub" for array in arrays)
    return arrays if plain and len(arrays) == len(found) else None


def _onnx_type(array: NDArray[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def _used(nodes: list[OnnxNode], outputs: tuple[str, ...]) -> list[OnnxNode]:
    """Without nodes whose results nobody reads."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted & set(node.outputs):
            kept.append(node)
            wanted.update(node.reads)
    return kept[::-1]


__all__ = ["HasRule", "general_of_proto", "import_general", "looks_like_decoder"]
