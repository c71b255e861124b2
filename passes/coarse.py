"""The placements that other programs offer: whole layers, or all but some layers' FFN or experts.

Each is a chain of placements from nothing to everything, one layer more in VRAM a step; the policy
is the last step that fits. Source: llama.cpp. `-ngl N` puts the output head and then the last N - 1
layers on the GPU, KV caches with their layers (since llama.cpp pull request 18148; before it, the
head came last). `--n-cpu-moe N` and `--n-cpu-ffn N` keep the experts or the FFN of the first N
layers on the host and leave all else in VRAM. Where not even that fits, we lower -ngl as a user
would, with all experts or FFNs on the host. An FFN's experts and router go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atsc.passes.placement import (
    Kind,
    Objective,
    Part,
    Placement,
    UnitCost,
    bytes_on_gpu,
    describe_placement,
    does_not_fit,
    obey_pins,
)

Bits = tuple[bool, ...]


def layer_steps(units: Sequence[UnitCost]) -> list[Bits]:
    """llama.cpp's -ngl 0, 1, ...: the head, then layers from the last to the first."""
    return _steps(units, lambda unit: False)


def ffn_steps(units: Sequence[UnitCost]) -> list[Bits]:
    """llama.cpp's --n-cpu-ffn from all layers down to none, after all else is in VRAM."""
    return _steps(units, lambda unit: unit.part is Part.FFN)


def expert_steps(units: Sequence[UnitCost]) -> list[Bits]:
    """llama.cpp's --n-cpu-moe from all layers down to none, after all else is in VRAM."""
    return _steps(units, lambda unit: unit.kind is Kind.EXPERT_STACK)


def layer(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `layer`: as many whole layers as fit, the last ones first."""
    return _last_that_fits(units, layer_steps(units), objective, budget_bytes)


def ffn(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `ffn`: everything but the FFNs of as few first layers as must stay on the host."""
    return _last_that_fits(units, ffn_steps(units), objective, budget_bytes)


def expert(units: Sequence[UnitCost], objective: Objective, budget_bytes: int) -> Placement:
    """Policy `expert`: everything but the experts of as few first layers as must stay."""
    return _last_that_fits(units, expert_steps(units), objective, budget_bytes)


def _steps(units: Sequence[UnitCost], comes_later: Callable[[UnitCost], bool]) -> list[Bits]:
    """Layers from the last to the first, the head before them; then again for the later units."""
    num_layers = 1 + max((unit.layer for unit in units if unit.layer is not None), default=-1)

    def step(unit: UnitCost) -> int:
        from_the_end = 1 if unit.layer is None else num_layers + 1 - unit.layer
        return from_the_end + (num_layers + 1 if comes_later(unit) else 0)

    def after(num_steps: int) -> Bits:
        return obey_pins(units, lambda unit: step(unit) <= num_steps)

    last = max((step(unit) for unit in units), default=0)
    return list(dict.fromkeys(after(num_steps) for num_steps in range(last + 1)))


def _last_that_fits(
    units: Sequence[UnitCost], steps: Sequence[Bits], objective: Objective, budget_bytes: int
) -> Placement:
    fitting = [bits for bits in steps if bytes_on_gpu(units, bits) <= budget_bytes]
    if not fitting:
        needed = bytes_on_gpu(units, steps[0])
        raise does_not_fit("units that run on the GPU only need", needed, budget_bytes)
    return describe_placement(units, fitting[-1], objective)
