"""The placements of a plan: which units live in VRAM, and how much of it promotions share.

VRAM that is kept for slots is lost to residents, so both are chosen together, by simulation. A
candidate is a slot size, a number of slots, and an objective for static placement: as it stands, or
with what promotions save (`with_promotions`). The candidates are judged at a few budgets, by a
decode step in which the scheduler promotes, and a prefill chunk that streams, weighed as placement
weighs them. Those that win anywhere get a ladder; of all their rungs, the ones stay that are faster
than whatever takes less. So each rung has slots of its own.

Cost: for 240 units, about 1 ms a simulated round and 0.1 s a dynamic program; 2 s in all.
Source: DESIGN section 4; the paper does not say how its buffer is sized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from atsc.compiler.errors import BudgetError
from atsc.passes.ladder import FixedBytes, Rung, ladder
from atsc.passes.place import Frontier, explore
from atsc.passes.placement import (
    Kind,
    Objective,
    Part,
    Placement,
    Side,
    Times,
    UnitCost,
    describe_placement,
    does_not_fit,
)
from atsc.passes.policies import NUM_STREAM_SLOTS, POLICIES
from atsc.passes.retarget import PlanCosts
from atsc.passes.simulate import Scenario
from atsc.passes.transfer import Scheduler, scheduled

LADDER_TOLERANCE = 0.03
MOST_SLOT_SIZES = 4
SLOT_COUNTS = (2, 3, 4)
PROBED_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the budget that residents and slots share: where candidates are judged."""
_WITHOUT_SLOTS = ("cpu", "gpu")


@dataclass(frozen=True, slots=True)
class RungRequest:
    """What the rungs are for.

    `scheduler` chooses promotions in decode; None: decode promotes nothing, so that slots have to
    pay in prefill alone. `few_rows` are the rows up to which a round never streams.
    """

    costs: PlanCosts
    policy: str
    budget_bytes: int
    fixed: FixedBytes
    prompt_share: float
    few_rows: int
    scheduler: Scheduler | None = None

    @property
    def objective(self) -> Objective:
        """What placement maximises."""
        return self.costs.objective(self.prompt_share)

    @property
    def for_units_bytes(self) -> int:
        """What residents and slots share."""
        return self.budget_bytes - self.fixed.total

    def stream_from_rows(self) -> int:
        """Of these units on this machine."""
        return stream_from_rows(self.costs.units, self.costs.chunk, self.few_rows)

    def scenario(self, rung: Rung) -> Scenario:
        """A rung as the simulator takes it; decode promotes nothing."""
        return self.costs.scenario(
            rung.placement.on_gpu,
            rung.slot_bytes,
            rung.num_slots,
            self.stream_from_rows(),
            rung.placement.streamed,
        )

    def promoted(self, rung: Rung) -> tuple[int, ...]:
        """What a decode step copies: what the policy says, or the scheduler."""
        if rung.placement.streamed or not self.scheduler or not rung.num_slots:
            return rung.placement.streamed
        scenario = self.scenario(rung)
        return scheduled(scenario, self.scheduler, 1)


def plan_rungs(request: RungRequest) -> list[Rung]:
    """The rungs from the least VRAM to the whole budget; one for a policy other than `tensor`.

    Raises:
        BudgetError: what must lie in VRAM does not fit.
    """
    if request.for_units_bytes < 0:
        raise does_not_fit(
            "context, modules, activations and head-room alone need",
            request.fixed.total,
            request.budget_bytes,
        )
    if request.policy != "tensor":
        return [_rung_of_policy(request)]
    tables = _Tables(request)
    candidates = list(slot_candidates(request))
    winners = _winners(request, tables, candidates)
    pool = [rung for winner in winners for rung in tables.ladder(winner)]
    whole = all_resident(request.costs.units, request.objective, request.fixed)
    if whole.required_bytes <= request.budget_bytes:
        pool.append(whole)
    return _fastest(request, pool)


def predicted_ns(request: RungRequest, rung: Rung) -> float:
    """What a token takes: decode with the scheduler and a streaming chunk, as placement weighs
    them."""
    share, scenario = request.prompt_share, request.scenario(rung)
    total = 0.0
    if share < 1:
        decode = replace(scenario, promoted=request.promoted(rung)).decode()
        total += (1 - share) * decode.total_ns
    if share > 0:
        total += share * scenario.prefill().total_ns / scenario.chunk
    return total


@dataclass(frozen=True, slots=True)
class Candidate:
    """`slot_bytes` of one slot; `promotes`: placement counts on promotions in decode."""

    slot_bytes: int
    num_slots: int
    promotes: bool = False

    @property
    def total_bytes(self) -> int:
        """Of all slots."""
        return self.slot_bytes * self.num_slots


def slot_candidates(request: RungRequest) -> Iterator[Candidate]:
    """No slots; then each size of unit that could be moved, the largest few, in 2 to 4 slots."""
    yield Candidate(0, 0)
    units = request.costs.units
    sizes = sorted({unit.num_bytes for unit in units if is_streamed(unit)}, reverse=True)
    for size in sizes[:MOST_SLOT_SIZES]:
        for count in SLOT_COUNTS:
            if size * count > request.for_units_bytes:
                continue
            yield Candidate(size, count)
            if request.scheduler:
                yield Candidate(size, count, promotes=True)


@dataclass(slots=True)
class _Tables:
    """Dynamic programs, one for each set of costs that candidates see."""

    request: RungRequest
    frontiers: dict[tuple[UnitCost, ...], Frontier] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Frontier:
        """For the whole budget, without slots, and all below."""
        units = tuple(_as_placed(self.request.costs, candidate))
        if units not in self.frontiers:
            request = self.request
            self.frontiers[units] = explore(units, request.objective, request.for_units_bytes)
        return self.frontiers[units]

    def rung(self, candidate: Candidate, bytes_for_units: int) -> Rung | None:
        """The candidate's best placement for residents and slots together."""
        frontier = self.of(candidate)
        left = bytes_for_units - candidate.total_bytes
        column = left // frontier.cell_bytes
        if left >= frontier.budget_bytes:
            column = frontier.last
        if left < 0 or column < frontier.first:
            return None
        placement = frontier.placement(min(column, frontier.last))
        return self._of(candidate, placement.on_gpu, self.request.fixed.total + bytes_for_units)

    def ladder(self, candidate: Candidate) -> Iterator[Rung]:
        """Its rungs within the budget."""
        request, slots = self.request, candidate.total_bytes
        for rung in ladder(
            _as_placed(request.costs, candidate),
            request.objective,
            request.budget_bytes,
            request.fixed,
            slots,
            LADDER_TOLERANCE,
        ):
            yield self._of(candidate, rung.placement.on_gpu, rung.budget_bytes)

    def _of(self, candidate: Candidate, on_gpu: Sequence[bool], budget_bytes: int) -> Rung:
        """A placement, judged by the units' real costs."""
        request, slots = self.request, candidate.total_bytes
        placement = describe_placement(request.costs.units, on_gpu, request.objective)
        needed = request.fixed.total + slots + placement.resident_bytes
        return Rung(budget_bytes, needed, slots, placement, candidate.num_slots)


def _winners(
    request: RungRequest, tables: _Tables, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """The best at each of a few budgets; with none of all slots, which fits where nothing does."""
    found = [candidates[0]]
    for share in PROBED_SHARES:
        rungs = [
            (predicted_ns(request, rung), number)
            for number, candidate in enumerate(candidates)
            if (rung := tables.rung(candidate, int(request.for_units_bytes * share)))
        ]
        if rungs:
            found.append(candidates[min(rungs)[1]])
    return list(dict.fromkeys(found))


def _fastest(request: RungRequest, pool: Sequence[Rung]) -> list[Rung]:
    """Those faster than whatever takes less memory, and not by next to nothing; with the best."""
    judged = [(rung.required_bytes, predicted_ns(request, rung), rung) for rung in pool]
    judged.sort(key=lambda each: each[:2])
    front = [judged[0]]
    for each in judged[1:]:
        if each[1] < front[-1][1]:
            front.append(each)
    allowed = LADDER_TOLERANCE / 3 * (front[0][1] - front[-1][1])
    kept = [front[0]]
    for each in front[1:]:
        if kept[-1][1] - each[1] > allowed or each is front[-1]:
            kept.append(each)
    return [rung for _, _, rung in kept]


def _rung_of_policy(request: RungRequest) -> Rung:
    """The one rung of a policy that has no ladder, with the slots that serve it best."""
    candidates = list(slot_candidates(request))
    if request.policy in _WITHOUT_SLOTS or request.policy == "stream":
        candidates = candidates[:1]  # `stream` brings slots of its own
    rungs: list[Rung] = []
    error: BudgetError | None = None
    for candidate in candidates:
        if candidate.promotes:
            continue  # these policies look at no times
        try:
            rungs.append(_policy_with(request, candidate))
        except BudgetError as failure:
            error = error or failure
    if error and not rungs:
        raise error
    return min(rungs, key=lambda rung: predicted_ns(request, rung))


def _policy_with(request: RungRequest, candidate: Candidate) -> Rung:
    costs, slots = request.costs, candidate.total_bytes
    units = costs.units
    placement = POLICIES[request.policy](units, request.objective, request.for_units_bytes - slots)
    slots += placement.slot_bytes
    needed = request.fixed.total + slots + placement.resident_bytes
    num_slots = NUM_STREAM_SLOTS if placement.slot_bytes else candidate.num_slots
    return Rung(request.budget_bytes, needed, slots, placement, num_slots)


def all_resident(costs: Sequence[UnitCost], objective: Objective, fixed: FixedBytes) -> Rung:
    """The rung with every unit on the device, which needs no slots."""
    on_gpu = [cost.side is not Side.HOST for cost in costs]
    placement: Placement = describe_placement(costs, on_gpu, objective)
    needed = fixed.total + placement.resident_bytes
    return Rung(needed, needed, 0, placement)


def _as_placed(costs: PlanCosts, candidate: Candidate) -> list[UnitCost]:
    """Units as static placement sees them where there are such slots."""
    units = list(costs.units)
    if not candidate.num_slots:
        return units
    units = with_streaming(units, candidate.slot_bytes)
    if candidate.promotes:
        units = with_promotions(units, candidate.slot_bytes, costs.cpu_share)
    return units


def is_streamed(cost: UnitCost) -> bool:
    """Whether a prefill chunk copies the unit to a slot when it lives on the host.

    The head runs for the wanted rows of logits alone, so that it never pays to stream it; the
    embedding never leaves the host.
    """
    return cost.kind is Kind.WEIGHTS and cost.part is not Part.HEAD and cost.side is not Side.HOST


def with_streaming(costs: Sequence[UnitCost], slot_bytes: int) -> list[UnitCost]:
    """Costs as placement must see them where prefill streams the host's weights.

    A chunk does not compute a streamed unit on the CPU, so that living on the host costs it its
    copy, or its time on the GPU if that is longer. What does not stream, KV caches above all, keeps
    its time on the CPU, which is then what prefill gains from a place in VRAM.
    """
    return [
        replace(cost, prefill=_streamed(cost.prefill))
        if is_streamed(cost) and cost.num_bytes <= slot_bytes
        else cost
        for cost in costs
    ]


def _streamed(times: Times) -> Times:
    return replace(times, cpu_ns=min(times.cpu_ns, max(times.transfer_ns, times.gpu_ns)))


def with_promotions(costs: Sequence[UnitCost], slot_bytes: int, cpu_share: float) -> list[UnitCost]:
    """Costs as placement must see them where decode promotes.

    CPU and copy engine then share the host's weights, each at its own rate, so that one more unit
    there costs what both together need for it: t_cpu t_copy / (t_cpu + t_copy). KV caches are not
    moved and keep the CPU's time, which makes VRAM the better place for them.
    """
    found = []
    for cost in costs:
        cpu_ns, copy_ns = cost.decode.cpu_ns / cpu_share, cost.decode.transfer_ns
        movable = cost.kind is Kind.WEIGHTS and cost.side is not Side.HOST
        if movable and cost.num_bytes <= slot_bytes and cpu_ns + copy_ns > 0:
            shared_ns = round(cpu_ns * copy_ns / (cpu_ns + copy_ns))
            shared_ns = min(cost.decode.cpu_ns, max(shared_ns, cost.decode.gpu_ns))
            cost = replace(cost, decode=replace(cost.decode, cpu_ns=shared_ns))
        found.append(cost)
    return found


def stream_from_rows(costs: Sequence[UnitCost], chunk: int, few_rows: int) -> int:
    """The fewest rows of a round for which streaming the host's units beats computing them there.

    A unit's time on the host is decode's for few rows and grows to that of a whole chunk; streamed,
    it takes its copy or its time on the GPU, whichever is longer. 0: never.
    """
    units = [c for c in costs if is_streamed(c)]
    for rows in range(few_rows + 1, chunk + 1):
        share = rows / chunk
        on_host = sum(max(c.decode.cpu_ns, c.prefill.cpu_ns * share) for c in units)
        streamed = sum(
            max(c.decode.transfer_ns, c.decode.gpu_ns, c.prefill.gpu_ns * share) for c in units
        )
        if streamed < on_host:
            return rows
    return 0
