"""LSTM, GRU and RNN: one kernel that runs the steps, an item of its grid a direction and batch row.

Gate sums are plain loops: these operators are here so that models that have them run, not to make
them fast. Equations, gate order and defaults are those of ONNX 14.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atsc.codegen.graph.kernels import finished_call
from atsc.codegen.graph.lower import Lowering, RefusedError, Rule
from atsc.codegen.graph.moves import reshaped, sliced, transposed
from atsc.codegen.graph.tensor import Code, Stored, Tensor, c_index, c_type, linear, stored
from atsc.compiler.dims import Dim
from atsc.compiler.tensor_graph import OnnxNode

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_FUNCTIONS = {"Sigmoid": "sigmoid({0})", "Tanh": "tanh({0})", "Relu": "({0} > 0 ? {0} : 0)"}


@dataclass(frozen=True, slots=True)
class _Cell:
    """Operands, each stored; sizes; and the activations of each direction."""

    op: str
    x: Stored
    w: Stored
    r: Stored
    bias: Stored | None
    lengths: Stored | None
    hidden: Stored | None
    state: Stored | None
    peephole: Stored | None
    num_hidden: Dim
    directions: int
    activations: tuple[str, ...]
    clip: float
    linear_before_reset: bool
    couple: bool


def _cell(g: Lowering, node: OnnxNode, x: list[Any]) -> _Cell:
    attrs = node.attrs
    given: list[Any] = [None if v is None else g.store(v) for v in [*x, *[None] * (8 - len(x))]]
    direction = attrs.get("direction", "forward")
    count = 2 if direction == "bidirectional" else 1
    names = tuple(attrs.get("activations", _DEFAULTS[node.op] * count))
    unknown = [name for name in names if name not in _FUNCTIONS]
    if unknown or "activation_alpha" in attrs:
        raise RefusedError(f"activation {unknown[0] if unknown else names[0]} with parameters")
    data = given[0]
    if data.dtype not in ("float32", "float64"):
        raise RefusedError(f"elements of type {data.dtype}")
    if attrs.get("layout", 0):
        data = g.store(transposed(data, [1, 0, 2]))
        for place in (5, 6):
            if given[place] is not None:
                given[place] = g.store(transposed(given[place], [1, 0, 2]))
    return _Cell(
        node.op, data, given[1], given[2], given[3], given[4], given[5],
        given[6] if node.op == "LSTM" else None,
        given[7] if node.op == "LSTM" else None,
        given[2].shape[2], count, names, float(attrs.get("clip", 0.0)),
        bool(attrs.get("linear_before_reset", 0)), bool(attrs.get("input_forget", 0)),
    )  # fmt: skip


def _recurrent(g: Lowering, node: OnnxNode, x: list[Any]) -> tuple[Tensor, ...]:
    """Y [steps, directions, batch, hidden], then the last hidden (and cell) states of each row."""
    cell = _cell(g, node, x)
    steps, batch = cell.x.shape[:2]
    shape = (steps + 2, Dim.of(cell.directions), batch, cell.num_hidden)
    target = g.buffer(cell.x.dtype, shape)
    code = Code()
    kind = c_type(cell.x.dtype)
    size = code.dim(cell.num_hidden)
    with code.block("for (int64_t item = lo; item < hi; ++item)"):
        code.line(f"const int64_t row = item % {code.dim(batch)}, way = item / {code.dim(batch)};")
        code.line(f"{kind}* const h = static_cast<{kind}*>(workspace);")
        code.line(f"{kind}* const c = h + {size};")
        code.line(f"{kind}* const next = c + {size};")
        code.line(f"[[maybe_unused]] {kind}* const z = next + {size};")
        with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
            code.line(f"h[j] = {_initial(code, cell, cell.hidden)};")
            code.line(f"c[j] = {_initial(code, cell, cell.state)};")
        length = code.dim(steps)
        if cell.lengths is not None:
            own = cell.lengths.at(code, [c_index(batch, "row")])
            length = code.let("int64_t", f"least({own}, {length})", "i")
        backward = node.attrs.get("direction", "forward") == "reverse"
        is_back = "true" if backward else "way == 1"
        with code.block(f"for (int64_t step = 0; step < {code.dim(steps)}; ++step)"):
            code.line(f"const bool past = step >= {length};")
            code.line(f"const int64_t at = !past && ({is_back}) ? {length} - 1 - step : step;")
            with code.block("if (!past)"):
                _step(code, cell, kind, size)
            with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
                code.line(f"{_out(code, shape, 'at')} = past ? 0 : h[j];")
        with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
            code.line(f"{_out(code, shape, code.dim(steps))} = h[j];")
            code.line(f"{_out(code, shape, code.dim(steps + 1))} = c[j];")
    cost = steps * cell.num_hidden * cell.num_hidden * _GATES[cell.op]
    element = 8 if kind == "double" else 4
    workspace = cell.num_hidden * 4 * element
    grid = batch * cell.directions
    g.calls.append(finished_call(g.node, code, target, grid, cost, workspace))
    return _outputs(g, node, stored(target), steps)


def _outputs(g: Lowering, node: OnnxNode, all_states: Tensor, steps: Dim) -> tuple[Tensor, ...]:
    result = sliced(all_states, 0, Dim.of(0), steps)
    last = [reshaped(g, sliced(all_states, 0, steps + k, Dim.of(1)), all_states.shape[1:])
            for k in range(2)]  # fmt: skip
    if node.attrs.get("layout", 0):
        result = transposed(result, [2, 0, 1, 3])
        last = [transposed(state, [1, 0, 2]) for state in last]
    return (result, *last[: 2 if node.op == "LSTM" else 1])


def _out(code: Code, shape: tuple[Dim, ...], step: str) -> str:
    names = [step, *(c_index(s, n) for s, n in zip(shape[1:], ("way", "row", "j"), strict=True))]
    return f"out[{linear(code, shape, names)}]"


def _initial(code: Code, cell: _Cell, given: Stored | None) -> str:
    if given is None:
        return "0"
    return given.at(
        code, [c_index(s, n) for s, n in zip(given.shape, ("way", "row", "j"), strict=True)]
    )


def _gate(code: Code, cell: _Cell, kind: str, gate: int, hidden: str, split: bool = False) -> str:
    """W x + b_w + R h + b_r of one gate for unit j; with `split` its halves apart, as `a, b`."""
    names = [code.fresh("sum"), code.fresh("sum")]
    size = code.dim(cell.num_hidden)
    line = code.let("int64_t", f"{gate} * {size} + j", "i")
    rows = cell.w.shape[1]
    for name, weights, count, value in (
        (names[0], cell.w, cell.x.shape[2], None),
        (names[1], cell.r, cell.num_hidden, hidden),
    ):
        start = "0"
        if cell.bias is not None:
            half = "0" if name == names[0] else f"{_GATES[cell.op]} * {size}"
            place = code.let("int64_t", f"{half} + {line}", "i")
            start = cell.bias.at(code, [c_index(cell.bias.shape[0], "way"), place])
        code.line(f"{kind} {name} = {start};")
        with code.block(f"for (int64_t k = 0; k < {code.dim(count)}; ++k)"):
            index = [c_index(weights.shape[0], "way"), c_index(rows, line), c_index(count, "k")]
            factor = weights.at(code, index)
            if value is None:
                shape = cell.x.shape
                own = [c_index(s, n) for s, n in zip(shape, ("at", "row", "k"), strict=True)]
                operand = cell.x.at(code, own)
            else:
                operand = f"{value}[k]"
            code.line(f"{name} += {factor} * {operand};")
    return f"{names[0]}, {names[1]}" if split else f"({names[0]} + {names[1]})"


def _activate(code: Code, cell: _Cell, kind: str, which: int, value: str) -> str:
    """The activation of a place in the list, of the direction that runs, after the clip."""
    value = code.let(kind, value)
    if cell.clip:
        bound = f"({kind}){cell.clip.hex()}"
        value = code.let(kind, f"smaller<{kind}>(larger<{kind}>({value}, -{bound}), {bound})")
    each = len(_DEFAULTS[cell.op])
    first = _FUNCTIONS[cell.activations[which]].format(value)
    if cell.directions == 1 or cell.activations[which] == cell.activations[each + which]:
        return code.let(kind, first)
    return code.let(
        kind, f"way == 0 ? {first} : {_FUNCTIONS[cell.activations[each + which]].format(value)}"
    )


def _peephole(code: Code, cell: _Cell, gate: int, state: str) -> str:
    if cell.peephole is None:
        return ""
    size = code.dim(cell.num_hidden)
    place = code.let("int64_t", f"{gate} * {size} + j", "i")
    factor = cell.peephole.at(code, [c_index(cell.peephole.shape[0], "way"), place])
    return f" + {factor} * {state}"


def _step(code: Code, cell: _Cell, kind: str, size: str) -> None:
    {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[cell.op](code, cell, kind, size)
    code.line(f"for (int64_t j = 0; j < {size}; ++j) h[j] = next[j];")


def _rnn(code: Code, cell: _Cell, kind: str, size: str) -> None:
    with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
        code.line(f"next[j] = {_activate(code, cell, kind, 0, _gate(code, cell, kind, 0, 'h'))};")


def _lstm(code: Code, cell: _Cell, kind: str, size: str) -> None:
    """Gates are stored in the order input, output, forget, cell."""
    with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
        gates = [_gate(code, cell, kind, gate, "h") for gate in range(4)]
        enter = _activate(code, cell, kind, 0, gates[0] + _peephole(code, cell, 0, "c[j]"))
        keep = f"1 - {enter}"
        if not cell.couple:
            keep = _activate(code, cell, kind, 0, gates[2] + _peephole(code, cell, 2, "c[j]"))
        fresh = _activate(code, cell, kind, 1, gates[3])
        code.line(f"c[j] = ({keep}) * c[j] + {enter} * {fresh};")
        leave = _activate(code, cell, kind, 0, gates[1] + _peephole(code, cell, 1, "c[j]"))
        each = _FUNCTIONS[cell.activations[2]].format("c[j]")
        if cell.directions == 2:
            each = f"(way == 0 ? {each} : {_FUNCTIONS[cell.activations[5]].format('c[j]')})"
        code.line(f"next[j] = {leave} * {each};")


def _gru(code: Code, cell: _Cell, kind: str, size: str) -> None:
    """Gates are stored in the order update, reset, hidden; the update gate keeps the old state."""
    with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
        # z holds the reset state, or the reset gate where it is applied after the product.
        reset = _activate(code, cell, kind, 0, _gate(code, cell, kind, 1, "h"))
        code.line(f"z[j] = {reset}{'' if cell.linear_before_reset else ' * h[j]'};")
    with code.block(f"for (int64_t j = 0; j < {size}; ++j)"):
        update = _activate(code, cell, kind, 0, _gate(code, cell, kind, 0, "h"))
        if cell.linear_before_reset:
            given, recurrent = _gate(code, cell, kind, 2, "h", split=True).split(", ")
            fresh = _activate(code, cell, kind, 1, f"{given} + z[j] * {recurrent}")
        else:
            fresh = _activate(code, cell, kind, 1, _gate(code, cell, kind, 2, "z"))
        code.line(f"next[j] = (1 - {update}) * {fresh} + {update} * h[j];")


RULES: dict[tuple[str, str], Rule] = {("", op): _recurrent for op in _GATES}
