"""CPU kernels: which template, with which parameters, serves a node on an ISA level.

All decisions are here; templates loop and select. A kernel's parameters hold everything that its
code depends on and nothing else, so that equal layers share one kernel. Templates see:

    symbol, isa     the C symbol to define (also the name of its namespace), and the ISA's suffix
    op, attrs       the operator's name and its attributes
    slot, kind      by input slot: index of its first pointer in KernelArgs::in, and what it is:
                    "none", "weight", or the dtype of a value ("f32", "q8", "i32")
    width           by input slot: length of its last axis (0 if absent)
    matrix          of the operator's matrix slot: n, k, format ("int4", "int8", "f32", "f16",
                    "bf16"), tiled, block, scale ("f16", "f32"), zeros (layout.ZeroKind); else none
    outputs         which outputs are wanted
    few_rows        whether this variant serves rounds of at most 8 rows
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atsc.codegen.layout import StoredWeight
from atsc.codegen.render import render, template_exists
from atsc.codegen.toolchain import Unit
from atsc.compiler.errors import CodegenError
from atsc.compiler.ir import AttrValue, BlockFormat, DType, TensorType
from atsc.compiler.ops import OpDef

MATRIX_POINTERS = 3
FEW_ROWS = 8
"""Most rows of a round that few-rows kernels serve; runtime/src/kernel.h kFewRows."""


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """An ISA level: its suffix in names, compiler flags, and what /proc/cpuinfo must list.

    `inputs`: it serves the operators whose first input is of these kinds; none: all.
    """

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    inputs: frozenset[str] | None = None


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
AMX_FLAGS = ("-mamx-tile", "-mamx-int8")
ISA_LEVELS = (
    IsaLevel("avx2", ("-march=x86-64-v3",), _AVX2),
    IsaLevel("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    IsaLevel("avx512", ("-march=x86-64-v4",), _AVX512),
    IsaLevel("avx512vnni", _VNNI_FLAGS, _AVX512 | {"avx512_vnni"}),
    IsaLevel(
        "amx",
        (*_VNNI_FLAGS, *AMX_FLAGS),
        _AVX512 | {"avx512_vnni", "amx_tile", "amx_int8"},
        inputs=frozenset({"q8"}),
    ),
)
"""Lowest first; runtime/src/tables.h kNumIsaLevels counts them."""

Operand = TensorType | StoredWeight | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to generate: equal kernels have equal symbols."""

    template: str
    isa: IsaLevel
    symbol: str
    params: Mapping[str, Any]

    def source(self) -> str:
        """The C++ source, self-contained."""
        params = {**self.params, "symbol": self.symbol, "isa": self.isa.name}
        return render(template_path(self.template, self.isa), params)


def template_path(stem: str, isa: IsaLevel) -> str:
    """Path of a template below codegen/templates."""
    return f"cpu/{stem}__{isa.name}.cc.j2"


def pointers_of_slots(op: OpDef) -> dict[str, int]:
    """Slot -> index of its first pointer in KernelArgs::in."""
    index, first = 0, {}
    for slot in (name.rstrip("?") for name in op.inputs):
        first[slot] = index
        index += MATRIX_POINTERS if slot == op.matrix_slot else 1
    return first


def kernels_of(
    op: OpDef,
    attrs: Mapping[str, AttrValue],
    operands: Sequence[Operand],
    outputs: Sequence[bool],
    few_rows: bool,
) -> dict[str, Kernel]:
    """ISA level name -> the kernel of that level, for the levels that have a template of their own.

    Raises:
        CodegenError: there is no template at all.
    """
    stem = op.templates[0 if few_rows else -1]
    params = template_params(op, attrs, operands, outputs, few_rows)
    found = {
        isa.name: _kernel(stem, isa, params)
        for isa in ISA_LEVELS
        if template_exists(template_path(stem, isa)) and _serves(isa, params)
    }
    if ISA_LEVELS[0].name not in found:
        raise CodegenError(f"operator {op.name}: there is no template cpu/{stem}__avx2.cc.j2")
    return found


def translation_units(kernels: Iterable[Kernel]) -> list[Unit]:
    """Kernels as few translation units: one a template and ISA level, each kernel once."""
    groups: dict[tuple[str, str], dict[str, Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.template, kernel.isa.name), {})[kernel.symbol] = kernel
    return [
        Unit(
            name=f"{template}__{isa}",
            source="\n".join(kernel.source() for _, kernel in sorted(group.items())),
            flags=next(iter(group.values())).isa.flags,
        )
        for (template, isa), group in sorted(groups.items())
    ]


def _serves(isa: IsaLevel, params: Mapping[str, Any]) -> bool:
    return isa.inputs is None or next(iter(params["kind"].values())) in isa.inputs


def _kernel(stem: str, isa: IsaLevel, params: Mapping[str, Any]) -> Kernel:
    return Kernel(stem, isa, f"{symbol_stem(stem, params)}__{isa.name}", params)


def symbol_stem(stem: str, params: Mapping[str, Any]) -> str:
    """A kernel's name without its level: types, template, size, digest of all parameters."""
    digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode()).hexdigest()[:8]
    matrix = params["matrix"]
    if matrix:
        shape = (
            f"{matrix['format']}{params['kind'].get('x', '')}_{stem}_{matrix['n']}x{matrix['k']}"
        )
    else:
        shape = (
            f"{next(iter(params['kind'].values()))}_{stem}_{next(iter(params['width'].values()))}"
        )
    return f"{shape}_{digest}"


def template_params(
    op: OpDef,
    attrs: Mapping[str, AttrValue],
    operands: Sequence[Operand],
    outputs: Sequence[bool],
    few_rows: bool,
) -> dict[str, Any]:
    """What the templates of every backend see of a node; the head of this module lists it."""
    slots = [name.rstrip("?") for name in op.inputs]
    by_slot = dict(zip(slots, [*operands, *[None] * len(slots)], strict=False))
    matrix = by_slot.get(op.matrix_slot)
    full = op.complete(attrs)
    return {
        "op": op.name,
        "attrs": {key: value for key, value in full.items() if key != "layer"},
        "slot": pointers_of_slots(op),
        "kind": {slot: _kind(operand) for slot, operand in by_slot.items()},
        "width": {slot: _width(operand) for slot, operand in by_slot.items()},
        "matrix": matrix_params(matrix) if isinstance(matrix, StoredWeight) else None,
        "outputs": [bool(wanted) for wanted in outputs],
        "few_rows": few_rows and len(op.templates) > 1,
    }


def _kind(operand: Operand) -> str:
    if operand is None:
        return "none"
    return operand.dtype.value if isinstance(operand, TensorType) else "weight"


def _width(operand: Operand) -> int:
    if operand is None:
        return 0
    shape = operand.shape if isinstance(operand, TensorType) else operand.weight.shape
    last = shape[-1] if shape else 1
    return last if isinstance(last, int) else 0


def matrix_params(stored: StoredWeight) -> dict[str, Any]:
    """What templates see of a matrix: shape, format, block size, scales and zeros."""
    fmt = stored.weight.format
    return {
        "n": stored.weight.shape[0],
        "k": stored.weight.shape[1],
        "format": f"int{fmt.bits}" if isinstance(fmt, BlockFormat) else fmt.dtype.value,
        "tiled": stored.tiled,
        "block": fmt.block_size if isinstance(fmt, BlockFormat) else 0,
        "scale": stored.scale_dtype.value if isinstance(stored.scale_dtype, DType) else "",
        "zeros": stored.zero_kind,
    }
