"""The constant tables of a general graph as C++ (runtime/src/graph_tables.h)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atsc.codegen.graph.kernels import Call
from atsc.codegen.graph.lower import Program
from atsc.codegen.graph.tensor import Buffer
from atsc.codegen.render import BANNER
from atsc.codegen.tables import c_string
from atsc.codegen.tail import ELEMENT_BYTES, LEVELS, ElementType
from atsc.compiler.dims import Dim, product

ONNX_NUMBERS: dict[ElementType, int] = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9,
    "float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "bfloat16": 16,
}  # fmt: skip


class _Sizes:
    """Every size that run time needs, once, and the function that computes them."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self._names = {symbol: f"s[{place}]" for place, symbol in enumerate(symbols)}
        self._places: dict[Dim, int] = {}

    def place(self, size: Dim) -> int:
        """Where a size stands."""
        return self._places.setdefault(size, len(self._places))

    @property
    def count(self) -> int:
        """Sizes; one at least, since C++ has no empty arrays."""
        return max(len(self._places), 1)

    def source(self) -> str:
        """The function."""
        lines = [f"  v[{place}] = {size.c(self._names)};\n" for size, place in self._places.items()]
        return (
            "void evaluate([[maybe_unused]] const int64_t* s, [[maybe_unused]] int64_t* v) {\n"
            f"{''.join(lines)}}}\n"
        )


def graph_tables_source(
    program: Program,
    offsets: Mapping[Buffer, int],
    name: str,
    plan_id: str,
    weights: tuple[int, int],
) -> str:
    """The C++ source that defines `atsc::kPlan`.

    Args:
        program: the calls.
        offsets: of constants in weights.bin.
        name: the model's.
        plan_id: the plan's.
        weights: bytes and crc32 of weights.bin.
    """
    symbols = sorted(
        {symbol for buffer in program.inputs for size in buffer.shape for symbol in size.symbols()}
    )
    sizes = _Sizes(symbols)
    body = [
        *_tensors(program, symbols, sizes),
        *_buffers(program, sizes),
        *_calls(program, offsets, sizes),
        *_checks(program, sizes),
    ]
    kernels = sorted({name for call in program.calls for name in _symbols(call)})
    num_bytes, crc32 = weights
    texts = ", ".join(c_string(symbol) for symbol in symbols) or "nullptr"
    counts = (
        len(symbols), sizes.count, len(program.inputs), len(program.outputs),
        len(program.temporaries), len(program.calls), len(program.checks),
    )  # fmt: skip
    numbers = "{}, {}, kSymbols, {}, {}, {}, {}, {}".format(*counts)
    lines = [
        BANNER.format(name="graph/tables.py (codegen)"),
        '#include "graph_math.h"',
        '#include "tables.h"',
        'extern "C" {',
        *(
            f"int32_t {kernel}(void* const*, const int64_t*, void*, int64_t, int64_t);"
            for kernel in kernels
        ),
        "}",
        "namespace atsc {",
        "namespace {",
        sizes.source(),
        f"constexpr const char* kSymbols[] = {{{texts}}};",
        *body,
        f"constexpr GraphTables kGraph = {{evaluate, {numbers},",
        "    kInputs, kOutputs, kBuffers, kCalls, kChecks};",
        'constexpr UnitEntry kUnits[] = {{"constants", 0, '
        f"{num_bytes}ull, {crc32:#x}u, UnitKind::kWeights}}}};",
        "}  // namespace",
        # A round of one token would be the smallest; there are none.
        f"const Plan kPlan = {{.abi_version = kAbiVersion, .model_name = {c_string(name)},",
        f"    .plan_id = {c_string(plan_id)}, .vocab_size = 1, .context_length = 1, .chunk = 1,",
        "    .max_logit_rows = 1, .bos_token_id = -1, .num_eos_token_ids = 0,",
        "    .eos_token_ids = nullptr, .arena_bytes = 64, .private_arena_bytes = 64,",
        f"    .weights_bytes = {num_bytes}ull, .num_values = 0, .num_nodes = 0, .num_units = 1,",
        "    .num_caches = 0, .values = nullptr, .nodes = nullptr, .units = kUnits,",
        "    .caches = nullptr, .graph = &kGraph};",
        "}  // namespace atsc",
        "",
    ]
    return "\n".join(lines)


def _array(kind: str, name: str, rows: Sequence[str], empty: str) -> str:
    """An array; of one unused entry where there is none."""
    return f"constexpr {kind} {name}[] = {{\n    " + ",\n    ".join(rows or [empty]) + "};"


def _tensors(program: Program, symbols: Sequence[str], sizes: _Sizes) -> list[str]:
    lines = []
    for name, buffers in (("kInputs", program.inputs), ("kOutputs", program.outputs)):
        rows = []
        for number, buffer in enumerate(buffers):
            shape = f"{name}Shape{number}"
            entries = [
                str(_input_size(size, symbols) if name == "kInputs" else sizes.place(size))
                for size in buffer.shape
            ]
            lines.append(f"constexpr int64_t {shape}[] = {{{', '.join(entries) or '0'}}};")
            rows.append(
                f"{{{c_string(buffer.name)}, {ONNX_NUMBERS[buffer.dtype]}, "
                f"{ELEMENT_BYTES[buffer.dtype]}, {len(buffer.shape)}, {shape}}}"
            )
        lines.append(_array("GraphTensor", name, rows, "{nullptr, 0, 0, 0, nullptr}"))
    return lines


def _input_size(size: Dim, symbols: Sequence[str]) -> int:
    """A size, or -1 - symbol."""
    return -1 - symbols.index(str(size)) if size.constant is None else size.constant


def _buffers(program: Program, sizes: _Sizes) -> list[str]:
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for number, call in enumerate(program.calls):
        for buffer in (*call.inputs, *call.outputs):
            first.setdefault(buffer, number)
            last[buffer] = number
    rows = [
        f"{{{sizes.place(product(buffer.shape))}, {ELEMENT_BYTES[buffer.dtype]}, "
        f"{first[buffer]}, {last[buffer]}}}"
        for buffer in program.temporaries
    ]
    return [_array("GraphBuffer", "kBuffers", rows, "{0, 0, 0, 0}")]


def _calls(program: Program, offsets: Mapping[Buffer, int], sizes: _Sizes) -> list[str]:
    places = {
        **{buffer: ("kInput", place) for place, buffer in enumerate(program.inputs)},
        **{buffer: ("kConstant", offset) for buffer, offset in offsets.items()},
        **{buffer: ("kBuffer", place) for place, buffer in enumerate(program.temporaries)},
        **{buffer: ("kOutput", place) for place, buffer in enumerate(program.outputs)},
    }
    lines, rows = [], []
    for number, call in enumerate(program.calls):
        operands = [
            f"{{GraphMemory::{memory}, {index}ull}}"
            for memory, index in (places[b] for b in (*call.inputs, *call.outputs))
        ]
        lines.append(f"constexpr GraphOperand kOperands{number}[] = {{{', '.join(operands)}}};")
        dims = [str(sizes.place(size)) for size in call.symbols] or ["0"]
        lines.append(f"constexpr int32_t kDims{number}[] = {{{', '.join(dims)}}};")
        numbers = ", ".join(str(sizes.place(size)) for size in _run_sizes(call))
        rows.append(
            f"{{{c_string(call.node)}, {{{', '.join(_symbols(call))}}}, "
            f"{len(operands)}, {len(call.symbols)}, "
            f"kOperands{number}, kDims{number}, {numbers}}}"
        )
    empty = "{nullptr, {}, 0, 0, nullptr, nullptr, 0, 0, 0}"
    return [*lines, _array("GraphCall", "kCalls", rows, empty)]


def _symbols(call: Call) -> list[str]:
    """The kernel at each level."""
    return [call.kernel.symbol(level) for level in LEVELS]


def _run_sizes(call: Call) -> list[Dim]:
    """Grid, workspace and cost in the graph's own symbols."""
    values = dict(zip(call.kernel.symbols, call.symbols, strict=True))
    kernel = call.kernel
    sizes = (kernel.grid, kernel.workspace_bytes, kernel.item_cost)
    return [size.substitute(values) for size in sizes]


def _checks(program: Program, sizes: _Sizes) -> list[str]:
    rows = [
        f"{{{sizes.place(check.left)}, {sizes.place(check.right)}, {c_string(str(check.left))}, "
        f"{c_string(str(check.right))}, {c_string(check.what)}, {str(check.is_least).lower()}}}"
        for check in program.checks
    ]
    return [_array("GraphCheck", "kChecks", rows, "{0, 0, nullptr, nullptr, nullptr, false}")]
