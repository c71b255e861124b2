"""From tensors to kernels: a loop over all elements of a tensor, and tiles of a matrix product."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atsc.codegen.graph.tensor import C_TYPES, Buffer, Code, Index, Tensor, c_index, c_type, linear
from atsc.codegen.render import TEMPLATES
from atsc.codegen.tail import FLOAT_LEVELS, LEVELS, TailKernel, TensorType
from atsc.compiler.dims import Dim, product

_GEMM_ROWS, _GEMM_COLUMNS = 96, 64  # kTileRows, kTileColumns of templates/graph/gemm.h
_GEMM_WORKSPACE_ELEMENTS = 96 * 256 + 256 * 64 + 96 * 64
_OWN_FILE = (
    "#pragma once",
    *(f'#include "{name}"' for name in ("scalar.h", "level.h", "tile_strips.h")),
)


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and what it is called with."""

    node: str
    """The node that it computes the end of, for messages."""
    kernel: TailKernel
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    symbols: tuple[Dim, ...]
    """The values of the kernel's symbols."""


def map_call(node: str, tensor: Tensor, target: Buffer) -> Call:
    """Store all elements of a tensor; an item of the grid is an element."""
    code = Code()
    out = f"out[{'p + j' if tensor.rank else '0'}]"
    index = [f"x{axis}" for axis in range(tensor.rank)]
    if not tensor.rank:
        with code.block("for (int64_t p = lo; p < hi; ++p)"):
            code.line(f"{out} = {code.as_stored(tensor.dtype, tensor.at(code, []))};")
    else:
        code.line("int64_t p = lo;")
        with code.block("while (p < hi)"):
            code.line("[[maybe_unused]] int64_t rest = p;")
            for axis in reversed(range(tensor.rank)):
                size = code.dim(tensor.shape[axis])
                last = "first" if axis == tensor.rank - 1 else index[axis]
                value = "rest" if axis == 0 else f"rest % {size}"
                code.line(f"[[maybe_unused]] const int64_t {last} = {value};")
                if axis:
                    code.line(f"rest /= {size};")
            row = code.dim(tensor.shape[-1])
            code.line(f"const int64_t n = least(hi - p, {row} - first);")
            with code.block("for (int64_t j = 0; j < n; ++j)"):
                code.line(f"[[maybe_unused]] const int64_t {index[-1]} = first + j;")
                at = [c_index(size, x) for size, x in zip(tensor.shape, index, strict=True)]
                code.line(f"{out} = {code.as_stored(tensor.dtype, tensor.at(code, at))};")
            code.line("p += n;")
    return finished_call(node, code, target, tensor.size, Dim.of(1 + tensor.cost))


def product_call(
    node: str,
    left: Tensor,
    right: Tensor,
    target: Buffer,
    batch: Sequence[Dim],
    store: Callable[[Code, Index, str], str] | None = None,
) -> Call:
    """Store left [batch.., M, K] times right [batch.., K, N] as [batch.., M, N].

    Batches of operands may be 1. An item of the grid is a tile. `store` finishes an element.
    """
    code = Code()
    kind = c_type(left.dtype)
    num_m, num_k, num_n = left.shape[-2], left.shape[-1], right.shape[-1]
    tiles_m = (num_m + (_GEMM_ROWS - 1)) // _GEMM_ROWS
    tiles_n = (num_n + (_GEMM_COLUMNS - 1)) // _GEMM_COLUMNS
    code.headers["gemm.h"] = None
    at = [f"b{axis}" for axis in range(len(batch))]
    with code.block("for (int64_t item = lo; item < hi; ++item)"):
        code.line("[[maybe_unused]] int64_t rest = item;")
        # Tiles below each other come one after the other: they read the same columns.
        for name, size in reversed(
            [*zip(at, batch, strict=True), ("tile_n", tiles_n), ("tile_m", tiles_m)]
        ):
            code.line(f"[[maybe_unused]] const int64_t {name} = rest % {code.dim(size)};")
            code.line(f"rest /= {code.dim(size)};")
        code.line(f"gemm_tile<{kind}>({', '.join(map(code.dim, (num_m, num_n, num_k)))},")
        code.line(f"    tile_m * {_GEMM_ROWS}, tile_n * {_GEMM_COLUMNS}, workspace,")
        for operand, names in ((left, ("m", "k")), (right, ("k", "n"))):
            declared = ", ".join(f"[[maybe_unused]] int64_t {name}" for name in names)
            with code.block(f"    [&]({declared}) -> {kind}"):
                index = [c_index(s, x) for s, x in zip(operand.shape, [*at, *names], strict=True)]
                code.line(f"return {operand.at(code, index)};")
            code.lines[-1] += ","
        with code.block(f"    [&](int64_t m, int64_t n, {kind} sum)"):
            value = store(code, [*at, "m", "n"], "sum") if store else "sum"
            place = linear(code, [*batch, num_m, num_n], [*at, "m", "n"])
            code.line(f"out[{place}] = {code.as_stored(target.dtype, value)};")
        code.lines[-1] += ");"
    element = 8 if kind in ("double", "int64_t", "uint64_t") else 4
    return finished_call(
        node,
        code,
        target,
        product([*batch, tiles_m, tiles_n]),
        num_k * 16,
        workspace=element * _GEMM_WORKSPACE_ELEMENTS,
        flags=("-ffp-contract=fast",),
    )


def header_text(name: str) -> str:
    """A header of templates/graph, without what only matters to a file of its own."""
    lines = (TEMPLATES / "graph" / name).read_text("utf-8").splitlines()
    return "\n".join(line for line in lines if line not in _OWN_FILE) + "\n"


def rows_call(
    node: str,
    x: Tensor,
    axes: int,
    target: Buffer,
    finish: Callable[[Code, str, Index], None],
) -> Call:
    """Store x row by row, each row finished in place; an item of the grid is a row.

    Args:
        node: for messages.
        x: float32, read once.
        axes: how many of its last dimensions make a row.
        target: of x's shape.
        finish: appends statements that work on `row`, with the row's length and outer index.
    """
    code = Code()
    code.headers |= {"level.h": None, "rows.h": None}
    outer, inner = x.shape[: x.rank - axes], x.shape[x.rank - axes :]
    length = code.dim(product(inner))
    with code.block("for (int64_t item = lo; item < hi; ++item)"):
        code.line(f"float* const row = out + item * {length};")
        index = code.split("item", outer)
        with code.block(f"for (int64_t j = 0; j < {length}; ++j)"):
            code.line(f"row[j] = {x.at(code, [*index, *code.split('j', inner)])};")
        finish(code, length, index)
    cost = product(inner) * (8 + x.cost)
    return finished_call(node, code, target, product(outer), cost)


def finished_call(
    node: str,
    code: Code,
    target: Buffer,
    grid: Dim,
    item_cost: Dim,
    workspace: Dim | int = 0,
    flags: tuple[str, ...] = (),
) -> Call:
    """A kernel from its statements, which write to `out`."""
    levels: tuple[str, ...] = ()
    if "level.h" in code.headers:
        levels = tuple(LEVELS) if "product_i8.h" in code.headers else FLOAT_LEVELS
    inputs = tuple(code.buffers)
    head = []
    for buffer, name in code.buffers.items():
        place = int(name[1:])
        kind = C_TYPES[buffer.dtype]
        head.append(f"  const {kind}* const {name} = static_cast<const {kind}*>(tensors[{place}]);")
    kind = C_TYPES[target.dtype]
    # The output is nobody's input.
    head.append(f"  {kind}* __restrict__ const out = static_cast<{kind}*>(tensors[{len(inputs)}]);")
    symbols = {symbol: f"d{place}" for place, symbol in enumerate(code.symbols)}
    sizes = [grid, Dim.of(workspace), item_cost]
    sizes += [size for buffer in (*inputs, target) for size in buffer.shape]
    extra = sorted(frozenset().union(*(size.symbols() for size in sizes)))
    for place, name in enumerate(code.symbols.values()):
        head.append(f"  const int64_t {name} = dims[{place}];")
    for symbol in extra:
        symbols.setdefault(symbol, f"d{len(symbols)}")
    if code.may_fail:
        head.append("  bool failed = false;")
    body = "\n".join([*head, *code.lines, f"  return {'failed' if code.may_fail else '0'};"])
    text = (
        "(void* const* tensors, [[maybe_unused]] const int64_t* dims,\n"
        "    [[maybe_unused]] void* workspace, int64_t lo, int64_t hi) {\n"
        f"  using namespace atsc::graph;\n{body}\n}}\n"
    )
    identity = "".join([text, *code.headers, *flags])
    name = f"graph_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    rename = {symbol: Dim.of(local) for symbol, local in symbols.items()}
    kernel = TailKernel(
        name=name,
        source=f'extern "C" int32_t {f"ATSC_LEVEL({name})" if levels else name}{text}',
        headers=tuple(code.headers),
        inputs=tuple(_type_of(buffer, rename) for buffer in inputs),
        outputs=(_type_of(target, rename),),
        symbols=tuple(symbols.values()),
        grid=grid.substitute(rename),
        workspace_bytes=Dim.of(workspace).substitute(rename),
        item_cost=item_cost.substitute(rename),
        flags=flags,
        levels=levels,
    )
    return Call(node, kernel, inputs, (target,), tuple(Dim.of(symbol) for symbol in symbols))


def _type_of(buffer: Buffer, rename: dict[str, Dim]) -> TensorType:
    """A buffer's type in the kernel's own symbols."""
    return TensorType(buffer.dtype, tuple(size.substitute(rename) for size in buffer.shape))
