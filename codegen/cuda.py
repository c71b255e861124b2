"""CUDA kernels: which template, with which parameters and launch, serves a node on a GPU.

Templates see what CPU templates see (codegen/cpu.py), and `tile`: the sizes that cuda_tiles.py
chose for this GPU (empty where it chooses none). The level in a template's name, `__sm75`, is the
lowest compute capability that it runs on; the highest template that the GPU reaches serves it.

How a kernel is launched stands in its template, in comments that hold C++ integer expressions of
`rows` (of this launch), `kv_capacity` and `num_sms` (of the GPU that runs it):

    //@ block    threads of a block, a constant
    //@ shared   bytes of dynamic shared memory, a constant
    //@ grid     blocks along x, and where there are more: y, z
    //@ scratch  bytes of scratch
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atsc.codegen.cpu import Operand, symbol_stem, template_params
from atsc.codegen.cuda_tiles import Gpu, is_served, tile_of, variant_of
from atsc.codegen.nvrtc import CudaUnit
from atsc.codegen.render import TEMPLATES, render, template_exists
from atsc.compiler.errors import CodegenError
from atsc.compiler.ir import AttrValue
from atsc.compiler.ops import OpDef

SM_LEVELS = (75, 80, 86, 89, 90, 120)
"""Compute capabilities that kernels are compiled and tested for."""

_LAUNCH_LINE = re.compile(r"^//@ (\w+) +(.+?)\s*$", re.MULTILINE)
_NAMES = frozenset({"rows", "kv_capacity", "num_sms"})


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch a kernel; strings are C++ integer expressions."""

    block: int
    shared_bytes: int
    grid: tuple[str, ...]
    scratch_bytes: str

    def grid_of(self, **values: int) -> tuple[int, int, int]:
        """The grid for `rows`, `kv_capacity` and `num_sms`."""
        sizes = [evaluate(expression, values) for expression in self.grid]
        x, y, z = [*sizes, 1, 1][:3]
        return x, y, z

    def scratch_of(self, **values: int) -> int:
        """Bytes of scratch for `rows`, `kv_capacity` and `num_sms`."""
        return evaluate(self.scratch_bytes, values)


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel to generate: equal kernels have equal symbols."""

    template: str
    level: int
    symbol: str
    params: Mapping[str, Any]

    def source(self) -> str:
        """The CUDA C++ source, self-contained but for the headers of nvrtc.BASE_OPTIONS."""
        params = {**self.params, "symbol": self.symbol}
        return render(template_path(self.template, self.level), params)

    def launch(self) -> Launch:
        """The launch that the template asks for.

        Raises:
            CodegenError: the template's launch lines are incomplete.
        """
        return launch_in(self.source(), template_path(self.template, self.level))


def template_path(stem: str, level: int) -> str:
    """Path of a template below codegen/templates."""
    return f"cuda/{stem}__sm{level}.cu.j2"


@functools.cache
def level_of(stem: str, sm: int) -> int | None:
    """The highest level with a template that a GPU reaches; None without any."""
    levels = [sm_level for sm_level in SM_LEVELS if sm_level <= sm]
    found = [level for level in levels if template_exists(template_path(stem, level))]
    return found[-1] if found else None


def has_cuda_template(op: OpDef) -> bool:
    """Whether any template, of whatever variant and level, serves an operator."""
    folder = TEMPLATES / "cuda"
    return any(any(folder.glob(f"{stem}*__sm*.cu.j2")) for stem in op.templates)


def kernel_of(
    op: OpDef,
    attrs: Mapping[str, AttrValue],
    operands: Sequence[Operand],
    outputs: Sequence[bool],
    few_rows: bool,
    gpu: Gpu,
) -> CudaKernel | None:
    """The kernel of a node on a GPU; None if no CUDA template serves it."""
    if not op.templates:
        return None
    params = template_params(op, attrs, operands, outputs, few_rows)
    if not is_served(op.name, params):
        return None
    stem = op.templates[0 if few_rows else -1] + variant_of(op.name, params, gpu)
    level = level_of(stem, gpu.sm)
    if level is None:
        return None
    params["tile"] = tile_of(stem, params, gpu)
    return CudaKernel(stem, level, f"{symbol_stem(stem, params)}__sm{level}", params)


def translation_units(kernels: Iterable[CudaKernel], sm: int, ptx: bool = False) -> list[CudaUnit]:
    """Kernels as few translation units, one a template, each kernel once."""
    groups: dict[str, dict[str, CudaKernel]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.template, {})[kernel.symbol] = kernel
    return [
        CudaUnit(
            name=template,
            source="\n".join(kernel.source() for _, kernel in sorted(group.items())),
            sm=sm,
            ptx=ptx,
        )
        for template, group in sorted(groups.items())
    ]


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """A C++ expression of non-negative integers, names, `+ - * / %` and parentheses.

    Raises:
        CodegenError: it holds anything else.
    """
    tokens = re.findall(r"\d+|\w+|\S", expression)
    unknown = [t for t in tokens if not (t.isdigit() or t in _NAMES or t in "+-*/%()")]
    if unknown:
        raise CodegenError(f"launch expression {expression!r} holds {unknown[0]!r}")
    return int(eval("".join(tokens).replace("/", "//"), {"__builtins__": {}}, dict(values)))


def launch_in(source: str, path: str) -> Launch:
    """The launch lines of a rendered template; `path` is for messages."""
    lines = dict(_LAUNCH_LINE.findall(source))
    missing = {"block", "shared", "grid", "scratch"} - lines.keys()
    if missing:
        raise CodegenError(f"template {path} has no launch line //@ {min(missing)}")
    return Launch(
        block=evaluate(lines["block"], {}),
        shared_bytes=evaluate(lines["shared"], {}),
        grid=tuple(part.strip() for part in lines["grid"].split(",")),
        scratch_bytes=lines["scratch"],
    )
