"""The plan's constant tables as C++ (runtime/src/tables.h), one translation unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atsc.codegen.cpu import ISA_LEVELS, Kernel, pointers_of_slots
from atsc.codegen.device_tables import (
    DeviceTables,
    device_declarations,
    device_entry,
    device_kernels_of,
    unit_times,
)
from atsc.codegen.render import BANNER
from atsc.codegen.storage import Storage
from atsc.compiler.ir import LOGIT_ROWS, Graph, Node
from atsc.compiler.ops import op_of
from atsc.passes.allocate import Allocation
from atsc.passes.partition import Schedule, UnitKind

MAX_INPUTS, MAX_OUTPUTS = 20, 2
NO_OPERAND = "{OperandKind::kNone, 0}"


@dataclass(frozen=True, slots=True)
class NodeKernels:
    """The kernels of a node: ISA level name -> kernel, for few rows and for many."""

    few_rows: Mapping[str, Kernel]
    many_rows: Mapping[str, Kernel]


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache of one attention node."""

    kv_heads: int
    head_size: int
    window: int
    capacity: int

    @property
    def num_bytes(self) -> int:
        """K and V of one session, fp16."""
        return 4 * self.kv_heads * self.head_size * self.capacity


@dataclass(frozen=True, slots=True)
class TableInputs:
    """Everything that the tables are written from."""

    graph: Graph
    schedule: Schedule
    allocation: Allocation
    kernels: Sequence[NodeKernels]
    storage: Storage
    unit_crc32: Sequence[int]
    unit_of_node: Mapping[int, int]
    caches: Sequence[Cache]
    plan_id: str
    context_length: int
    chunk: int
    max_logit_rows: int
    device: DeviceTables | None = None


def tables_source(t: TableInputs) -> str:
    """The C++ source that defines `atsc::kPlan`."""
    value_names = sorted(t.allocation.shared)
    value_index = {name: index for index, name in enumerate(value_names)}
    symbols = sorted(
        {
            kernel.symbol
            for kernels in t.kernels
            for level in (kernels.few_rows, kernels.many_rows)
            for kernel in level.values()
        }
    )
    info = t.graph.info
    eos = ", ".join(map(str, info.eos_token_ids)) or "-1"
    nodes = ",\n".join(_node(t, index, value_index) for index in range(len(t.graph.nodes)))
    lines = [
        BANNER.format(name="tables.py (codegen)"),
        '#include "tables.h"',
        'extern "C" {',
        *(f"extern const atsc::CpuKernel {symbol};" for symbol in symbols),
        "}",
        "namespace atsc {",
        "namespace {",
        f"constexpr int32_t kEosTokenIds[] = {{{eos}}};",
        f"constexpr ValueEntry kValues[] = {{\n{_values(t, value_names)}}};",
        *device_declarations(t.device),
        f"constexpr NodeEntry kNodes[] = {{\n{nodes}}};",
        f"constexpr UnitEntry kUnits[] = {{\n{_units(t)}}};",
        f"constexpr CacheEntry kCaches[] = {{\n{_caches(t)}}};",
        "}  // namespace",
        f"static_assert(kNumIsaLevels == {len(ISA_LEVELS)} && kMaxInputs == {MAX_INPUTS});",
        "const Plan kPlan = {",
        f"    kAbiVersion, {c_string(info.name)}, {c_string(t.plan_id)}, {info.vocab_size},",
        f"    {t.context_length}, {t.chunk}, {t.max_logit_rows},",
        f"    {-1 if info.bos_token_id is None else info.bos_token_id},",
        f"    {len(info.eos_token_ids)}, kEosTokenIds,",
        f"    {t.allocation.arena_bytes}ull, {t.allocation.private_arena_bytes}ull,",
        f"    {t.storage.num_bytes}ull, {len(value_names)}, {len(t.graph.nodes)},",
        f"    {len(t.storage.units)}, {len(t.caches)}, kValues, kNodes, kUnits, kCaches,",
        f"    {device_entry(t.device)}}};",
        "}  // namespace atsc",
        "",
    ]
    return "\n".join(lines)


def c_string(text: str) -> str:
    """A C++ string literal; non-ASCII as octal escapes of its UTF-8 bytes."""
    escaped = "".join(
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\?' else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{escaped}"'


def _values(t: TableInputs, names: Sequence[str]) -> str:
    rows = []
    for name in names:
        shared, private = t.allocation.shared[name], t.allocation.private.get(name)
        place = f"{private.offset}ull" if private else "kNotPrivate"
        kind = t.graph.values[name]
        numbers = f"{shared.offset}ull, {shared.num_bytes}ull, {place}"
        value_type = f"ValueType::k{kind.dtype.name}, {kind.shape[-1]}"
        rows.append(f"    {{{numbers}, {value_type}}},  // {name}\n")
    return "".join(rows)


def _units(t: TableInputs) -> str:
    kinds = {
        UnitKind.SHARED: "kShared",
        UnitKind.HOST: "kHost",
        UnitKind.KV_CACHE: "kKvCache",
        UnitKind.WEIGHTS: "kWeights",
    }
    units = zip(t.storage.units, t.unit_crc32, strict=True)
    return "".join(
        f"    {{{c_string(unit.name)}, {unit.offset}ull, {unit.bytes}ull, {crc:#x}u, "
        f"UnitKind::{kinds[unit.kind]}, {unit_times(t.device, index)}}},\n"
        for index, (unit, crc) in enumerate(units)
    )


def _caches(t: TableInputs) -> str:
    rows = [f"    {{{c.kv_heads}, {c.head_size}, {c.window}, {c.capacity}}},\n" for c in t.caches]
    return "".join(rows) or "    {0, 0, 0, 0},\n"


def _node(t: TableInputs, index: int, value_index: Mapping[str, int]) -> str:
    node = t.graph.nodes[index]
    kernels = t.kernels[index]
    first_output = t.graph.values[next(filter(None, node.outputs))]
    rows = "kLogitRows" if first_output.shape[0] == LOGIT_ROWS else "kTokens"
    flags = [
        flag
        for flag, wanted in (
            ("kReplicate", t.schedule.replicated[index]),
            ("kAligned", t.schedule.aligned[index]),
        )
        if wanted
    ]
    outputs = [_operand(t, name, value_index) for name in node.outputs]
    layer = int(node.attrs["layer"]) if node.op == "attention" else -1  # type: ignore[arg-type]
    return "\n".join(
        [
            f"    {{{c_string(node.name)}, {c_string(node.op)},",
            f"     {_levels(kernels.few_rows)},",
            f"     {_levels(kernels.many_rows)},",
            f"     {{{', '.join(_inputs(t, node, value_index))}}},",
            f"     {{{', '.join(_pad(outputs, MAX_OUTPUTS))}}},",
            f"     RowsOf::{rows}, {' | '.join(flags) or '0'},",
            f"     {t.schedule.group[index]}, {t.unit_of_node[index]}, {layer},",
            f"     {device_kernels_of(t.device, index)}}}",
        ]
    )


def _levels(kernels: Mapping[str, Kernel]) -> str:
    """A pointer a level; null where a level has no kernel of its own and uses one below."""
    pointers = (
        f"&{kernels[level.name].symbol}" if level.name in kernels else "nullptr"
        for level in ISA_LEVELS
    )
    return f"{{{', '.join(pointers)}}}"


def _pad(operands: Sequence[str], count: int) -> list[str]:
    return [*operands, *[NO_OPERAND] * (count - len(operands))]


def _inputs(t: TableInputs, node: Node, value_index: Mapping[str, int]) -> list[str]:
    op = op_of(node)
    operands = _pad([], MAX_INPUTS)
    for slot, first in pointers_of_slots(op).items():
        name = op.slot(node, slot)
        if name in t.storage.part_offsets:
            for place, offset in enumerate(t.storage.part_offsets[name]):
                operands[first + place] = f"{{OperandKind::kWeight, {offset}ull}}"
        elif name:
            operands[first] = _operand(t, name, value_index)
    while operands and operands[-1] == NO_OPERAND:
        operands.pop()
    return operands


def _operand(t: TableInputs, name: str, value_index: Mapping[str, int]) -> str:
    if not name:
        return NO_OPERAND
    if any(name == value.name for value in t.graph.inputs):
        return "{OperandKind::kTokenIds, 0}"
    if any(name == value.name for value in t.graph.outputs):
        return "{OperandKind::kLogits, 0}"
    return f"{{OperandKind::kValue, {value_index[name]}}}"
