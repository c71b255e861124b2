"""From a graph to kernels, and from kernels and tables to libplan.so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from atsc.codegen.cpu import Kernel, Operand, kernels_of, translation_units
from atsc.codegen.layout import StoredWeight
from atsc.codegen.storage import Storage
from atsc.codegen.tables import NodeKernels
from atsc.codegen.toolchain import (
    RUNTIME_SOURCES,
    Compiler,
    Unit,
    compile_units,
    find_compiler,
    link_library,
)
from atsc.compiler.ir import Graph, Node
from atsc.compiler.ops import op_of

Progress = Callable[[str, int, int], None]
RUNTIME_FLAGS = ("-march=x86-64", "-mtune=generic", "-fexceptions")
VERSION_SCRIPT = RUNTIME_SOURCES / "exports.map"


@dataclass(frozen=True, slots=True)
class Generated:
    """The kernels of every node, in execution order, and the objects that hold them."""

    of_nodes: tuple[NodeKernels, ...]
    objects: tuple[Path, ...]
    compiler: Compiler
    """What compiled them, and compiles the rest."""

    def kernels(self) -> list[Kernel]:
        """Each kernel once, in a stable order."""
        return _distinct(self.of_nodes)

    def identity(self) -> str:
        """A text that changes whenever a kernel does: object names are hashes of their content."""
        return json.dumps([*(k.symbol for k in self.kernels()), *(o.name for o in self.objects)])


def generate(
    graph: Graph,
    storage: Storage,
    progress: Progress | None = None,
    toolchain: str | None = None,
) -> Generated:
    """Choose, render and compile the kernels of all nodes, and the runtime.

    Args:
        graph: the model.
        storage: where its weights lie.
        progress: told of what is compiled.
        toolchain: as `find_compiler` takes it.

    Raises:
        CodegenError: a template or the compiler fails, or there is no compiler.
        UsageError: no such toolchain.
    """
    compiler = find_compiler(toolchain)
    stored = storage.stored()
    of_nodes = tuple(_kernels_of_node(graph, node, stored) for node in graph.nodes)
    units = [*translation_units(_distinct(of_nodes)), *runtime_units()]

    def compiled(done: int, total: int) -> None:
        if progress:
            progress("compiling kernels", done, total)

    return Generated(of_nodes, tuple(compile_units(units, compiled, compiler)), compiler)


def build_library(generated: Generated, tables: str, output: Path) -> Path:
    """Compile the tables and link everything into a shared library at `output`.

    Raises:
        CodegenError: the compiler or the linker fails.
    """
    compiler = generated.compiler
    objects = compile_units([Unit("tables", tables, RUNTIME_FLAGS)], compiler=compiler)
    exports = f"-Wl,--version-script={VERSION_SCRIPT}"
    link_library([*generated.objects, *objects], output, (exports,), compiler)
    return output


def runtime_units() -> list[Unit]:
    """The translation units of the runtime."""
    return [
        Unit(f"runtime_{path.stem}", path.read_text("utf-8"), RUNTIME_FLAGS)
        for path in sorted(RUNTIME_SOURCES.glob("*.cc"))
    ]


def operands_of(graph: Graph, node: Node, stored: Mapping[str, StoredWeight]) -> list[Operand]:
    """What the kernels of a node see of its inputs."""
    return [
        stored[name] if name in stored else graph.values[name] if name else None
        for name in node.inputs
    ]


def outputs_of(node: Node) -> list[bool]:
    """Which of its operator's outputs a node makes."""
    wanted = [bool(name) for name in node.outputs]
    return [*wanted, *[False] * (len(op_of(node).outputs) - len(wanted))]


def _kernels_of_node(graph: Graph, node: Node, stored: Mapping[str, StoredWeight]) -> NodeKernels:
    operands, outputs = operands_of(graph, node, stored), outputs_of(node)
    few, many = (
        kernels_of(op_of(node), node.attrs, operands, outputs, few_rows)
        for few_rows in (True, False)
    )
    return NodeKernels(few, many)


def _distinct(of_nodes: tuple[NodeKernels, ...]) -> list[Kernel]:
    levels = [level for node in of_nodes for level in (node.few_rows, node.many_rows)]
    found = {kernel.symbol: kernel for level in levels for kernel in level.values()}
    return [found[symbol] for symbol in sorted(found)]
