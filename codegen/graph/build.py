"""From a general graph to its library: kernels, constants, tables."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from atsc.codegen.build import (
    RUNTIME_FLAGS,
    VERSION_SCRIPT,
    Progress,
    runtime_units,
)
from atsc.codegen.graph.generated import generated
from atsc.codegen.graph.kernels import header_text
from atsc.codegen.graph.lower import Program, lower
from atsc.codegen.graph.rules import RULES
from atsc.codegen.graph.tables import graph_tables_source
from atsc.codegen.graph.tensor import Buffer
from atsc.codegen.layout import align
from atsc.codegen.render import BANNER
from atsc.codegen.tail import FLOAT_LEVELS, LEVELS, TailKernel
from atsc.codegen.toolchain import Compiler, Unit, compile_units, find_compiler, link_library
from atsc.compiler.tensor_graph import TensorGraph

KERNEL_FLAGS = ("-mtune=generic", "-fno-trapping-math")
"""No kernel looks at the exceptions that traps are about, and choices become vectors without."""
_TILE_OF = {"product.h": "tile_f32.h", "product_i8.h": "tile_i8.h"}
"""By the header that declares it."""
_KERNELS_OF_UNIT = 6
_CONSTANT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class GraphCode:
    """A general graph as kernels, with the objects that hold them."""

    name: str
    program: Program
    offsets: dict[Buffer, int]
    """Of constants in weights.bin."""
    objects: tuple[Path, ...]
    compiler: Compiler

    @property
    def kernels(self) -> list[TailKernel]:
        """Each once."""
        return _distinct(self.program)

    @property
    def weights_bytes(self) -> int:
        """Of weights.bin; never empty, since it is mapped."""
        ends = [o + self.program.constants[b].num_bytes for b, o in self.offsets.items()]
        return align(max(ends, default=1), _CONSTANT_ALIGNMENT)

    def weights(self) -> Iterator[bytes]:
        """The content of weights.bin, piece by piece."""
        position = 0
        for buffer, offset in self.offsets.items():
            data = self.program.constants[buffer].read().tobytes()
            yield bytes(offset - position)
            yield data
            position = offset + len(data)
        yield bytes(self.weights_bytes - position)


def has_rule(domain: str, op: str) -> bool:
    """Whether an operator is compiled as it is, instead of as its function's body."""
    return (domain, op) in RULES


def generate_graph(
    graph: TensorGraph, progress: Progress | None = None, toolchain: str | None = None
) -> GraphCode:
    """Make and compile the kernels of a graph, and the runtime.

    Raises:
        UnsupportedError: an operator that no kernel computes; all of them in one message.
        CodegenError: the compiler fails.
    """
    program, compiler = lower(graph, RULES, generated), find_compiler(toolchain)
    offsets, end = {}, 0
    for buffer, constant in program.constants.items():
        offsets[buffer] = align(end, _CONSTANT_ALIGNMENT)
        end = offsets[buffer] + constant.num_bytes
    units = [*_units(program), *runtime_units()]

    def compiled(done: int, total: int) -> None:
        if progress:
            progress("compiling kernels", done, total)

    objects = compile_units(units, compiled, compiler)
    return GraphCode(graph.name, program, offsets, tuple(objects), compiler)


def build_graph_library(code: GraphCode, plan_id: str, crc32: int, output: Path) -> Path:
    """Compile the tables and link everything into a shared library.

    Raises:
        CodegenError: the compiler or the linker fails.
    """
    weights = (code.weights_bytes, crc32)
    tables = graph_tables_source(code.program, code.offsets, code.name, plan_id, weights)
    flags = (*RUNTIME_FLAGS, "-O1")  # data, and one function that runs when sizes change
    objects = compile_units([Unit("tables", tables, flags)], compiler=code.compiler)
    exports = f"-Wl,--version-script={VERSION_SCRIPT}"
    link_library([*code.objects, *objects], output, (exports,), code.compiler)
    return output


def crc32_of(code: GraphCode) -> int:
    """The checksum of weights.bin."""
    crc = 0
    for data in code.weights():
        crc = zlib.crc32(data, crc)
    return crc


def _distinct(program: Program) -> list[TailKernel]:
    found = {call.kernel.name: call.kernel for call in program.calls}
    return [found[name] for name in sorted(found)]


def _units(program: Program) -> list[Unit]:
    """Translation units: kernels of the same headers and flags, a few in each."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], list[TailKernel]] = {}
    units = []
    for kernel in _distinct(program):
        if kernel.headers:
            key = (kernel.headers, kernel.flags, kernel.levels)
            groups.setdefault(key, []).append(kernel)
        else:
            flags = (*LEVELS["avx2"], *KERNEL_FLAGS, *kernel.flags)
            units.append(Unit(kernel.name, kernel.source, flags))
    for (headers, flags, levels), kernels in groups.items():
        head = "".join(map(header_text, headers))
        for begin in range(0, len(kernels), _KERNELS_OF_UNIT):
            part = kernels[begin : begin + _KERNELS_OF_UNIT]
            text = "\n".join([BANNER.format(name="graph"), head, *(k.source for k in part)])
            units += _at_levels(f"graph_{part[0].name}", text, flags, levels)
    return [*units, *tile_units(_distinct(program))]


def tile_units(kernels: Iterable[TailKernel], flags: tuple[str, ...] = ()) -> list[Unit]:
    """The register tiles that products of matrices call; the same for all graphs."""
    called = {
        _TILE_OF[header] for kernel in kernels for header in kernel.headers if header in _TILE_OF
    }
    return [
        unit
        for tile in sorted(called)
        for unit in _at_levels(
            f"graph_{tile.removesuffix('.h')}",
            "".join(map(header_text, ("level.h", "tile_strips.h", tile))),
            flags,
            FLOAT_LEVELS if tile == "tile_f32.h" else tuple(LEVELS),
        )
    ]


def _at_levels(name: str, text: str, flags: tuple[str, ...], levels: tuple[str, ...]) -> list[Unit]:
    return [
        Unit(f"{name}__{level}" if levels else name, text, (*LEVELS[level], *KERNEL_FLAGS, *flags))
        for level in levels or ("avx2",)
    ]
