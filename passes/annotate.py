"""The profiling pass: what every unit takes in time and memory, on each side.

Times come from a Timer that the driver hands in: measured with the plan's own kernels where the
target is this machine, else the roofline of a target file (`RooflineTimer`). A KV cache's time is
its attention's, at half the context. Source: ATSInfer section 4.3.1; DESIGN section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from atsc.compiler.errors import UsageError
from atsc.compiler.ir import Graph
from atsc.passes.partition import Unit, UnitKind
from atsc.passes.placement import Kind, Link, Part, Side, Times, UnitCost
from atsc.passes.work import Roofline, node_work
from atsc.targets.target import Target

Progress = Callable[[str, int, int], None]


class Timer(Protocol):
    """Answers how long things take on the target."""

    def unit_ns(self, unit: int, side: Side, rows: int, position: int) -> int:
        """One unit's nodes in a round of `rows` tokens after `position` others, weights cold.

        It may change until all units have been asked about.
        """

    def transfer_ns(self, num_bytes: int) -> int:
        """A copy from pinned host memory to the GPU beside the CPU's computation."""

    def link(self, to: Side) -> Link:
        """What activations cost that cross to one side."""

    def cpu_share(self) -> float:
        """The CPU's speed while weights are copied, as a share of its speed alone."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """Costs of the units that placement may choose for, and where they are in the plan.

    `indices[i]` is the plan's index of the unit that `costs[i]` describes: the shared range has no
    cost and no choice.
    """

    costs: tuple[UnitCost, ...]
    indices: tuple[int, ...]
    to_gpu: Link
    to_cpu: Link
    cpu_share: float = 1.0
    """The CPU's speed while weights are copied, as a share of its speed alone."""
    fixed_device_bytes: int | None = None
    """What the process holds of the GPU whatever is resident, where it was measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the rounds look like that are timed."""

    context: int
    chunk: int

    @property
    def rows(self) -> int:
        """Tokens of a whole prefill round."""
        return min(self.chunk, self.context)

    def position(self, rows: int) -> int:
        """Tokens before a round after which the context is half full, if its rows allow that."""
        return max(self.context // 2 - rows, 0)


def annotate(
    graph: Graph,
    units: Sequence[Unit],
    num_bytes: Sequence[int],
    timer: Timer,
    load: Load,
    progress: Progress | None = None,
) -> Annotation:
    """Time every unit on both sides.

    Args:
        graph: the graph that `units` cut.
        units: all units of the plan.
        num_bytes: of each unit in device memory; of a KV cache at the full context.
        timer: measured or modelled times.
        load: context and chunk.
        progress: told how many units are done.
    """
    layers, parts = locate(graph, units)

    def times(index: int, rows: int) -> Times:
        position = load.position(rows)
        on_cpu, on_gpu = (
            timer.unit_ns(index, side, rows, position) for side in (Side.HOST, Side.GPU)
        )
        return Times(on_cpu, on_gpu, timer.transfer_ns(num_bytes[index]))

    indices = [index for index, unit in enumerate(units) if unit.kind is not UnitKind.SHARED]
    for index in indices:
        if progress:
            progress("timing units", index, len(units))
        for rows in (1, prefill_rows(parts[index], load)):
            times(index, rows)
    costs = []
    for index in indices:
        unit = units[index]
        costs.append(
            UnitCost(
                name=unit.name,
                kind=Kind.KV_CACHE if unit.kind is UnitKind.KV_CACHE else Kind.WEIGHTS,
                part=parts[index],
                layer=layers[index],
                num_bytes=num_bytes[index],
                decode=times(index, 1),
                prefill=times(index, prefill_rows(parts[index], load)),
                input_bytes=input_bytes(graph, unit),
            )
        )
    to_gpu, to_cpu = timer.link(Side.GPU), timer.link(Side.HOST)
    return Annotation(tuple(costs), tuple(indices), to_gpu, to_cpu, timer.cpu_share())


def locate(graph: Graph, units: Sequence[Unit]) -> tuple[list[int | None], list[Part]]:
    """Each unit's decoder layer and part, from the shape of the graph alone.

    What feeds an attention node, the node and what reads it are a layer's attention; what follows
    until the next layer is its FFN; what makes the graph's output is the head.
    """
    unit_of = {node: index for index, unit in enumerate(units) for node in unit.nodes}
    maker = {
        output: position
        for position, node in enumerate(graph.nodes)
        for output in node.outputs
        if output
    }
    layers: list[int | None] = [None] * len(units)
    parts = [Part.FFN] * len(units)
    starts: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        if node.op != "attention":
            continue
        layer = len(starts)
        feeding = [unit_of[maker[name]] for name in node.inputs if name in maker]
        starts[layer] = min([unit_of[position], *feeding])
        reading = [
            unit_of[reader]
            for reader, other in enumerate(graph.nodes)
            if node.outputs[0] in other.inputs
        ]
        for index in {unit_of[position], *feeding, *reading}:
            parts[index] = Part.ATTENTION
    current: int | None = None
    by_start = {start: layer for layer, start in starts.items()}
    for index, unit in enumerate(units):
        current = by_start.get(index, current)
        layers[index] = current
        if unit.kind is UnitKind.HOST:
            layers[index], parts[index] = None, Part.EMBEDDING
    last = unit_of[maker[graph.outputs[0].name]]
    if last not in by_start:
        layers[last], parts[last] = None, Part.HEAD
    return layers, parts


def prefill_rows(part: Part, load: Load) -> int:
    """Rows that a part computes in a prefill round: the head makes the last token's logits."""
    return 1 if part is Part.HEAD else load.rows


def input_bytes(graph: Graph, unit: Unit) -> int:
    """Bytes a token of the values that a unit reads and does not make."""
    made = {name for index in unit.nodes for name in graph.nodes[index].outputs}
    read = {name for index in unit.nodes for name in graph.nodes[index].inputs if name}
    widths = [graph.values[name].shape[-1] for name in read - made if name in graph.values]
    return sum(4 * width for width in widths if isinstance(width, int))


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine as a roofline: what a target file states, in bytes, operations and nanoseconds."""

    cpu_bytes_per_s: float
    cpu_ops_per_s: float
    gpu_bytes_per_s: float
    gpu_ops_per_s: float
    link_bytes_per_s: float
    hand_off_ns: float
    kernel_ns: float
    """Least time of a kernel on the GPU, and of a barrier-free stage on the CPU."""
    cpu_share: float = 1.0
    """The CPU's speed while weights are copied, as a share of its speed alone."""

    def roofline(self, side: Side) -> Roofline:
        """One side of the machine."""
        if side is Side.GPU:
            return Roofline(self.gpu_bytes_per_s, self.gpu_ops_per_s, self.kernel_ns)
        return Roofline(self.cpu_bytes_per_s, self.cpu_ops_per_s, self.kernel_ns)


_DATASHEET_SHARES = 0.8, 0.4
"""What kernels reach of a maker's peak bandwidth and throughput; measured rates are as they are."""
_KERNEL_NS = 2500.0


def rates_of(target: Target) -> Rates:
    """The roofline of a target that has a GPU.

    Raises:
        UsageError: the target file lacks a figure.
    """
    figures = {
        "ram_read_bytes_per_s": target.ram_read_bytes_per_s,
        "cpu_ops_per_s": target.cpu_ops_per_s,
        "vram_read_bytes_per_s": target.vram_read_bytes_per_s,
        "gpu_ops_per_s": target.gpu_ops_per_s,
        "h2d_bytes_per_s": target.h2d_bytes_per_s,
        "hand_off_ns": target.hand_off_ns,
    }
    missing = [name for name, value in figures.items() if not value]
    if missing:
        raise UsageError(
            f"target {target.name}: no {', '.join(missing)}; add them to its file, or write one "
            "on the machine itself with atsc profile -o FILE"
        )
    found = {name: float(value or 0) for name, value in figures.items()}
    bandwidth, throughput = (1.0, 1.0) if target.source == "measured" else _DATASHEET_SHARES
    return Rates(
        cpu_bytes_per_s=found["ram_read_bytes_per_s"] * bandwidth,
        cpu_ops_per_s=found["cpu_ops_per_s"] * throughput,
        gpu_bytes_per_s=found["vram_read_bytes_per_s"] * bandwidth,
        gpu_ops_per_s=found["gpu_ops_per_s"] * throughput,
        link_bytes_per_s=found["h2d_bytes_per_s"] * bandwidth,
        hand_off_ns=found["hand_off_ns"],
        kernel_ns=_KERNEL_NS,
        cpu_share=cpu_share_of(target.ram_read_bytes_per_s, target.ram_read_shared_bytes_per_s),
    )


def cpu_share_of(alone: float | None, beside: float | None) -> float:
    """The CPU's speed beside copies, from its read rates; 1 where either is unknown."""
    return min(beside / alone, 1.0) if alone and beside else 1.0


@dataclass(frozen=True, slots=True)
class RooflineTimer:
    """Times from rates: the larger of bytes over bandwidth and operations over throughput."""

    graph: Graph
    units: Sequence[Unit]
    stored_bytes: Mapping[str, int]
    """Weight name -> bytes as the plan stores it."""
    rates: Rates

    def unit_ns(self, unit: int, side: Side, rows: int, position: int) -> int:
        """See Timer."""
        nodes = self.units[unit].nodes
        work = [
            node_work(self.graph, index, self.stored_bytes, rows, position + rows)
            for index in nodes
        ]
        return self.rates.roofline(side).time_ns(work)

    def transfer_ns(self, num_bytes: int) -> int:
        """See Timer."""
        return round(num_bytes / self.rates.link_bytes_per_s * 1e9)

    def link(self, to: Side) -> Link:
        """See Timer."""
        return Link(self.rates.hand_off_ns, 1e9 / self.rates.link_bytes_per_s)

    def cpu_share(self) -> float:
        """See Timer."""
        return self.rates.cpu_share
