"""import_onnx: an ONNX decoder as the ONNX Runtime GenAI model builder writes it, as a Graph.

The batch dimension is dropped (batch 1); past and present disappear, since attention owns its
cache; attention_mask and position_ids fold away once what is computed from them is proved to be the
lengths and positions of a contiguous sequence (operands.Affine).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes import PassError
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import (
    attention_rules,
    branch_rules,
    matrix_rules,
    norm_rules,
    pointwise_rules,
    quantized_rules,
    shape_rules,
    table_rules,
)
from atsc.compiler.importers.onnx.canonical.canonicalize import canonicalize
from atsc.compiler.importers.onnx.dynamic_quantization import (
    rewrite_dynamic_quantization,
    spoiled_attentions,
)
from atsc.compiler.importers.onnx.inputs import ModelInput, input_kinds, why_unsupported
from atsc.compiler.importers.onnx.lowering import Lowering, Rule, lower_node, refuse_node
from atsc.compiler.importers.onnx.model_file import ModelFile, is_readable, open_model, read_json
from atsc.compiler.importers.onnx.operands import (
    INTEGERS,
    Affine,
    Constant,
    Ints,
    Rows,
    Symbol,
    Unknown,
)
from atsc.compiler.invariants import check_graph, infer_values
from atsc.compiler.ir import TOKENS, DType, Graph, ModelInfo, TensorType, Value

_RULES: Mapping[tuple[str, str], Rule] = {
    (rule.domain, rule.op_type): rule
    for module in (
        attention_rules,
        branch_rules,
        matrix_rules,
        norm_rules,
        pointwise_rules,
        quantized_rules,
        shape_rules,
        table_rules,
    )
    for rule in module.RULES
}
_MAX_INTS = 64
"""Integer constants up to this size are followed as sizes and indices."""


def import_onnx(
    path: Path, *, accuracy_level: int | None = None, context: int | None = None
) -> Graph:
    """Read a decoder-only model from an .onnx file or a model folder; weights stay on disk.

    Args:
        path: the file, or a folder whose genai_config.json names it.
        accuracy_level: overrides the attribute of every MatMulNBits.
        context: tokens that a sequence may have; None: as many as the tables for short ones cover,
            where a model has one set of tables for short sequences and one for long ones.

    Raises:
        ModelError: the model is damaged, or holds something that is not supported; all such nodes
            are named in one message.
    """
    file = open_model(path)
    lowering = Lowering(file, accuracy_level, context)
    lowering.lower_body = lambda body: _lower_body(lowering, body, {})
    _inline_functions(file)
    graph = file.model.graph
    for node, reason in spoiled_attentions(graph).items():
        refuse_node(lowering, node, reason)
    lowering.raise_problems()
    rewrite_dynamic_quantization(graph)
    _sort(file)
    RemoveUnusedNodesPass()(file.model)
    kinds = _input_kinds(lowering, graph)
    found = canonicalize(graph, kinds, _context_length(lowering))
    _sort(file)
    RemoveUnusedNodesPass()(file.model)
    _bind_inputs(lowering, graph, found.kinds)
    _lower_body(lowering, graph, found.refused)
    lowering.raise_problems()
    return _finish(lowering, graph, found.places)


def _lower_body(lowering: Lowering, graph: onnx_ir.Graph, refused: Mapping[str, str]) -> None:
    """Lower the constants and nodes of the model, or of the branch that stands for an If."""
    path = lowering.file.path
    for initializer in graph.initializers.values():
        if initializer.const_value is None:
            raise ModelError(f"{path}: initializer {initializer.name} has no data")
        _bind_tensor(lowering, initializer.name or "", initializer.const_value)
    for node in graph:
        if node.op_type == "Constant" and not node.domain:
            _bind_constant(lowering, node)
        elif (node.name or "") in refused:
            refuse_node(lowering, node, refused[node.name or ""])
        else:
            lower_node(lowering, node, _RULES.get((node.domain, node.op_type)))


def _inline_functions(file: ModelFile) -> None:
    """Put the bodies of the model's own functions in the place of their calls."""
    if not file.model.functions:
        return
    try:
        InlinePass(lambda function: (function.domain, function.name) not in _RULES)(file.model)
    except (ValueError, PassError) as error:
        raise ModelError(
            f"{file.path}: its functions cannot be expanded ({error}); inline them with "
            "onnx.inliner.inline_local_functions"
        ) from error


def _sort(file: ModelFile) -> None:
    try:
        file.model.graph.sort()
    except ValueError as error:
        raise ModelError(f"{file.path}: its nodes cannot be put in order ({error})") from error


def _inputs(graph: onnx_ir.Graph) -> list[ModelInput]:
    """The inputs that anything reads."""
    found = []
    for value in graph.inputs:
        if (value.uses() or value.is_graph_output()) and value.name not in graph.initializers:
            dims = (
                None
                if value.shape is None
                else [d if isinstance(d, int) else None for d in value.shape]
            )
            found.append(ModelInput(value.name or "", dims, value.dtype in INTEGERS))
    return found


def _input_kinds(lowering: Lowering, graph: onnx_ir.Graph) -> dict[str, str]:
    """What each input of the model is, by name.

    Raises:
        UnsupportedError: one is nothing that a plan has; what hangs on it would be refused too.
    """
    inputs = _inputs(graph)
    kinds = input_kinds(inputs, lowering.file.config)
    for value in inputs:
        if value.name not in kinds:
            lowering.report(value.name, "input of the model", why_unsupported(value))
    lowering.raise_problems()
    return kinds


def _bind_inputs(lowering: Lowering, graph: onnx_ir.Graph, kinds: Mapping[str, str]) -> None:
    for value in graph.inputs:
        name, kind = value.name or "", kinds.get(value.name or "", "")
        if kind == "flag" and value.uses():
            reason = "it may choose more than the branch with a cache, or the rows of logits"
            lowering.report(name, "input of the model", reason)
            lowering.bind(name, Unknown())
        elif kind == "past_length":
            past = np.empty([1 for _ in value.shape or ()], object)
            past[...] = Affine(past=1)
            lowering.bind(name, Ints.of(past))
        elif kind:
            lowering.bind(name, Symbol(kind, "input_ids" if kind == "ids" else name))


def _bind_constant(lowering: Lowering, node: onnx_ir.Node) -> None:
    """A Constant node; every way to spell its value becomes a tensor."""
    output = node.outputs[0].name or ""
    if len(node.attributes) == 1:
        (attr,) = node.attributes.values()
        if attr.name == "value":
            _bind_tensor(lowering, output, attr.value)
            return
        if attr.name in ("value_int", "value_ints", "value_float", "value_floats"):
            _bind_tensor(lowering, output, onnx_ir.tensor(attr.value, name=output))
            return
    lowering.report(node.name or output, "Constant (ai.onnx)", "a value that is no number")


def _bind_tensor(lowering: Lowering, name: str, tensor: onnx_ir.TensorProtocol) -> None:
    shape = tuple(tensor.shape.numpy())
    if not is_readable(tensor):
        reason = f"elements of type {tensor.dtype.name} are not supported"
        lowering.report(name, "constant", reason)
        lowering.bind(name, Unknown())
        return
    source = lowering.file.source(tensor)
    if tensor.dtype in INTEGERS and tensor.size <= _MAX_INTS:
        lowering.bind(name, Ints.of(source.read()))
    else:
        lowering.bind(name, Constant(name, shape, tensor.dtype, source))


def _finish(lowering: Lowering, graph: onnx_ir.Graph, places: int | None) -> Graph:
    """The Graph of what was lowered, checked; its caches may have a number of places."""
    path = lowering.file.path
    logits = _logits(lowering, graph)
    ids = Value("input_ids", TensorType(DType.I32, (TOKENS,)))
    nodes = tuple(lowering.nodes)
    values = infer_values((ids,), nodes, lowering.weights)
    read = {name for node in nodes for name in node.inputs}
    result = Graph(
        info=_model_info(lowering, logits.width, places),
        inputs=(ids,),
        outputs=(Value(logits.name, values[logits.name]),),
        nodes=nodes,
        values=values,
        weights={name: w for name, w in lowering.weights.items() if name in read},
    )
    if "input_ids" not in read:
        raise ModelError(f"{path}: the model does not read input_ids")
    check_graph(result)
    return result


def _logits(lowering: Lowering, graph: onnx_ir.Graph) -> Rows:
    path = lowering.file.path
    found: list[Rows] = []
    for output in graph.outputs:
        operand = lowering.operands.get(output.name or "")
        if isinstance(operand, Rows) and not operand.group:
            found.append(operand)
        elif not (isinstance(operand, Symbol) and operand.kind == "present"):
            raise ModelError(f"{path}: output {output.name} is neither logits nor a KV cache")
    if len(found) != 1:
        names = ", ".join(rows.name for rows in found) or "none"
        raise ModelError(f"{path}: expected logits as the one output beside the caches: {names}")
    return found[0]


def _configuration(lowering: Lowering) -> dict[str, Any]:
    """What the configuration files beside the model say."""
    config = dict(lowering.file.config)
    for name in ("generation_config.json", "config.json"):
        for key, value in read_json(lowering.file.path.parent / name).items():
            config.setdefault(key, value)
    return config


def _context_length(lowering: Lowering) -> int | None:
    config = _configuration(lowering)
    length = config.get("context_length") or config.get("max_position_embeddings")
    return int(length) if length else None


def _say_limit(lowering: Lowering, length: int | None) -> None:
    """Warn where nobody asked for a context, and the model has one beyond the branches chosen."""
    limit = min(lowering.length_limits, default=None)
    if limit is None or lowering.context is not None or (length is not None and length <= limit):
        return
    warnings.warn(
        f"{lowering.file.path}: limited to {limit} tokens, for which the model has tables of their "
        f"own; it reaches {length or 'further'} with others: say which with --ctx TOKENS",
        stacklevel=2,
    )


def _model_info(lowering: Lowering, vocab_size: int, places: int | None) -> ModelInfo:
    """What the configuration files beside the model say, with what the graph says as fallback."""
    file, config = lowering.file, _configuration(lowering)
    folder, length = file.path.parent, _context_length(lowering)
    limits = [*lowering.rope_rows, *lowering.length_limits]
    lengths = [n for n in (length, places, *limits) if n]
    if not lengths:
        raise ModelError(
            f"{file.path}: cannot tell the context length: "
            "put a genai_config.json or config.json beside the model"
        )
    _say_limit(lowering, length)
    eos = config.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    bos = config.get("bos_token_id")
    sources = dict.fromkeys([file.path, *sorted(file.data_files())])
    return ModelInfo(
        name=folder.resolve().name if file.path.stem == "model" else file.path.stem,
        vocab_size=vocab_size,
        context_length=min(lengths),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(int(i) for i in eos_ids),
        source_files=tuple(map(str, sources)),
        companion_files=tuple(map(str, file.companions)),
    )
