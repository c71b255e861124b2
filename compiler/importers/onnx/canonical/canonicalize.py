"""canonicalize: decomposed decoders as the operators that the importer takes. Start reading here.

    branches     the If of a merged decoder          -> its branch with a cache
    casts        between float types, of activations -> nothing
    fused_products  FusedMatMul and FusedGemm        -> MatMul between Transpose and Mul, Gemm
    weight_sums  x (W + A B), of adapters (LoRA)     -> products with W, and with A and B
    softmaxes    Exp over its sum                    -> Softmax
    tables       rows by token id along any axis     -> TableRows
    norms        RMSNorm, LayerNorm                  -> SimplifiedLayerNormalization and
                                                        LayerNormalization
    head_norms   norms of heads, one by one          -> one norm with weights of each head
    positions    rows added by position              -> AddPositions
    attention    Softmax or Attention-23, with rope, -> GroupQueryAttention
                 masks, caches, repeated heads
    activations  gelu spelled with Erf or Tanh, Max  -> Gelu, Relu
    movements    what leaves every element in place  -> Reshape, or nothing

A rewrite finds a part of the graph by an anchor node, measures its parameters and proves them by
values (rounds.py). To add one: a module with `rewrite_NAME(editor)`, and a line below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir

from atsc.compiler.importers.onnx.canonical.activations import rewrite_activations
from atsc.compiler.importers.onnx.canonical.attention import rewrite_attention
from atsc.compiler.importers.onnx.canonical.branches import rewrite_branches
from atsc.compiler.importers.onnx.canonical.casts import rewrite_casts
from atsc.compiler.importers.onnx.canonical.editor import Editor
from atsc.compiler.importers.onnx.canonical.fused_products import rewrite_fused_products
from atsc.compiler.importers.onnx.canonical.head_norms import rewrite_head_norms
from atsc.compiler.importers.onnx.canonical.movements import rewrite_movements
from atsc.compiler.importers.onnx.canonical.norms import rewrite_norms
from atsc.compiler.importers.onnx.canonical.positions import rewrite_positions
from atsc.compiler.importers.onnx.canonical.rounds import Rounds, readers
from atsc.compiler.importers.onnx.canonical.softmaxes import rewrite_softmaxes
from atsc.compiler.importers.onnx.canonical.tables import rewrite_tables
from atsc.compiler.importers.onnx.canonical.weight_sums import rewrite_weight_sums

_REWRITES = (
    rewrite_branches,
    rewrite_casts,
    rewrite_fused_products,
    rewrite_weight_sums,
    rewrite_softmaxes,
    rewrite_tables,
    rewrite_norms,
    rewrite_head_norms,
    rewrite_positions,
    rewrite_attention,
    rewrite_activations,
    rewrite_movements,
)


@dataclass(frozen=True, slots=True)
class Canonicalized:
    """What there is to say of a graph that was rewritten."""

    refused: Mapping[str, str]
    """Why an attention was not rewritten, by name of its Softmax or Attention node; empty for the
    nodes around it, which need no message of their own."""
    kinds: Mapping[str, str]
    """What each input of the model is, also those that were added."""
    places: int | None
    """The most tokens that caches of a fixed size have room for; None: they grow."""


def canonicalize(
    graph: onnx_ir.Graph, kinds: Mapping[str, str], context_length: int | None
) -> Canonicalized:
    """Rewrite a graph in place; unused nodes are left for the caller to remove.

    Args:
        graph: the decoder.
        kinds: what each input is (inputs.py).
        context_length: positions for which tables are made; None: as many as there are in the
            graph, at most `rope.DEFAULT_POSITIONS`.
    """
    for node in graph:
        if node.op_type == "Constant" and not node.domain and "value" in node.attributes:
            node.outputs[0].const_value = node.attributes["value"].value
    editor = Editor(graph, Rounds(graph, kinds))
    editor.context_length = context_length
    for rewrite in _REWRITES:
        rewrite(editor)
    if editor.refused:
        _silence_sizes(editor)
    kinds = {value.name or "": editor.rounds.kind(value) for value in graph.inputs}
    return Canonicalized(editor.refused, kinds, editor.places)


def _silence_sizes(editor: Editor) -> None:
    """Say nothing of what computes sizes and masks: the attention that they are for is named."""
    for node in reversed(list(editor.graph)):
        kind = editor.rounds.depends(node.outputs[0]) if node.outputs else "data"
        used = (reader.name in editor.refused for reader in readers(node.outputs))
        if kind == "round" or (kind == "constant" and all(used)):
            editor.silence(node)
