"""`atsc simulate`: how fast a plan would be, on its machine or on another, by any policy.

A discrete-event simulation of one decode step and one prefill chunk, from the times in the plan; of
another target, from the work in the plan and the target's rates. Nothing is run or measured. Where
there are slots, the same with dynamic transfer: the runtime's scheduler chooses the promotions.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.commands.console import (
    Console,
    at_least,
    between,
    existing,
    format_size,
    parse_size,
    table,
)
from atsc.compiler.commands.general import refuse_general
from atsc.compiler.errors import BudgetError, CodegenError, PlanError, UsageError

if TYPE_CHECKING:
    from atsc.compiler.plan import Manifest
    from atsc.passes.ladder import FixedBytes
    from atsc.passes.placement import UnitCost
    from atsc.passes.retarget import PlanCosts
    from atsc.passes.simulate import Round, Scenario
    from atsc.passes.transfer import Scheduler

POLICY_NAMES = ("tensor", "layer", "ffn", "expert", "gpu", "cpu", "stream")
DEFAULT_HEADROOM = 256 << 20
NUM_SLICES = 20


def add(parsers: Any) -> argparse.ArgumentParser:
    """Declare the flags."""
    parser: argparse.ArgumentParser = parsers.add_parser(
        "simulate", help="predict speed", description=__doc__, allow_abbrev=False
    )
    whole = at_least(1)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan folder")
    parser.add_argument(
        "--target", metavar="NAME|FILE", help="another machine than the plan's: see `atsc targets`"
    )
    parser.add_argument("--policy", choices=POLICY_NAMES, help="another placement than the plan's")
    parser.add_argument("--compare", action="store_true", help="all policies, in one table")
    parser.add_argument(
        "--vram", type=parse_size, metavar="SIZE", help="GPU memory, as 6G (as planned)"
    )
    parser.add_argument("--ctx", type=whole, metavar="TOKENS", help="longest context (the plan's)")
    parser.add_argument(
        "--depth",
        type=at_least(0),
        metavar="TOKENS",
        help="in the context while it decodes (half of it)",
    )
    parser.add_argument(
        "--prompt", type=whole, metavar="TOKENS", help="that prefill reads (one chunk)"
    )
    parser.add_argument(
        "--prompt-share",
        type=between(0, 1),
        metavar="SHARE",
        help="of all tokens, how many are prompt (the plan's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, besides the policy."""

    manifest: Manifest
    machine: str
    costs: PlanCosts
    """At the depth that is asked for."""
    typical: PlanCosts
    """At half the context, which placement is made for whatever is asked."""
    fixed: FixedBytes
    vram_bytes: int
    prompt_tokens: int
    prompt_share: float
    units_at: Callable[[int], Sequence[UnitCost]] | None
    """After so many tokens of the prompt; None: all of it at the depth of `costs`."""
    scheduler: Callable[[], Scheduler | None]
    """Of promotions; None where it cannot be compiled."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """A decode step, the first chunk of a prompt, and the time of the whole prompt."""

    decode: Round
    prefill: Round
    prompt_ns: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One policy's rounds."""

    policy: str
    vram_bytes: int
    """What the process holds of it."""
    scenario: Scenario
    static: Rounds
    dynamic: Rounds | None
    """With dynamic transfer."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Do it."""
    from atsc.compiler import plan
    from atsc.compiler.check_plan import check_content

    if args.compare and args.policy:
        raise UsageError("--compare shows all policies; leave --policy out")
    refuse_general(args.plan, "simulate")
    manifest = plan.load(existing(args.plan, "plan folder", PlanError))
    check_content(manifest, args.plan)
    setting = _setting(args, manifest, console)
    document: dict[str, Any] = {
        "plan": str(args.plan),
        "model": manifest.model.name,
        "machine": setting.machine,
        "vram_bytes": setting.vram_bytes,
        "prompt_tokens": setting.prompt_tokens,
    }
    head = f"{args.plan}: {manifest.model.name} on {setting.machine}, simulated"
    if args.compare:
        found = [(name, _try(setting, name)) for name in POLICY_NAMES]
        document["policies"] = [
            _document(each) if not isinstance(each, str) else {"policy": name, "error": each}
            for name, each in found
        ]
        console.result(document, f"{head}, {format_size(setting.vram_bytes)}\n\n{_compared(found)}")
        return 0
    changes = (args.target, args.policy, args.ctx, args.prompt_share)
    is_own = manifest.device and all(change is None for change in changes)
    if is_own:
        prediction = _own(setting)
    else:
        planned = manifest.options.policy if manifest.device else "tensor"
        prediction = _placed(setting, args.policy or planned)
    document.update(_document(prediction))
    hint = _planned_for(setting, bool(is_own))
    console.result(document, f"{head}\n\n{_text(prediction, setting)}{hint}")
    return 0


def _setting(args: argparse.Namespace, manifest: Manifest, console: Console) -> Setting:
    from atsc.compiler.compilation import DEFAULT_PROMPT_SHARE
    from atsc.passes.annotate import rates_of
    from atsc.passes.ladder import FixedBytes
    from atsc.passes.retarget import costs_of
    from atsc.targets.target import resolve

    context = args.ctx or manifest.options.ctx
    if context < manifest.options.chunk:
        raise UsageError(
            f"--ctx {args.ctx}: the plan reads chunks of {manifest.options.chunk} tokens; give at "
            "least that"
        )
    if context > manifest.model.model_context_length:
        raise UsageError(
            f"--ctx {context}: {manifest.model.name} has positions for "
            f"{manifest.model.model_context_length} tokens only"
        )
    depth = args.depth
    if depth is not None and depth >= context:
        raise UsageError(f"--depth {depth}: the context is {context} tokens; give fewer")
    if args.prompt and args.prompt + (depth or 0) > context:
        before = f" after {depth} others" if depth else ""
        raise UsageError(
            f"--prompt {args.prompt}{before}: the context is {context} tokens; give fewer, or a "
            "larger --ctx"
        )
    device, memory = manifest.device, manifest.memory
    activations = device.activations_bytes if device else memory.arena_bytes + memory.logits_bytes
    modules = device.modules_bytes if device else 0
    headroom = device.headroom_bytes if device else DEFAULT_HEADROOM
    share = args.prompt_share
    if share is None:
        share = device.prompt_share if device else DEFAULT_PROMPT_SHARE
    prompt = args.prompt or min(manifest.options.chunk, context)
    scheduler = functools.cache(lambda: _scheduler(console))
    target = resolve(args.target) if args.target else None
    cost_at = functools.partial(costs_of, manifest, context=args.ctx)
    if target:
        cost_at = functools.partial(cost_at, rates=rates_of(target))
    costs = cost_at(depth=depth)
    units_at = None
    if depth is not None:
        units_at = functools.cache(lambda tokens: cost_at(depth=depth + tokens).units)
    if target:
        machine, context_bytes, most = target.name, target.gpu_context_bytes, target.vram_bytes
    else:
        assert device is not None, "costs_of refuses plans for a CPU"
        machine, context_bytes, most = device.model, device.context_bytes, device.budget_bytes
    return Setting(
        manifest,
        machine,
        costs,
        cost_at(),
        FixedBytes(context_bytes, modules, activations, headroom),
        most if args.vram is None else args.vram,
        prompt,
        share,
        units_at,
        scheduler,
    )


def _own(setting: Setting) -> Prediction:
    """The plan's rung for the VRAM: what loading it would take."""
    from atsc.passes.retarget import scenario_of_rung

    device = setting.manifest.device
    assert device is not None
    fitting = [n for n, r in enumerate(device.rungs) if r.required_bytes <= setting.vram_bytes]
    if not fitting:
        raise BudgetError(
            f"--vram {format_size(setting.vram_bytes)}: the plan's least placement takes "
            f"{format_size(device.rungs[0].required_bytes)}; give at least that"
        )
    scenario = scenario_of_rung(setting.manifest, setting.costs, fitting[-1])
    policy, needed = setting.manifest.options.policy, device.rungs[fitting[-1]].required_bytes
    return _predict(setting, policy, needed, scenario)


def _try(setting: Setting, policy: str) -> Prediction | str:
    try:
        return _placed(setting, policy)
    except BudgetError as error:
        return str(error)


def _placed(setting: Setting, policy: str) -> Prediction:
    """Placements made for this machine and this VRAM, with the slots that serve them best.

    Dynamic transfer asks for other slots and residents than doing without, so each has its own.
    """
    static, static_bytes = _best(setting, policy, None)
    found = Prediction(policy, static_bytes, static, _rounds(setting, static), None)
    scheduler = setting.scheduler() if policy not in ("cpu", "gpu", "stream") else None
    if scheduler is None:
        return found
    scenario, vram_bytes = _best(setting, policy, scheduler)
    if not scenario.slot_bytes:
        return found
    return replace(
        found, vram_bytes=vram_bytes, scenario=scenario, dynamic=_moved(setting, scenario)
    )


def _best(setting: Setting, policy: str, scheduler: Scheduler | None) -> tuple[Scenario, int]:
    """The rung that a plan would have for all of the VRAM, and what it takes."""
    from atsc.codegen.cpu import FEW_ROWS
    from atsc.passes.rungs import RungRequest, plan_rungs

    request = RungRequest(
        setting.typical,
        policy,
        setting.vram_bytes,
        setting.fixed,
        setting.prompt_share,
        FEW_ROWS,
        scheduler,
    )
    rung = plan_rungs(request)[-1]
    scenario = replace(request.scenario(rung), units=setting.costs.units)
    return scenario, rung.required_bytes if policy != "cpu" else 0


def _scheduler(console: Console) -> Scheduler | None:
    from atsc.codegen.transfer_library import load_scheduler

    try:
        return load_scheduler()
    except CodegenError as error:
        console.note(f"without dynamic transfer, whose scheduler has to be compiled: {error}")
        return None


def _predict(setting: Setting, policy: str, vram_bytes: int, scenario: Scenario) -> Prediction:
    dynamic = _moved(setting, scenario) if scenario.slot_bytes else None
    return Prediction(policy, vram_bytes, scenario, _rounds(setting, scenario), dynamic)


def _moved(setting: Setting, scenario: Scenario) -> Rounds | None:
    """The same with the scheduler's promotions."""
    from atsc.passes.transfer import with_transfer

    scheduler = setting.scheduler()
    return _rounds(setting, with_transfer(scenario, scheduler)) if scheduler else None


def _rounds(setting: Setting, scenario: Scenario) -> Rounds:
    rows = min(setting.prompt_tokens, scenario.chunk)
    prompt_ns = scenario.prompt_ns(setting.prompt_tokens, setting.units_at)
    return Rounds(scenario.decode(), scenario.round_of(rows), prompt_ns)


def _document(prediction: Prediction) -> dict[str, Any]:
    on_gpu = sum(prediction.scenario.on_gpu)
    return {
        "policy": prediction.policy,
        "needed_bytes": prediction.vram_bytes,
        "units_in_vram": on_gpu,
        "units_on_host": len(prediction.scenario.units) - on_gpu,
        **_describe_rounds(prediction.static),
        "dynamic": _describe_rounds(prediction.dynamic) if prediction.dynamic else None,
    }


def _describe_rounds(rounds: Rounds) -> dict[str, Any]:
    return {
        "prompt_ns": rounds.prompt_ns,
        "decode": describe_round(rounds.decode),
        "prefill": describe_round(rounds.prefill),
    }


def describe_round(found: Round) -> dict[str, Any]:
    """A round's figures, as JSON has them; shares of the round, rates in bytes a second."""
    from atsc.passes.simulate import Track

    copied_per_ns = found.copied_bytes / max(found.busy_ns(Track.COPY), 1)
    copying = found.busy_over_time(Track.COPY, NUM_SLICES)
    return {
        "rows": found.rows,
        "round_ns": found.total_ns,
        "tokens_per_s": found.tokens_per_s,
        "cpu_busy": found.busy_share(Track.CPU),
        "gpu_busy": found.busy_share(Track.GPU),
        "copy_busy": found.busy_share(Track.COPY),
        "num_hand_offs": sum(1 for _ in found.on(Track.HAND_OFF)),
        "hand_off_ns": found.busy_ns(Track.HAND_OFF),
        "wait_ns": found.wait_ns,
        "num_promoted": sum(1 for _ in found.on(Track.COPY)),
        "copied_bytes": found.copied_bytes,
        "h2d_bytes_per_s": found.h2d_bytes_per_s,
        "h2d_bytes_per_s_over_time": [share * copied_per_ns * 1e9 for share in copying],
        "gpu_busy_over_time": found.busy_over_time(Track.GPU, NUM_SLICES),
    }


def _text(prediction: Prediction, setting: Setting) -> str:
    header = ["", "tok/s", "round", "CPU busy", "GPU busy", "promoted", "H2D", "hand-offs", "waits"]
    rows = [header]
    static, dynamic = prediction.static, prediction.dynamic
    prefill = f"prefill {setting.prompt_tokens}"
    rounds = [("decode", static.decode.tokens_per_s, static.decode)]
    if dynamic:
        rounds.append(("with dynamic transfer", dynamic.decode.tokens_per_s, dynamic.decode))
    rounds.append((prefill, _prompt_rate(setting, static), static.prefill))
    if dynamic:
        rounds.append(("with dynamic transfer", _prompt_rate(setting, dynamic), dynamic.prefill))
    for name, rate, found in rounds:
        shown = describe_round(found)
        rows.append(
            [
                name,
                f"{rate:.1f}",
                f"{found.total_ns / 1e6:.2f} ms",
                f"{shown['cpu_busy']:.0%}",
                f"{shown['gpu_busy']:.0%}",
                f"{shown['num_promoted']}",
                f"{found.h2d_bytes_per_s / 1e9:.1f} GB/s",
                f"{shown['num_hand_offs']}: {shown['hand_off_ns'] / 1e3:.0f} us",
                f"{found.wait_ns / 1e3:.0f} us",
            ]
        )
    on_gpu = sum(prediction.scenario.on_gpu)
    return (
        f"policy {prediction.policy}: {on_gpu} of {len(prediction.scenario.units)} units in VRAM, "
        f"{format_size(prediction.vram_bytes)} of {format_size(setting.vram_bytes)} taken\n\n"
        f"{table(rows, right=range(1, 9))}"
    )


def _planned_for(setting: Setting, is_own: bool) -> str:
    """That more VRAM does not change the placement of a plan."""
    device = setting.manifest.device
    if not is_own or device is None or setting.vram_bytes <= device.budget_bytes:
        return ""
    return (
        f"\nthe plan was made for {format_size(device.budget_bytes)} and takes no more; compile "
        "again for all of --vram"
    )


def _prompt_rate(setting: Setting, rounds: Rounds) -> float:
    return setting.prompt_tokens / max(rounds.prompt_ns, 1) * 1e9


def _compared(found: list[tuple[str, Prediction | str]]) -> str:
    """Decode and prefill of all policies, and how they compare with whole layers."""
    header = ["policy", "VRAM", "decode", "x layer", "GPU busy", "dynamic", "x layer"]
    rows = [[*header, "prefill", "x layer", "GPU busy"]]
    layer = next(
        (p.static for name, p in found if name == "layer" and not isinstance(p, str)), None
    )
    for name, each in found:
        if isinstance(each, str):
            rows.append([name, "does not fit", *[""] * 8])
            continue
        static, dynamic = each.static, each.dynamic
        moved = ["", ""]
        if dynamic:
            moved = _rate_and_ratio(dynamic.decode, layer.decode if layer else None)
        rows.append(
            [
                name,
                format_size(each.vram_bytes),
                *_rate_and_ratio(static.decode, layer.decode if layer else None),
                f"{describe_round(static.decode)['gpu_busy']:.0%}",
                *moved,
                *_rate_and_ratio(static.prefill, layer.prefill if layer else None),
                f"{describe_round(static.prefill)['gpu_busy']:.0%}",
            ]
        )
    return table(rows, right=range(1, 10))


def _rate_and_ratio(mine: Round, theirs: Round | None) -> list[str]:
    ratio = f"{theirs.total_ns / max(mine.total_ns, 1):.2f}" if theirs else ""
    return [f"{mine.tokens_per_s:.1f} tok/s", ratio]
