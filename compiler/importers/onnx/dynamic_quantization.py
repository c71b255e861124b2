"""What onnxruntime's quantize_dynamic writes, brought to forms that the rules take.

    DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul by both scales   -> DynamicMatMul
    DynamicQuantizeLinear -> MatMulIntegerToFloat                          -> DynamicMatMul
    Gather of a quantised table -> DequantizeLinear                        -> the other order

What differs from these forms stays as it is, and is refused by name if no rule takes it.
"""

from __future__ import annotations

import onnx_ir

from atsc.compiler.importers.onnx.canonical.editor import OWN_DOMAIN

DYNAMIC_MATMUL = "DynamicMatMul"
"""Inputs x, codes [K, N], scales, zero_points?, bias?: x is quantised while the layer runs."""
_MICROSOFT = "com.microsoft"


_QUANTISED_ATTENTION = (
    "quantize_dynamic makes it of Attention, and onnxruntime itself takes no such file: "
    'quantise with op_types_to_quantize=["MatMul", "Gather"]'
)
_QUANTISED_PRODUCT = (
    "a product of activations that are both rounded to 8 bits is no attention of ours: "
    "quantise with MatMulConstBOnly, quantize_dynamic's default"
)


def spoiled_attentions(graph: onnx_ir.Graph) -> dict[onnx_ir.Node, str]:
    """Why an attention cannot be found again, by the nodes that were made of it.

    Whatever else there is around these would be refused too, each node by its own name.
    """
    found = {}
    for node in graph:
        if node.op_type == "QAttention":
            found[node] = _QUANTISED_ATTENTION
        elif node.op_type in ("MatMulInteger", "MatMulIntegerToFloat"):
            codes = node.inputs[1]
            if codes is not None and not _is_constant(codes):
                found[node] = _QUANTISED_PRODUCT
    return found


def rewrite_dynamic_quantization(graph: onnx_ir.Graph) -> None:
    """Rewrite a graph in place; nodes that nothing reads any more are left to the caller."""
    rows: dict[tuple[onnx_ir.Value | None, ...], onnx_ir.Value] = {}
    for node in list(graph):
        if (node.domain, node.op_type) == (_MICROSOFT, "MatMulIntegerToFloat"):
            _rewrite_fused_product(graph, node)
        elif (node.domain, node.op_type) == ("", "MatMulInteger"):
            _rewrite_product(graph, node)
        elif (node.domain, node.op_type) == ("", "DequantizeLinear"):
            key = tuple(node.inputs)
            if key in rows:
                # onnxruntime's optimiser writes one for each reader; a norm must see one value.
                onnx_ir.convenience.replace_all_uses_with(node.outputs[0], rows[key])
            elif (made := _rewrite_gather(graph, node)) is not None:
                rows[key] = made


def _rewrite_product(graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
    quantize = node.inputs[0].producer() if node.inputs[0] is not None else None
    if quantize is None or quantize.op_type != "DynamicQuantizeLinear":
        return
    codes, scale, point = quantize.outputs
    own_point = len(node.inputs) > 2 and node.inputs[2] is point
    cast = _only_reader(node.outputs[0], "Cast")
    if node.inputs[0] is not codes or not own_point or cast is None:
        return
    to = cast.attributes.get("to")
    product = _only_reader(cast.outputs[0], "Mul")
    if to is None or to.value != onnx_ir.DataType.FLOAT or product is None:
        return
    scales = _other(product, cast.outputs[0])
    both = None if scales is None else scales.producer()
    weight_scale = _other(both, scale) if both is not None and both.op_type == "Mul" else None
    if weight_scale is None:
        return
    inputs = [quantize.inputs[0], node.inputs[1], weight_scale, *node.inputs[3:4]]
    made = onnx_ir.Node(OWN_DOMAIN, DYNAMIC_MATMUL, inputs, name=node.name)
    _replace(graph, product, made)


def _rewrite_fused_product(graph: onnx_ir.Graph, node: onnx_ir.Node) -> None:
    """What onnxruntime's optimiser makes of the same product, with a bias perhaps."""
    x, codes, scale, weight_scale, point, weight_point, bias = [*node.inputs, *[None] * 7][:7]
    quantize = None if x is None else x.producer()
    if quantize is None or quantize.op_type != "DynamicQuantizeLinear":
        return
    if [x, scale, point] == list(quantize.outputs):
        inputs = [quantize.inputs[0], codes, weight_scale, weight_point, bias]
        made = onnx_ir.Node(OWN_DOMAIN, DYNAMIC_MATMUL, inputs, name=node.name)
        _replace(graph, node, made)


def _rewrite_gather(graph: onnx_ir.Graph, node: onnx_ir.Node) -> onnx_ir.Value | None:
    """One scale for all: a row that is gathered first and dequantised then, or the reverse.

    Returns:
        The rows, if they were made.
    """
    gather = node.inputs[0].producer() if node.inputs[0] is not None else None
    if gather is None or gather.domain or gather.op_type != "Gather":
        return None
    table, scale = gather.inputs[0], node.inputs[1]
    if table is None or not _is_constant(table) or scale is None or scale.const_value is None:
        return None
    blocks = node.attributes.get("block_size")
    if scale.const_value.size != 1 or (blocks is not None and blocks.value):
        return None
    floats = onnx_ir.Node("", "DequantizeLinear", [table, *node.inputs[1:]], name=node.name)
    inputs = [floats.outputs[0], gather.inputs[1]]
    made = onnx_ir.Node("", "Gather", inputs, list(gather.attributes.values()), name=gather.name)
    floats.outputs[0].name = f"{node.outputs[0].name}/table"
    graph.insert_before(gather, floats)
    _replace(graph, node, made)
    return made.outputs[0]


def _replace(graph: onnx_ir.Graph, old: onnx_ir.Node, made: onnx_ir.Node) -> None:
    """Put a node where another stands; its output takes over name and readers."""
    (before,), (after,) = old.outputs, made.outputs
    name, before.name = before.name, None
    after.name, after.type, after.shape = name, before.type, before.shape
    graph.insert_before(old, made)
    onnx_ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)


def _is_constant(value: onnx_ir.Value) -> bool:
    """Whether a value is a constant, or computed of constants alone."""
    stack, seen = [value], set[onnx_ir.Value]()
    while stack:
        current = stack.pop()
        maker = current.producer()
        if current in seen or (maker is not None and maker.op_type == "Constant"):
            continue
        seen.add(current)
        if maker is None and current.const_value is None:
            return False
        stack.extend(v for v in (() if maker is None else maker.inputs) if v is not None)
    return True


def _only_reader(value: onnx_ir.Value, op_type: str) -> onnx_ir.Node | None:
    users = [usage.node for usage in value.uses()]
    if len(users) != 1 or value.is_graph_output() or users[0].op_type != op_type:
        return None
    return users[0]


def _other(node: onnx_ir.Node, value: onnx_ir.Value) -> onnx_ir.Value | None:
    """The other of two inputs, or None if `value` is none of them."""
    a, b = node.inputs
    return b if a is value else a if b is value else None
