"""From annotated units to what the tables say of the device: rungs, slots, and when to stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atsc.codegen.cpu import FEW_ROWS
from atsc.codegen.device_build import DeviceCode
from atsc.codegen.device_tables import DeviceTables
from atsc.passes.annotate import Annotation
from atsc.passes.ladder import FixedBytes
from atsc.passes.placement import Times, UnitCost
from atsc.passes.retarget import PlanCosts
from atsc.passes.rungs import RungRequest, plan_rungs
from atsc.passes.transfer import Scheduler


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
    scheduler: Scheduler | None = None,
) -> DeviceTables:
    """Place the units, for the whole budget and below it.

    Args:
        request: policy and budget.
        annotation: costs of the units that may be placed.
        fixed: device memory that is taken whatever is resident.
        code: the kernels; none for the virtual device, which runs the CPU's.
        num_units: of the plan, with those that have no cost.
        scheduler: of promotions in decode; None: it promotes nothing.

    Raises:
        BudgetError: what must lie on the device does not fit.
    """
    costs = annotation.costs
    wanted = RungRequest(
        PlanCosts(
            costs,
            annotation.indices,
            annotation.to_gpu,
            annotation.to_cpu,
            annotation.cpu_share,
            request.chunk,
        ),
        request.policy,
        request.budget_bytes,
        fixed,
        request.prompt_share,
        FEW_ROWS,
        scheduler,
    )
    rungs = plan_rungs(wanted)
    nothing = Times(0, 0)
    decode, prefill = [nothing] * num_units, [nothing] * num_units
    for index, cost in zip(annotation.indices, costs, strict=True):
        decode[index], prefill[index] = cost.decode, cost.prefill
    return DeviceTables(
        kind=request.kind,
        budget_bytes=request.budget_bytes,
        headroom_bytes=request.headroom_bytes,
        hand_off_ns=wanted.costs.hand_off_ns,
        link_bytes_per_s=_link_bytes_per_s(costs),
        stream_from_rows=wanted.stream_from_rows(),
        kernels=code.kernels if code else (),
        modules=[module for module, _ in code.modules] if code else (),
        decode=decode,
        prefill=prefill,
        rungs=[(rung, _spread(rung.placement.on_gpu, annotation, num_units)) for rung in rungs],
        cpu_share=annotation.cpu_share,
        promoted=[wanted.promoted(rung) for rung in rungs],
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
        rungs=(),
    )


def _spread(on_gpu: Sequence[bool], annotation: Annotation, num_units: int) -> list[bool]:
    bits = [False] * num_units
    for index, here in zip(annotation.indices, on_gpu, strict=True):
        bits[index] = here
    return bits


def _link_bytes_per_s(costs: Sequence[UnitCost]) -> float:
    moved = [c for c in costs if c.decode.transfer_ns]
    total_ns = sum(c.decode.transfer_ns for c in moved)
    return 1e9 * sum(c.num_bytes for c in moved) / total_ns if total_ns else 0.0
