"""The placement policies by name, so that any machine can compare them in one command.

All have one signature (`Policy`) and one objective. `tensor` is ours (place.py); `layer`, `ffn` and
`expert` are llama.cpp's (coarse.py); the rest stand here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from atsc.passes.coarse import expert, ffn, layer
from atsc.passes.place import tensor
from atsc.passes.placement import (
    Kind,
    Objective,
    Placement,
    Policy,
    Times,
    UnitCost,
    bytes_on_gpu,
    describe_placement,
    does_not_fit,
    obey_pins,
)

NUM_STREAM_SLOTS = 2
_HINT = ", or choose --policy tensor"


def cpu(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `cpu`: nothing in VRAM but what is pinned there."""
    on_gpu = obey_pins(units, lambda unit: False)
    if (needed := bytes_on_gpu(units, on_gpu)) > budget_bytes:
        raise does_not_fit("units that run on the GPU only need", needed, budget_bytes)
    return describe_placement(units, on_gpu, objective)


def gpu(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `gpu`: everything in VRAM but what is pinned to the host.

    Raises:
        BudgetError: how much is missing.
    """
    on_gpu = obey_pins(units, lambda unit: True)
    if (needed := bytes_on_gpu(units, on_gpu)) > budget_bytes:
        raise does_not_fit("policy gpu needs", needed, budget_bytes, _HINT)
    return describe_placement(units, on_gpu, objective)


def stream(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `stream`: every weight on the host, copied to a slot and run on the GPU each round.

    Two slots of the largest weight, so that one is filled while the other is computed on; KV caches
    stay in VRAM. As FlexGen and PIPO (arXiv 2504.03664) do, without their batches.

    Raises:
        BudgetError: slots and KV caches do not fit; how much is missing.
    """
    resident = obey_pins(units, lambda unit: unit.kind is Kind.KV_CACHE or not unit.num_bytes)
    runs_on_gpu = obey_pins(units, lambda unit: True)
    streamed = tuple(i for i in range(len(units)) if runs_on_gpu[i] and not resident[i])
    slot_bytes = NUM_STREAM_SLOTS * max((units[i].num_bytes for i in streamed), default=0)
    resident_bytes = bytes_on_gpu(units, resident)
    if (needed := resident_bytes + slot_bytes) > budget_bytes:
        raise does_not_fit("policy stream needs (slots and KV caches)", needed, budget_bytes, _HINT)
    stall_ns = objective.weigh_ns(
        _stall_ns([unit.decode for unit in units], runs_on_gpu, streamed),
        _stall_ns([unit.prefill for unit in units], runs_on_gpu, streamed),
    )
    unstalled = describe_placement(units, runs_on_gpu, objective)
    return replace(
        unstalled,
        on_gpu=resident,
        resident_bytes=resident_bytes,
        value_ns=unstalled.value_ns - stall_ns,
        time_ns=unstalled.time_ns + stall_ns,
        streamed=streamed,
        slot_bytes=slot_bytes,
    )


POLICIES: Mapping[str, Policy] = {
    "tensor": tensor,
    "layer": layer,
    "ffn": ffn,
    "expert": expert,
    "cpu": cpu,
    "gpu": gpu,
    "stream": stream,
}


def _stall_ns(times: Sequence[Times], runs_on_gpu: Sequence[bool], streamed: Sequence[int]) -> int:
    """How long a round waits for weights, if all slots are empty when it begins.

    Copies queue on one engine, each into the slot that the copy before the last one used, once that
    unit has run. Hand-offs are left out of the window, so the figure errs on the high side.
    """
    copied_ns = now_ns = busy_ns = 0
    finished: list[int] = [0] * NUM_STREAM_SLOTS
    waiting = set(streamed)
    for index, time in enumerate(times):
        if index in waiting:
            copied_ns = max(copied_ns, finished[-NUM_STREAM_SLOTS]) + time.transfer_ns
            now_ns = max(now_ns, copied_ns)
        run_ns = time.gpu_ns if runs_on_gpu[index] else time.cpu_ns
        now_ns += run_ns
        busy_ns += run_ns
        if index in waiting:
            finished.append(now_ns)
    return now_ns - busy_ns
