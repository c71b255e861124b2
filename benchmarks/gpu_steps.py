"""What gpu.py measures: the machine's limits, and a model's plan, as it is and in other ways."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_product import gpu_work, overlap_of, span, write_tokenizer
from gpu_run import PeakVram, Record, Run, StepError, say

HERE = Path(__file__).resolve().parent
VARIANTS = {
    "pp2048": ("-p", "2048", "-n", "0"),
    "static": ("--transfer", "static"),
    "asynchronous": ("--transfer", "none"),
    "synchronous": ("--transfer", "none", "--rounds", "synchronous"),
}
"""Flags of `atsc bench`."""
NUM_SLICES = 40
LIMITS_MIB = 2048


def measure_limits(run: Run) -> Record:
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


def make_model(run: Run, model: str) -> Record:
    """A model of random weights with a tokenizer, unless it is there."""
    folder = run.folder(model)
    made = not (folder / "model.onnx").is_file()
    if made:
        options = ("--onnx", "--out", folder, "--ctx", max(4096, run.args.ctx))
        run.command(sys.executable, HERE / "make_model.py", model, *options)
    write_tokenizer(folder)
    size = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
    return {"made": made, "bytes": size}


def measure_plan(run: Run, model: str, policy: str, vram: str) -> Record:
    """Compile within `vram`, measure, and compare.

    One plan folder a model, so that weights are written once.
    """
    folder, args = run.folder(model), run.args
    if not (folder / "model.onnx").is_file():
        raise StepError(f"no model in {folder}; run step {model}/make first")
    plan = folder.parent / f"{folder.name}.atsplan"
    budget = () if policy == "gpu" else ("--vram", vram)
    compiled = run.atsc(
        *("compile", folder, "-o", plan, "--policy", policy, *budget, "--target", args.target),
        *("--ctx", args.ctx, "--chunk", args.chunk, "--threads", args.threads),
    )
    shown = run.atsc("inspect", plan)
    peak = PeakVram(run.spare_cores)
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


def made_plan(run: Run, model: str, policy: str) -> Path:
    """A model's plan, as the step of this policy left it."""
    plan = run.folder(model).parent / f"{run.folder(model).name}.atsplan"
    manifest = plan / "plan.json"
    if not manifest.is_file() or json.loads(manifest.read_text())["options"]["policy"] != policy:
        raise StepError(f"{plan} is no plan of policy {policy}; run step {model}/{policy} first")
    return plan


def measure_variant(run: Run, policy: str, name: str, plan: Path) -> Record:
    """The plan that is there, run in another way; depth 0 alone."""
    args = run.args
    tests = ("-p", args.p, "-n", args.n, "-r", args.r, "--threads", args.threads)
    bench = run.atsc("bench", plan, *tests, *VARIANTS[name])
    tokens = {row["test"]: row["avg_ts"] for row in bench["rows"]}
    return {"policy": policy, "tok_s": tokens, "samples": bench["rows"], "flags": VARIANTS[name]}


def measure_under_loads(run: Run, plan: Path) -> Record:
    """TPOT without and with each load; one that cannot be made does not hold up the others."""
    args = run.args
    options = ("-n", args.n, "--seconds", args.seconds, "--threads", args.threads)
    found: Record = {"load": [], "errors": {}}
    for load in args.loads.split(","):
        try:
            found["load"] += run.atsc("bench", plan, "--load", load, *options)["rows"]
        except StepError as error:
            found["errors"][load] = str(error)
            say(f"{plan.stem}/tensor+load, {load}: {error}")
    if not found["load"]:
        raise StepError("; ".join(found["errors"].values()))
    return found


def measure_series(run: Run, plan: Path) -> Record:
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
    work = gpu_work(events)
    copies = [e for e in events if e["cat"] == "copy" and e["dur"]]
    width = whole["dur"] / num_slices
    busy, rate = [], []
    for index in range(num_slices):
        part = (whole["ts"] + index * width, whole["ts"] + (index + 1) * width)
        busy.append(overlap_of(work, [part]) / width)
        copied = sum(e["args"]["bytes"] / e["dur"] * overlap_of([span(e)], [part]) for e in copies)
        rate.append(copied / width * 1e6)
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
