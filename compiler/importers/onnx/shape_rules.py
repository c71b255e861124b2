"""Shapes and views: Reshape, Transpose, Split of activations and constants, and size arithmetic.

Size arithmetic is evaluated, symbolically where it depends on the attention mask or on the number
of tokens (operands.Affine). The mask of a batch of one without padding is all ones, so its sum is
its width, which is what GroupQueryAttention's seqlens_k is proved from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx.lowering import Attr, Lowering, OnnxNode, Rule
from atsc.compiler.importers.onnx.matrix_rules import gather_rows
from atsc.compiler.importers.onnx.operands import (
    TOTAL,
    Affine,
    Constant,
    Ints,
    M,
    Rows,
    Symbol,
    reshape,
    transpose,
)

_SHAPES: Mapping[str, list[Any]] = {
    "ids": [1, M],
    "positions": [1, M],
    "places": [M],
    "mask": [1, TOTAL],
}


def _ints(node: OnnxNode, index: int) -> Ints:
    operand = node.input(index)
    if not isinstance(operand, Ints):
        raise ModelError(f"input {index} is no size or index that can be followed")
    return operand


def _known(node: OnnxNode, index: int) -> tuple[int, ...]:
    known = _ints(node, index).known()
    if known is None:
        raise ModelError(f"input {index} depends on the number of tokens")
    return known


def _shape(lowering: Lowering, node: OnnxNode) -> None:
    operand = node.input(0)
    if not isinstance(operand, Symbol) or operand.kind not in _SHAPES:
        raise ModelError("the shape of something that is not input_ids or attention_mask")
    dims = _SHAPES[operand.kind][node.attrs["start"] : node.attrs["end"]]
    lowering.bind(node.output(), Ints.of(dims))


def _reduce_sum(lowering: Lowering, node: OnnxNode) -> None:
    operand = node.input(0)
    if not isinstance(operand, Symbol) or operand.kind != "mask":
        raise ModelError("a sum over something that is not attention_mask")
    axes = node.attrs["axes"] if node.input(1) is None else _known(node, 1)
    if axes is not None and tuple(axes) not in ((1,), (-1,)):
        raise ModelError(f"a sum over axes {tuple(axes)} of attention_mask, supported: 1")
    rank = (2 if axes is None else 1) if not node.attrs["keepdims"] else 0
    total = np.empty((1,) * (2 - rank), dtype=object)
    total[...] = TOTAL
    lowering.bind(node.output(), Ints.of(total))


def _gather(lowering: Lowering, node: OnnxNode) -> None:
    if isinstance(node.input(0), Rows):
        _gather_last_row(lowering, node)
        return
    if not isinstance(node.input(0), Ints):
        gather_rows(lowering, node)
        return
    values, indices = _ints(node, 0).values, _ints(node, 1)
    index = np.array(_known(node, 1), np.int64).reshape(indices.values.shape)
    try:
        taken = np.take(values, index, axis=node.attrs["axis"])
    except (IndexError, ValueError) as error:
        raise ModelError(f"index out of range ({error})") from None
    lowering.bind(node.output(), Ints.of(taken))


def _gather_last_row(lowering: Lowering, node: OnnxNode) -> None:
    """The builder's prune_lm_head: only the last row goes on. Which rows do is our caller's choice,
    the last being the usual one, so this is where `select_rows` stands.
    """
    x = node.rows(0)
    if node.attrs["axis"] != 1 or _known(node, 1) != (-1,):
        raise ModelError("rows of activations other than the last one")
    lowering.emit("select_rows", node.name, (x.name,), node.output())
    lowering.selected.add(node.output())
    lowering.bind(node.output(), Rows(node.output(), x.width))


def _squeeze(lowering: Lowering, node: OnnxNode) -> None:
    operand = node.input(0)
    if isinstance(operand, Rows) and operand.name in lowering.selected:
        lowering.bind(node.output(), operand)
        return
    constant = operand if isinstance(operand, Constant) and not operand.transposed else None
    values = np.empty(constant.shape, bool) if constant else _ints(node, 0).values
    axes = node.attrs["axes"] if node.input(1) is None else _known(node, 1)
    change = np.expand_dims if node.op_type == "Unsqueeze" else np.squeeze
    try:
        changed = change(values, None if axes is None else tuple(axes))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ModelError(f"axes {axes} do not fit ({error})") from None
    moved = reshape(constant, changed.shape) if constant else Ints.of(changed)
    lowering.bind(node.output(), moved)


def _concat(lowering: Lowering, node: OnnxNode) -> None:
    parts = [_ints(node, index).values for index in range(len(node.inputs))]
    lowering.bind(node.output(), Ints.of(np.concatenate(parts, axis=node.attrs["axis"])))


def _identity(lowering: Lowering, node: OnnxNode) -> None:
    operand = node.inputs[0]
    assert operand is not None
    lowering.bind(node.output(), operand)


def _transpose(lowering: Lowering, node: OnnxNode) -> None:
    constant = node.constant(0, floats=False)
    perm = node.attrs["perm"]
    if len(constant.shape) != 2 or perm not in (None, (0, 1), (1, 0)):
        raise ModelError(f"a transpose of {constant.root} by {perm}, supported: a matrix")
    lowering.bind(node.output(), constant if perm == (0, 1) else transpose(constant))


def _reshape(lowering: Lowering, node: OnnxNode) -> None:
    operand, target = node.input(0), _ints(node, 1)
    if isinstance(operand, Rows):
        lowering.bind(node.output(), _reshape_rows(operand, target))
    elif isinstance(operand, Constant):
        lowering.bind(node.output(), _reshape_constant(operand, _known(node, 1)))
    elif isinstance(operand, Ints):
        known = _known(node, 1)
        try:
            lowering.bind(node.output(), Ints.of(operand.values.reshape(known)))
        except ValueError as error:
            raise ModelError(str(error)) from None
    else:
        raise ModelError("a reshape of an input of the model")


def _reshape_rows(x: Rows, target: Ints) -> Rows:
    """Rows as heads, or back: [1, .., D] with D a divisor of the width. The bytes do not move."""
    dims = list(target.values.reshape(-1))
    shown = [d.constant if d.is_constant else "tokens" for d in dims]
    batch = len(dims) == 2 or (len(dims) in (3, 4) and dims[0] in (Affine(0), Affine(1)))
    last = dims[-1] if dims else Affine()
    if last == Affine(-1) and len(dims) == 3 and dims[1] == M:
        last = Affine(x.width)
    heads_split = last.is_constant and last.constant > 0 and x.width % last.constant == 0
    if not batch or not heads_split:
        raise ModelError(f"a reshape of rows of {x.width} to {shown}")
    return Rows(x.name, x.width, 0 if last.constant == x.width else last.constant)


def _reshape_constant(constant: Constant, target: tuple[int, ...]) -> Constant:
    shape = [constant.shape[i] if d == 0 else d for i, d in enumerate(target)]
    size = int(np.prod(constant.shape, dtype=np.int64))
    if -1 in shape:
        rest = -int(np.prod(shape, dtype=np.int64))
        shape[shape.index(-1)] = size // rest if rest > 0 else 0
    if constant.transposed or int(np.prod(shape, dtype=np.int64)) != size:
        raise ModelError(f"a reshape of {constant.root} {list(constant.shape)} to {list(target)}")
    return reshape(constant, tuple(shape))


def _split(lowering: Lowering, node: OnnxNode) -> None:
    x = node.rows(0)
    if node.attrs["axis"] not in (-1, 2):
        raise ModelError(f"attribute axis is {node.attrs['axis']}, supported: the last one (-1)")
    sizes = node.attrs["split"] if node.input(1) is None else _known(node, 1)
    if sizes is None:
        count = node.attrs["num_outputs"] or len(node.outputs)
        each = -(-x.width // count)
        sizes = [min(each, x.width - i * each) for i in range(count)]
    if sum(sizes) != x.width or min(sizes) <= 0 or len(sizes) != len(node.outputs):
        raise ModelError(f"a split of rows of {x.width} into {list(sizes)}")
    start = 0
    for index, (size, output) in enumerate(zip(sizes, node.outputs, strict=True)):
        if output:
            lowering.emit(
                "columns",
                f"{node.name}/{index}",
                (x.name,),
                output,
                start=start,
                stop=start + size,
            )
            lowering.bind(output, Rows(output, size))
        start += size


RULES = (
    Rule("", "Shape", _shape, ("x",), {"start": Attr(0), "end": Attr()}),
    Rule(
        "",
        "ReduceSum",
        _reduce_sum,
        ("x", "axes?"),
        {
            "axes": Attr(kind=tuple),
            "keepdims": Attr(1, (0, 1)),
            "noop_with_empty_axes": Attr(0, (0,)),
        },
    ),
    Rule("", "Gather", _gather, ("data", "indices"), {"axis": Attr(0)}),
    Rule("", "Squeeze", _squeeze, ("x", "axes?"), {"axes": Attr(kind=tuple)}),
    Rule("", "Unsqueeze", _squeeze, ("x", "axes?"), {"axes": Attr(kind=tuple)}),
    Rule("", "Concat", _concat, ("*",), {"axis": Attr(required=True)}),
    Rule("", "Identity", _identity, ("x",)),
    Rule("", "Transpose", _transpose, ("x",), {"perm": Attr(kind=tuple)}),
    Rule("", "Reshape", _reshape, ("x", "shape"), {"allowzero": Attr(0, (0,))}),
    Rule(
        "",
        "Split",
        _split,
        ("x", "split?"),
        {"axis": Attr(0), "split": Attr(kind=tuple), "num_outputs": Attr()},
        ("*",),
    ),
)
