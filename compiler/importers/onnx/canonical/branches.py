"""The If of a merged decoder, replaced by the branch that the model takes in use.

Merged decoders choose by `use_cache_branch` between a graph without and one with past_key_values.
The latter serves every round, the first one with caches of no tokens.
"""

from __future__ import annotations

import onnx_ir

from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.rounds import Node


def rewrite_branches(editor: Editor) -> None:
    """Put the branch with a cache in place of each If on a flag of the model."""
    for node in list(editor.graph):
        condition = node.inputs[0] if node.op_type == "If" else None
        if condition is not None and editor.rounds.kind(condition) == "flag":
            _inline(editor, node)


def _inline(editor: Editor, node: Node) -> None:
    branch: onnx_ir.Graph = node.attributes["then_branch"].value
    for name, value in list(branch.initializers.items()):
        del branch.initializers[name]
        if name in editor.graph.initializers:
            value.name = f"{node.name}/{name}"
        editor.graph.register_initializer(value)
    inner = list(branch)
    results = list(branch.outputs)
    branch.outputs.clear()
    branch.remove(inner)
    editor.graph.insert_before(node, inner)
    for old, new in zip(list(node.outputs), results, strict=True):
        editor.replace(old, new)
    node.replace_input_with(0, None)
