"""CUDA code of a plan: every node's kernels, compiled for the target's GPU and for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atsc.codegen.build import operands_of, outputs_of
from atsc.codegen.cpu import FEW_ROWS
from atsc.codegen.cuda import CudaKernel, kernel_of, translation_units
from atsc.codegen.cuda_tiles import Gpu
from atsc.codegen.device_tables import Module
from atsc.codegen.layout import UNIT_ALIGNMENT, align
from atsc.codegen.nvrtc import CudaUnit, compile_cuda
from atsc.codegen.render import render
from atsc.codegen.storage import Storage
from atsc.compiler.ir import Graph, Node
from atsc.compiler.ops import op_of

HAND_OFF = "handoff"
"""The template of the runtime's own kernels: hand-offs and flags."""
_HAND_OFF_PATH = "cuda/handoff__sm75.cu.j2"


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """Kernels a node (few rows, many rows), and the files that hold them."""

    kernels: tuple[tuple[CudaKernel | None, CudaKernel | None], ...]
    modules: tuple[tuple[Module, Path], ...]

    @property
    def binary_bytes(self) -> int:
        """Size of the binaries that a GPU of the target's kind loads."""
        return sum(path.stat().st_size for module, path in self.modules if not module.is_ptx)

    def scratch_bytes(self, capacities: Sequence[int], most_rows: int, num_sms: int) -> int:
        """What kernels count and add up in: each its own, once a capacity.

        The runtime lays them out so (DeviceShare::add_scratch).

        Args:
            capacities: of each node's KV cache, in tokens; 0 where it has none.
            most_rows: of a round.
            num_sms: of the GPU.
        """
        found: dict[tuple[str, int], int] = {}
        for few_rows, rows in ((False, most_rows), (True, FEW_ROWS)):
            for (few, many), capacity in zip(self.kernels, capacities, strict=True):
                kernel = few if few_rows else many
                if kernel is None or (kernel.symbol, capacity) in found:
                    continue
                launch = kernel.launch()
                found[kernel.symbol, capacity] = align(
                    launch.scratch_of(rows=rows, kv_capacity=capacity, num_sms=num_sms),
                    UNIT_ALIGNMENT,
                )
        return sum(found.values())


def generate_device(graph: Graph, storage: Storage, gpu: Gpu) -> DeviceCode:
    """Choose, render and compile the CUDA kernels of all nodes.

    Raises:
        CodegenError: a template or the compiler fails, or there is no compiler for CUDA.
    """
    stored = storage.stored()

    def kernel(node: Node, few_rows: bool) -> CudaKernel | None:
        operands, outputs = operands_of(graph, node, stored), outputs_of(node)
        return kernel_of(op_of(node), node.attrs, operands, outputs, few_rows, gpu)

    kernels = tuple((kernel(node, True), kernel(node, False)) for node in graph.nodes)
    distinct = {kernel.symbol: kernel for pair in kernels for kernel in pair if kernel}
    units = [
        unit
        for ptx in (False, True)
        for unit in (
            *translation_units(distinct.values(), gpu.sm, ptx),
            CudaUnit(HAND_OFF, render(_HAND_OFF_PATH, {}), gpu.sm, ptx),
        )
    ]
    modules = [
        (Module(f"kernels/{unit.name}.{_suffix(unit)}", unit.name, unit.sm, unit.ptx), path)
        for unit, path in zip(units, compile_cuda(units), strict=True)
    ]
    return DeviceCode(kernels, tuple(modules))


def _suffix(unit: CudaUnit) -> str:
    return f"compute_{unit.sm}.ptx" if unit.ptx else f"sm_{unit.sm}.cubin"
