"""What a plan's rung copies to its slots in each kind of round, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from atsc.compiler.plan import Manifest
from atsc.passes.retarget import PlanCosts, costs_of, scenario_of_rung
from atsc.passes.simulate import Scenario


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one kind of round, while the load is as measured; times as simulated."""

    round: str
    """`decode` or `prefill`."""
    units: tuple[str, ...]
    copied_bytes: int
    static_ns: int
    """Without copies."""
    round_ns: int


def planned_scenario(manifest: Manifest, costs: PlanCosts) -> Scenario:
    """The rung for the whole budget, decode promoting what the scheduler chose at compile time."""
    assert manifest.device is not None
    bits = manifest.device.rungs[-1].promoted
    promoted = tuple(n for n, index in enumerate(costs.indices) if bits[index] == "1")
    return replace(scenario_of_rung(manifest, costs), promoted=promoted)


def choices_of(manifest: Manifest) -> Iterator[Choice]:
    """Decode's and prefill's; none of a plan for a CPU alone."""
    if manifest.device is None:
        return
    rung, scenario = manifest.device.rungs[-1], planned_scenario(manifest, costs_of(manifest))
    streams = 0 < scenario.stream_from_rows <= scenario.chunk and scenario.slot_bytes > 0
    for name, chosen, static_ns, round_ns in (
        ("decode", scenario.promoted, rung.static_decode_ns, rung.decode_ns),
        (
            "prefill",
            scenario.streamed() if streams else scenario.promoted,
            rung.static_prefill_ns,
            rung.prefill_ns,
        ),
    ):
        units = [scenario.units[index] for index in chosen]
        yield Choice(
            name,
            tuple(unit.name for unit in units),
            sum(unit.num_bytes for unit in units),
            static_ns,
            round_ns,
        )
