"""optimise(): every rewrite from an imported graph to the one that code is generated for."""

from __future__ import annotations

from atsc.compiler.ir import Graph
from atsc.passes.canonicalize import Canonicalize
from atsc.passes.columns import SplitColumns
from atsc.passes.fuse_attention import FuseAttention
from atsc.passes.fuse_linear import FuseLinear
from atsc.passes.fuse_norm import FuseNormResidual
from atsc.passes.pipeline import Observer, Pass, run_passes
from atsc.passes.quantize_activations import QuantizeActivations
from atsc.passes.select_rows import SelectRows

DEFAULT_PASSES: tuple[Pass, ...] = (
    Canonicalize(),
    SelectRows(),
    FuseAttention(),
    SplitColumns(),
    FuseLinear(),
    FuseNormResidual(),
    QuantizeActivations(),
)


def optimise(graph: Graph, observer: Observer | None = None) -> Graph:
    """All passes in order: an imported graph as code generation wants it.

    Raises:
        ModelError: the model needs something that no kernel can do.
    """
    return run_passes(graph, DEFAULT_PASSES, observer)
