"""Operators that ONNX defines by others, replaced by these where code generation has no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
import onnx.defs
import onnx.inliner
import onnx.shape_inference
import onnx_ir

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.model_file import ModelFile

HasRule = Callable[[str, str], bool]
"""(domain, operator) -> whether code generation knows it."""
_OWN_DOMAIN = "atsc.functions"


def expanded(file: ModelFile, has_rule: HasRule) -> onnx_ir.Model:
    """With functions as their bodies, where they have no rule.

    Raises:
        ModelError: a function cannot be expanded.
    """
    model = file.model
    kept = {(node.domain, node.op_type) for node in model.graph if has_rule(*key_of(node))}
    opset = model.opset_imports.get("", 1) or 1
    if not model.functions and all(
        key_of(node) in kept or not _has_body(*key_of(node), opset) for node in model.graph
    ):
        return model
    proto = onnx_ir.serde.serialize_model(model)
    _write_defaults(proto.graph.node, opset)
    rules = [
        ("ai.onnx" if not schema.domain else schema.domain, schema.name)
        for schema in onnx.defs.get_all_schemas()
        if has_rule(schema.domain, schema.name)
    ]
    rules += [("", name) for domain, name in rules if domain == "ai.onnx"]
    try:
        # Bodies of some functions depend on the types of their inputs.
        proto = onnx.shape_inference.infer_shapes(proto)
        _spell_out_absent_inputs(proto, has_rule)
        inlined = onnx.inliner.inline_selected_functions(
            proto, rules, exclude=True, inline_schema_functions=True
        )
    except Exception as error:  # the inliner is C++ and has no type for its errors
        raise ModelError(f"{file.path}: its functions cannot be expanded ({error})") from error
    result = onnx_ir.serde.deserialize_model(inlined)
    onnx_ir.external_data.set_base_dir(result.graph, file.path.parent)
    return result


def _write_defaults(nodes: Iterable[onnx.NodeProto], opset: int) -> None:
    """Give functions their default attributes, which the inliner takes for absent ones."""
    for node in nodes:
        if node.domain not in ("", "ai.onnx") or not _has_body("", node.op_type, opset):
            continue
        given = {attribute.name for attribute in node.attribute}
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        for name, attribute in schema.attributes.items():
            if name not in given and attribute.default_value.name:
                node.attribute.append(attribute.default_value)


def _spell_out_absent_inputs(proto: onnx.ModelProto, has_rule: HasRule) -> None:
    """Give nodes that leave out an input before another one a function of their own.

    onnx's inliner asks for the types of all inputs, absent ones too, and gives up.
    """
    types: dict[str, onnx.TypeProto] = {}
    for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        types[value.name] = value.type
    for tensor in proto.graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=1)
    for number, node in enumerate(proto.graph.node):
        if node.domain not in ("", "ai.onnx") or "" not in node.input[:]:
            continue
        if has_rule("", node.op_type) or not _has_body("", node.op_type, opset):
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        # onnx's type stubs lack both.
        if not schema.has_context_dependent_function:  # type: ignore[attr-defined]
            continue
        given = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        body = schema.get_context_dependent_function(  # type: ignore[attr-defined]
            node.SerializeToString(), given
        )
        function = onnx.FunctionProto.FromString(body)
        function.domain, function.name = _OWN_DOMAIN, f"{node.op_type}_{number}"
        node.domain, node.op_type = function.domain, function.name
        proto.functions.append(function)
    if any(function.domain == _OWN_DOMAIN for function in proto.functions):
        proto.opset_import.append(onnx.helper.make_opsetid(_OWN_DOMAIN, 1))


def key_of(node: onnx_ir.Node) -> tuple[str, str]:
    """Domain and operator of a node; the default domain is the empty one."""
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type)


def _has_body(domain: str, op: str, opset: int) -> bool:
    try:
        schema = onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return False
    # onnx's type stubs lack both.
    return any(
        getattr(schema, f"has_{kind}") for kind in ("function", "context_dependent_function")
    )
