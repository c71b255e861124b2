"""Every operator that has a rule: where a new one goes is said in docs/adding-an-operator.md."""

from __future__ import annotations

from collections.abc import Mapping

from atsc.codegen.graph import (
    along,
    block_quantized,
    convolution,
    dynamic,
    elementwise,
    fused,
    gathers,
    linear,
    moves,
    quantized,
    quantized_operators,
    recurrent,
    reduce,
    resize,
)
from atsc.codegen.graph.lower import Rule

RULES: Mapping[tuple[str, str], Rule] = {
    **elementwise.RULES,
    **moves.RULES,
    **gathers.RULES,
    **reduce.RULES,
    **linear.RULES,
    **convolution.RULES,
    **resize.RULES,
    **along.RULES,
    **quantized.RULES,
    **dynamic.RULES,
    **quantized_operators.RULES,
    **fused.RULES,
    **block_quantized.RULES,
    **recurrent.RULES,
}
"""(domain, operator) -> rule."""
