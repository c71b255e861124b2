"""From annotated units to what the tables say of the device: rungs, slots, and when to stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atsc.codegen.cpu import FEW_ROWS
from atsc.codegen.device_build import DeviceCode
from atsc.codegen.device_tables import DeviceTables
from atsc.passes.annotate import Annotation
from atsc.passes.ladder import FixedBytes, Rung, ladder
from atsc.passes.placement import (
    Kind,
    Objective,
    Part,
    Side,
    Times,
    UnitCost,
    describe_placement,
)
from atsc.passes.policies import POLICIES

NUM_SLOTS = 2
LADDER_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What the user wants of the device, in bytes."""

    kind: str
    policy: str
    budget_bytes: int
    headroom_bytes: int
    prompt_share: float
    chunk: int


def plan_device(
    request: DeviceRequest,
    annotation: Annotation,
    fixed: FixedBytes,
    code: DeviceCode | None,
    num_units: int,
) -> DeviceTables:
    """Place the units, for the whole budget and below it.

    Args:
        request: policy and budget.
        annotation: costs of the units that may be placed.
        fixed: device memory that is taken whatever is resident.
        code: the kernels; none for the virtual device, which runs the CPU's.
        num_units: of the plan, with those that have no cost.

    Raises:
        BudgetError: what must lie on the device does not fit.
    """
    costs, link = annotation.costs, (annotation.to_gpu, annotation.to_cpu)
    objective = Objective(*link, request.prompt_share, request.chunk)
    rungs = _rungs(request, costs, objective, fixed)
    nothing = Times(0, 0)
    decode, prefill = [nothing] * num_units, [nothing] * num_units
    for index, cost in zip(annotation.indices, costs, strict=True):
        decode[index], prefill[index] = cost.decode, cost.prefill
    return DeviceTables(
        kind=request.kind,
        budget_bytes=request.budget_bytes,
        headroom_bytes=request.headroom_bytes,
        hand_off_ns=round(annotation.to_gpu.latency_ns),
        link_bytes_per_s=_link_bytes_per_s(costs),
        stream_from_rows=stream_from_rows(costs, request.chunk),
        kernels=code.kernels if code else (),
        modules=[module for module, _ in code.modules] if code else (),
        decode=decode,
        prefill=prefill,
        num_slots=NUM_SLOTS if any(rung.slot_bytes for rung in rungs) else 0,
        rungs=[(rung, _spread(rung.placement.on_gpu, annotation, num_units)) for rung in rungs],
    )


def profiling_tables(
    kind: str, vram_bytes: int, code: DeviceCode | None, num_units: int
) -> DeviceTables:
    """The tables of a plan that is only opened to be timed: kernels, but no placement.

    It may use the whole device, of `vram_bytes`: units are timed one at a time.
    """
    nothing = [Times(0, 0)] * num_units
    return DeviceTables(
        kind=kind,
        budget_bytes=vram_bytes,
        headroom_bytes=0,
        hand_off_ns=0,
        link_bytes_per_s=0.0,
        stream_from_rows=0,
        kernels=code.kernels if code else (),
        modules=[module for module, _ in code.modules] if code else (),
        decode=nothing,
        prefill=nothing,
        num_slots=0,
        rungs=(),
    )


def slot_bytes(costs: Sequence[UnitCost]) -> int:
    """Of all slots: each holds the largest unit that a prefill chunk streams."""
    return NUM_SLOTS * max((c.num_bytes for c in costs if _is_streamed(c)), default=0)


def _is_streamed(cost: UnitCost) -> bool:
    """Whether a prefill chunk copies the unit to a slot when it lives on the host.

    The head runs for the wanted rows of logits alone, so that it never pays to stream it; the
    embedding never leaves the host.
    """
    return cost.kind is Kind.WEIGHTS and cost.part is not Part.HEAD and cost.side is not Side.HOST


def with_streaming(costs: Sequence[UnitCost]) -> list[UnitCost]:
    """Costs as placement must see them where prefill streams the host's weights.

    A chunk does not compute a streamed unit on the CPU, so that living on the host costs it its
    copy, or its time on the GPU if that is longer. What does not stream, KV caches above all, keeps
    its time on the CPU, which is then what prefill gains from a place in VRAM.
    """
    return [
        replace(cost, prefill=_streamed(cost.prefill)) if _is_streamed(cost) else cost
        for cost in costs
    ]


def _streamed(times: Times) -> Times:
    return replace(times, cpu_ns=min(times.cpu_ns, max(times.transfer_ns, times.gpu_ns)))


def stream_from_rows(costs: Sequence[UnitCost], chunk: int) -> int:
    """The fewest rows of a round for which streaming the host's units beats computing them there.

    A unit's time on the host is decode's for few rows and grows to that of a whole chunk; streamed,
    it takes its copy or its time on the GPU, whichever is longer. 0: never.
    """
    units = [c for c in costs if _is_streamed(c)]
    for rows in range(FEW_ROWS + 1, chunk + 1):
        share = rows / chunk
        on_host = sum(max(c.decode.cpu_ns, c.prefill.cpu_ns * share) for c in units)
        streamed = sum(
            max(c.decode.transfer_ns, c.decode.gpu_ns, c.prefill.gpu_ns * share) for c in units
        )
        if streamed < on_host:
            return rows
    return 0


def _rungs(
    request: DeviceRequest, costs: Sequence[UnitCost], objective: Objective, fixed: FixedBytes
) -> list[Rung]:
    """Rungs with slots where they fit, ending in one that needs none if everything is resident."""
    slots = slot_bytes(costs)
    if fixed.total + slots > request.budget_bytes:
        slots = 0
    if slots:
        costs = with_streaming(costs)
    if request.policy != "tensor":
        return [_rung_of_policy(request, costs, objective, fixed, slots)]
    rungs = _undominated(
        ladder(costs, objective, request.budget_bytes, fixed, slots, LADDER_TOLERANCE)
    )
    whole = all_resident(costs, objective, fixed, request.budget_bytes)
    if whole is None or (not slots and rungs[-1].placement.on_gpu == whole.placement.on_gpu):
        return rungs
    return [*rungs, whole]


def _rung_of_policy(
    request: DeviceRequest,
    costs: Sequence[UnitCost],
    objective: Objective,
    fixed: FixedBytes,
    slots: int,
) -> Rung:
    """The one rung of a policy that has no ladder; `stream` brings slots of its own."""
    if request.policy == "stream":
        slots = 0
    budget = request.budget_bytes - fixed.total - slots
    placement = POLICIES[request.policy](costs, objective, budget)
    slots += placement.slot_bytes
    return Rung(
        request.budget_bytes, fixed.total + slots + placement.resident_bytes, slots, placement
    )


def _undominated(rungs: Sequence[Rung]) -> list[Rung]:
    """Without those that need as much memory as a later one, which is worth more."""
    kept: list[Rung] = []
    for rung in reversed(rungs):
        if not kept or rung.required_bytes < kept[0].required_bytes:
            kept.insert(0, rung)
    return kept


def all_resident(
    costs: Sequence[UnitCost], objective: Objective, fixed: FixedBytes, budget_bytes: int
) -> Rung | None:
    """The rung with every unit on the device, which needs no slots; None if it does not fit."""
    on_gpu = [cost.side is not Side.HOST for cost in costs]
    placement = describe_placement(costs, on_gpu, objective)
    needed = fixed.total + placement.resident_bytes
    return Rung(needed, needed, 0, placement) if needed <= budget_bytes else None


def _spread(on_gpu: Sequence[bool], annotation: Annotation, num_units: int) -> list[bool]:
    bits = [False] * num_units
    for index, here in zip(annotation.indices, on_gpu, strict=True):
        bits[index] = here
    return bits


def _link_bytes_per_s(costs: Sequence[UnitCost]) -> float:
    moved = [c for c in costs if c.decode.transfer_ns]
    total_ns = sum(c.decode.transfer_ns for c in moved)
    return 1e9 * sum(c.num_bytes for c in moved) / total_ns if total_ns else 0.0
