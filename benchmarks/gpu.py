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
cores that this one may use. A step that outlasts its budget is ended and reported; --total ends the
whole run in time. Models have random int4 weights with fp16 scales (make_model.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gpu_product

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent / ".links"
VARIANTS = {
    "pp2048": ("-p", "2048", "-n", "0"),
    "static": ("--transfer", "static"),
    "asynchronous": ("--transfer", "none"),
    "synchronous": ("--transfer", "none", "--rounds", "synchronous"),
}
"""Flags of `atsc bench`."""
PRODUCT = ("trace", "page", "profile")
NUM_SLICES = 40
LIMITS_MIB = 2048
SAMPLE_SECONDS = 0.02
Record = dict[str, Any]


class StepError(Exception):
    """A step failed; the message says why in one line."""


@dataclass(slots=True)
class Clock:
    """When a step, and the whole run, must be over."""

    run_ends: float
    step_ends: float = 0.0

    def left(self) -> float:
        """Seconds that may still be used."""
        return min(self.run_ends, self.step_ends) - time.monotonic()


@dataclass(frozen=True, slots=True)
class Steps:
    """What is done with a model: its budget, and after each policy's plan, what follows it."""

    vram: str
    policies: Mapping[str, tuple[str, ...]]


ALL_STEPS = Steps(
    "6G",
    MappingProxyType(
        {
            "tensor": ("load", *VARIANTS, "series", *PRODUCT),
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


@dataclass(frozen=True, slots=True)
class Run:
    """What all steps share; `records` of the steps before, by name."""

    args: argparse.Namespace
    clock: Clock
    records: dict[str, Record]

    def command(self, *command: object, watch: PeakVram | None = None) -> str:
        """A program's output.

        Raises:
            StepError: it failed, or took longer than the step may.
        """
        environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with watch.of(process.pid) if watch else contextlib.nullcontext():
            try:
                out, err = process.communicate(timeout=max(self.clock.left(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise StepError(
                    "took longer than its budget; give --scale a larger number"
                ) from None
        if process.returncode:
            last = next(reversed(err.strip().splitlines()), "no message")
            raise StepError(f"exit code {process.returncode}: {last}")
        return out

    def atsc(self, *arguments: object, watch: PeakVram | None = None) -> Any:
        """A command of atsc, as JSON."""
        command = (sys.executable, "-m", "atsc.compiler.cli", *arguments, "--json")
        return json.loads(self.command(*command, watch=watch))

    def folder(self, model: str) -> Path:
        """Where a model and its plan lie."""
        return Path(self.args.work) / model


class PeakVram:
    """The most VRAM of the first GPU that a process held; 0 where NVML is not to be had."""

    def __init__(self) -> None:
        self.process_bytes = self.device_bytes = 0
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = pynvml
            self._before = pynvml.nvmlDeviceGetMemoryInfo(self._device).used
        except Exception as error:  # no package, no driver, no GPU
            _say(f"peak VRAM is not measured: {error}")

    @contextlib.contextmanager
    def of(self, pid: int) -> Iterator[None]:
        """Watch while a process runs."""
        if self._nvml is None:
            yield
            return
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(pid, over))
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _watch(self, pid: int, over: threading.Event) -> None:
        while not over.wait(SAMPLE_SECONDS):
            used = self._nvml.nvmlDeviceGetMemoryInfo(self._device).used
            self.device_bytes = max(self.device_bytes, used - self._before)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
                if process.pid == pid and process.usedGpuMemory:
                    self.process_bytes = max(self.process_bytes, process.usedGpuMemory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; exit code 1 if one failed."""
    args = _parser().parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cores)
    run = Run(args, Clock(time.monotonic() + args.total), {})
    steps = list(_selected(args))
    if not steps:
        _say(f"no step matches {args.only}; steps are {', '.join(s.name for s in _steps(args))}")
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
    _say(f"{step.name} ...")
    begin = time.monotonic()
    run.clock.step_ends = begin + step.seconds * run.args.scale
    try:
        if run.clock.left() <= 0:
            raise StepError("no time left; give --total more seconds, or fewer --steps")
        found: Record = {"ok": True, **step.work(run)}
        if not found["ok"]:
            _say(f"{step.name}: {found['error']}")
    except StepError as error:
        found = {"ok": False, "error": str(error)}
        _say(f"{step.name} failed: {error}")
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
    parser.add_argument("--seconds", type=float, default=5, metavar="S", help="under each load")
    parser.add_argument("-r", type=int, default=2, metavar="N", help="repetitions")
    parser.add_argument("--total", type=float, default=3600, metavar="S", help="of the whole run")
    parser.add_argument("--scale", type=float, default=1, metavar="X", help="budgets of steps")
    return parser


def _steps(args: argparse.Namespace) -> Iterator[Step]:
    yield Step("limits", 60, _limits)
    for model in args.models.split(","):
        yield Step(f"{model}/make", 240, lambda run, model=model: _make(run, model))
        for policy, names in _steps_of(model).policies.items():
            yield Step(
                f"{model}/{policy}",
                300,
                lambda run, model=model, policy=policy: _plan(run, model, policy),
            )
            for name in names:
                yield Step(
                    f"{model}/{policy}+{name}",
                    SECONDS.get(name, 90),
                    lambda run, m=model, p=policy, name=name: _after(run, m, p, name),
                )


SECONDS = {"load": 240, "series": 60, "profile": 240}
"""Of steps that follow a plan."""


def _steps_of(model: str) -> Steps:
    return MODELS.get(model, ALL_STEPS)


def _after(run: Run, model: str, policy: str, name: str) -> Record:
    """A step that needs a plan."""
    plan = _made_plan(run, model, policy)
    if name in VARIANTS:
        return _variant(run, policy, name, plan)
    if name == "profile":
        return gpu_product.look_at_profile(run, plan, run.folder(model))
    work = {
        "load": _load,
        "series": _series,
        "trace": gpu_product.look_at_trace,
        "page": gpu_product.look_at_page,
    }
    return work[name](run, plan)


def _selected(args: argparse.Namespace) -> Iterator[Step]:
    patterns = args.only.split(",")
    for step in _steps(args):
        if any(fnmatch.fnmatchcase(step.name, pattern) for pattern in patterns):
            yield step


def _limits(run: Run) -> Record:
    """Rates of the CPU, of the link and of VRAM, and which machine it is."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise StepError("no C++ compiler ($CXX, g++, clang++)")
    program = Path(run.args.work) / "gpu_limits"
    program.parent.mkdir(parents=True, exist_ok=True)
    flags = ("-O3", "-march=x86-64-v3", "-std=c++20", "-pthread")
    run.command(compiler, *flags, HERE / "gpu_limits.cc", "-o", program, "-ldl")
    rates = json.loads(run.command(program, run.args.threads, LIMITS_MIB))
    machine = run.atsc("targets")["targets"][0]
    keys = ("cpu_model", "gpu_model", "vram_bytes", "num_cores")
    return {
        "bytes_per_s": rates,
        "machine": {key: machine[key] for key in keys},
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _make(run: Run, model: str) -> Record:
    folder = run.folder(model)
    made = not (folder / "model.onnx").is_file()
    if made:
        options = ("--onnx", "--out", folder, "--ctx", max(4096, run.args.ctx))
        run.command(sys.executable, HERE / "make_model.py", model, *options)
    gpu_product.write_tokenizer(folder)
    size = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
    return {"made": made, "bytes": size}


def _plan(run: Run, model: str, policy: str) -> Record:
    """Compile, measure, and compare. One plan folder a model, so that weights are written once."""
    folder, args = run.folder(model), run.args
    if not (folder / "model.onnx").is_file():
        raise StepError(f"no model in {folder}; run step {model}/make first")
    plan = folder.parent / f"{folder.name}.atsplan"
    budget = () if policy == "gpu" else ("--vram", args.vram or _steps_of(model).vram)
    compiled = run.atsc(
        *("compile", folder, "-o", plan, "--policy", policy, *budget, "--target", args.target),
        *("--ctx", args.ctx, "--chunk", args.chunk, "--threads", args.threads),
    )
    shown = run.atsc("inspect", plan)
    peak = PeakVram()
    tests = ("-p", args.p, "-n", args.n, "-d", args.d, "-r", args.r, "--threads", args.threads)
    bench = run.atsc("bench", plan, *tests, watch=peak)
    predicted = sum(region["predicted_bytes"] for region in shown["vram_regions"])
    headroom = shown["device"]["headroom_bytes"] if shown["device"] else 0
    peak_bytes = peak.process_bytes or peak.device_bytes
    return {
        "policy": policy,
        "compile_seconds": compiled["seconds"],
        "stages": compiled["stages"],
        "vram": {
            "budget_bytes": shown["device"]["budget_bytes"] if shown["device"] else 0,
            "predicted_bytes": predicted - headroom,
            "peak_bytes": peak_bytes,
            "device_peak_bytes": peak.device_bytes,
            "predicted_by_peak": _ratio(predicted - headroom, peak_bytes),
        },
        "placement": _placement(shown),
        "rows": [_row(run, plan, shown, row) for row in bench["rows"]],
    }


def _made_plan(run: Run, model: str, policy: str) -> Path:
    """A model's plan, as the step of this policy left it."""
    plan = run.folder(model).parent / f"{run.folder(model).name}.atsplan"
    manifest = plan / "plan.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["options"]["policy"] != policy:
        raise StepError(f"{plan} is no plan of policy {policy}; run step {model}/{policy} first")
    return plan


def _variant(run: Run, policy: str, name: str, plan: Path) -> Record:
    """The plan that is there, run in another way; depth 0 alone."""
    args = run.args
    tests = ("-p", args.p, "-n", args.n, "-r", args.r, "--threads", args.threads)
    bench = run.atsc("bench", plan, *tests, *VARIANTS[name])
    tokens = {row["test"]: row["avg_ts"] for row in bench["rows"]}
    return {"policy": policy, "tok_s": tokens, "samples": bench["rows"], "flags": VARIANTS[name]}


def _load(run: Run, plan: Path) -> Record:
    """TPOT without and with each load; one that cannot be made does not hold up the others."""
    args = run.args
    options = ("-n", args.n, "--seconds", args.seconds, "--threads", args.threads)
    found: Record = {"load": [], "errors": {}}
    for load in args.loads.split(","):
        try:
            found["load"] += run.atsc("bench", plan, "--load", load, *options)["rows"]
        except StepError as error:
            found["errors"][load] = str(error)
            _say(f"{plan.stem}/tensor+load, {load}: {error}")
    if not found["load"]:
        raise StepError("; ".join(found["errors"].values()))
    return found


def _series(run: Run, plan: Path) -> Record:
    """Busy shares and rates over the last prefill chunk and the last decode step."""
    trace = plan.with_name(f"{plan.stem}-trace.json")
    tests = ("-p", run.args.p, "-n", 16, "-r", 1, "--threads", run.args.threads)
    run.atsc("bench", plan, *tests, "--trace", trace)
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    rounds = {}
    for event in events:
        if event["cat"] == "round":
            rounds[event["name"].split()[0]] = event
    found = {name: series_of(event, events) for name, event in rounds.items()}
    return {"trace": str(trace), "rounds": found}


def series_of(whole: Record, events: Sequence[Record], num_slices: int = NUM_SLICES) -> Record:
    """A round in equal slices: the GPU's busy share and H2D bytes a second in each.

    Args:
        whole: the round's event of a trace; times in microseconds.
        events: all events of the trace.
        num_slices: how many.
    """
    width = whole["dur"] / num_slices
    busy, rate = [0.0] * num_slices, [0.0] * num_slices
    for event in events:
        if event["cat"] not in ("device", "device wait", "copy") or not event["dur"]:
            continue
        for index in range(num_slices):
            begin = whole["ts"] + index * width
            shared = min(event["ts"] + event["dur"], begin + width) - max(event["ts"], begin)
            if shared <= 0:
                continue
            if event["cat"] == "copy":
                rate[index] += event["args"]["bytes"] / event["dur"] * shared / width * 1e6
            else:  # a run lasts through its waits for weights
                busy[index] += (1 if event["cat"] == "device" else -1) * shared / width
    return {"round_us": whole["dur"], "gpu_busy": busy, "h2d_bytes_per_s": rate}


def _placement(shown: Any) -> Record:
    """Units and bytes that a decode step reads on each side."""
    sides: Record = {}
    for side in ("vram", "ram"):
        units = [u for u in shown["units"] if u["residency"] == side and u["cost"]]
        read = sum(sum(unit["cost"]["decode"]["bytes"]) for unit in units)
        sides[side] = {"units": len(units), "read_bytes": read}
    return sides


def _row(run: Run, plan: Path, shown: Any, row: Any) -> Record:
    """One test with its prediction, and the limit of decode: all bytes read once, at full rate."""
    count = row["n_prompt"] or row["n_gen"]
    depth = row["n_depth"] + (0 if row["n_prompt"] else count // 2)
    prompt = ("--prompt", count) if row["n_prompt"] else ()
    found = run.atsc("simulate", plan, "--depth", depth, *prompt) if shown["device"] else None
    predicted = without = None
    if found:
        without = _predicted(found, row)
        predicted = _predicted(found["dynamic"], row) if found["dynamic"] else without
    measured = row["avg_ts"]
    result = {
        "test": row["test"],
        "tok_s": measured,
        "sd": row["stddev_ts"],
        "predicted_tok_s": predicted,
        "predicted_by_measured": _ratio(predicted, measured),
        "predicted_tok_s_without_promotions": without,
    }
    limit = _decode_limit(run, _placement(shown)) if row["n_gen"] else None
    return {**result, "limit_tok_s": limit, "share_of_limit": _ratio(measured, limit)}


def _predicted(rounds: Record, row: Record) -> float:
    """Tokens a second of a test, from what `simulate` says of it."""
    if row["n_prompt"]:
        return float(row["n_prompt"] / rounds["prompt_ns"] * 1e9)
    return float(rounds["decode"]["tokens_per_s"])


def _decode_limit(run: Run, placement: Record) -> float | None:
    """Tokens a second if each side only read its bytes, one after the other; needs `limits`."""
    limits = run.records.get("limits", {}).get("bytes_per_s", {})
    seconds = 0.0
    for side, rate in (("ram", limits.get("cpu")), ("vram", limits.get("vram"))):
        if placement[side]["read_bytes"]:
            if not rate:
                return None
            seconds += placement[side]["read_bytes"] / rate
    return 1 / seconds if seconds else None


def _ratio(value: float | None, other: float | None) -> float | None:
    return round(value / other, 4) if value is not None and other else None


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
            change = f"TPOT {without:.1f} to {under:.1f} ms, {row['increase_percent']:+.0f} %"
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
