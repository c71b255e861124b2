"""Measures plans on a GPU, all in one go, and writes a line of JSON after each step.

    gpu.py [--out gpu.jsonl] [--only 'limits,qwen3-14b/*'] [--threads 8] [--vram 6G] [--ctx 2560]

Steps: `limits` (what the machine allows), and for each model MODEL/make, MODEL/tensor (within
--vram), MODEL/gpu (all of it on the GPU), MODEL/layer (whole layers within --vram). A plan's step
compiles it, runs `atsc bench` (pp512, tg128, at depth 0 and 2048) with the process's peak VRAM
watched, and compares with what `inspect` and `simulate` predicted (with promotions, as `bench` has
them) and with the machine's limit.

The ablation of ATSInfer's Figure 15 runs the plan that is there in other ways:
MODEL/layer+synchronous is its base; MODEL/tensor+synchronous has tensor placement,
MODEL/tensor+asynchronous (no promotion in decode) rounds that do not wait as well,
MODEL/tensor+static promotions chosen once, and MODEL/tensor is all of it. MODEL/tensor+pp2048 reads
a longer prompt. MODEL/tensor+load has its Figure 13: the time per token under each of --loads, for
static and load-aware promotions. MODEL/tensor+series has its Figure 14: how busy the GPU and how
fast the link were over a round, from a trace.

Three steps look at what the product writes, and check it (gpu_product.py): MODEL/tensor+trace at
the events of `run --trace`, MODEL/tensor+page at `inspect --html`, MODEL/tensor+profile at a plan
compiled for the file of `profile`, which takes the place of the plan before it. Without a GPU, try
them out with --target virtual.

A model has one plan folder, so steps of a plan follow the step that compiles it; otherwise the more
important steps come first, for runs that are ended in time.

--models qwen3-8b has few steps: a plan within 4G and one on the GPU, and what the product writes.

The packages run from this checkout, installed or not. Processes are bound to the first --threads
cores that this one may use; give it more, so that their peak VRAM is watched from another one. A
step that outlasts its budget is ended and reported; --total ends the whole run in time. Models have
random int4 weights with fp16 scales (make_model.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import gpu_product
import gpu_steps
from gpu_run import Clock, Record, Run, StepError, say

PRODUCT = ("trace", "page", "profile")


@dataclass(frozen=True, slots=True)
class Steps:
    """What is done with a model: its budget, and after each policy's plan, what follows it."""

    vram: str
    policies: Mapping[str, tuple[str, ...]]


ALL_STEPS = Steps(
    "6G",
    MappingProxyType(
        {
            "tensor": ("load", *gpu_steps.VARIANTS, "series", *PRODUCT),
            "gpu": (),
            "layer": ("synchronous",),
        }
    ),
)
MODELS = {
    "qwen3-14b": ALL_STEPS,
    "qwen3-8b": Steps("4G", MappingProxyType({"tensor": PRODUCT, "gpu": ()})),
}
"""Others have all steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to measure, and its seconds."""

    name: str
    seconds: float
    work: Callable[[Run], Record]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; exit code 1 if one failed."""
    args = _parser().parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: args.threads])
    spare = frozenset(cores[args.threads :])
    run = Run(args, Clock(time.monotonic() + args.total), {}, spare)
    steps = list(_selected(args))
    if not steps:
        say(f"no step matches {args.only}; steps are {', '.join(s.name for s in _steps(args))}")
        return 2
    failed = 0
    with Path(args.out).open("a", encoding="utf-8") as out:
        for step in steps:
            record = _do(step, run)
            run.records[step.name] = record
            failed += not record["ok"]
            out.write(json.dumps(record) + "\n")
            out.flush()
    print(_table(run.records))
    return 1 if failed else 0


def _do(step: Step, run: Run) -> Record:
    say(f"{step.name} ...")
    begin = time.monotonic()
    run.clock.step_ends = begin + step.seconds * run.args.scale
    try:
        if run.clock.left() <= 0:
            raise StepError("no time left; give --total more seconds, or fewer --steps")
        found: Record = {"ok": True, **step.work(run)}
        if not found["ok"]:
            say(f"{step.name}: {found['error']}")
    except StepError as error:
        found = {"ok": False, "error": str(error)}
        say(f"{step.name} failed: {error}")
    return {"step": step.name, "seconds": round(time.monotonic() - begin, 2), **found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="gpu.jsonl", metavar="FILE", help="appended to")
    parser.add_argument("--only", "--steps", default="*", metavar="PATTERN,...", help="steps (all)")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAME,...")
    parser.add_argument("--work", default="models", metavar="DIR", help="for models and plans")
    parser.add_argument("--threads", type=int, default=8, metavar="N")
    parser.add_argument("--vram", metavar="SIZE", help="6G; 4G for qwen3-8b")
    parser.add_argument("--ctx", type=int, default=2560, metavar="TOKENS")
    parser.add_argument("--target", default="auto", metavar="NAME|FILE")
    parser.add_argument("--chunk", type=int, default=512, metavar="TOKENS")
    parser.add_argument("-p", type=int, default=512, metavar="N", help="tokens to read")
    parser.add_argument("-n", type=int, default=128, metavar="N", help="tokens to write")
    parser.add_argument("-d", default="0,2048", metavar="N,...", help="tokens before")
    parser.add_argument("--loads", default="cpu=60,gpu=60", metavar="LOAD,...", help="external")
    parser.add_argument("--seconds", type=float, default=8, metavar="S", help="under each load")
    parser.add_argument("-r", type=int, default=2, metavar="N", help="repetitions")
    parser.add_argument("--total", type=float, default=3600, metavar="S", help="of the whole run")
    parser.add_argument("--scale", type=float, default=1, metavar="X", help="budgets of steps")
    return parser


def _steps(args: argparse.Namespace) -> Iterator[Step]:
    yield Step("limits", 60, gpu_steps.measure_limits)
    for model in args.models.split(","):
        yield Step(f"{model}/make", 240, partial(gpu_steps.make_model, model=model))
        steps = _steps_of(model)
        for policy, names in steps.policies.items():
            of_plan = {"model": model, "policy": policy}
            measure = partial(gpu_steps.measure_plan, **of_plan, vram=args.vram or steps.vram)
            yield Step(f"{model}/{policy}", 300, measure)
            for name in names:
                after = partial(_after, **of_plan, name=name)
                yield Step(f"{model}/{policy}+{name}", SECONDS.get(name, 90), after)


SECONDS = {"load": 240, "series": 60, "profile": 240}
"""Of steps that follow a plan."""


def _steps_of(model: str) -> Steps:
    return MODELS.get(model, ALL_STEPS)


def _after(run: Run, model: str, policy: str, name: str) -> Record:
    """A step that needs a plan."""
    plan = gpu_steps.made_plan(run, model, policy)
    if name in gpu_steps.VARIANTS:
        return gpu_steps.measure_variant(run, policy, name, plan)
    if name == "profile":
        return gpu_product.look_at_profile(run, plan, run.folder(model))
    work: dict[str, Callable[[Run, Path], Record]] = {
        "load": gpu_steps.measure_under_loads,
        "series": gpu_steps.measure_series,
        "trace": gpu_product.look_at_trace,
        "page": gpu_product.look_at_page,
    }
    return work[name](run, plan)


def _selected(args: argparse.Namespace) -> Iterator[Step]:
    patterns = args.only.split(",")
    for step in _steps(args):
        if any(fnmatch.fnmatchcase(step.name, pattern) for pattern in patterns):
            yield step


def _table(records: dict[str, Record]) -> str:
    """What was measured, for people."""
    lines = ["| plan | peak VRAM, GiB | test | tok/s | simulated | share of limit |"]
    lines.append("|---|--:|---|--:|--:|--:|")
    for name, record in records.items():
        if not record["ok"]:
            lines.append(f"| {name} | | {record['error']} | | | |")
        for test, rate in record.get("tok_s", {}).items():
            lines.append(f"| {name} | | {test} | {rate:.1f} | | |")
        if checks := record.get("checks"):
            right = sum(each["ok"] for each in checks)
            lines.append(f"| {name} | | {right} of {len(checks)} checks are right | | | |")
        for row in record.get("load", ()):
            without, under = (row[key]["tpot_median_ms"] for key in ("without", "with"))
            settled = row["with"]["tpot_second_half_ms"]
            change = (
                f"TPOT {without:.1f} to {under:.1f} ms, {row['increase_percent']:+.0f} %; "
                f"second half {settled:.1f} ms, {row['increase_second_half_percent']:+.0f} %"
            )
            lines.append(f"| {name} | | {row['policy']}, {row['load']}: {change} | | | |")
        for load, error in record.get("errors", {}).items():
            lines.append(f"| {name} | | {load}: {error} | | | |")
        for row in record.get("rows", ()):
            peak = record["vram"]["peak_bytes"] / 2**30
            cells = [name, f"{peak:.2f}", row["test"], f"{row['tok_s']:.1f} ± {row['sd']:.1f}"]
            cells.append(_shown(row["predicted_tok_s"], ".1f"))
            cells.append(_shown(row["share_of_limit"], ".0%"))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
