"""The GPU benchmark without a GPU: steps, budgets, and the figures that it derives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
import gpu_product
import gpu_run
import gpu_steps
import pytest
from gpu_plan import MIB, Shape, write_gpu_plan

from atsc.codegen.transfer_library import load_scheduler
from atsc.compiler import cli, plan
from atsc.passes.retarget import costs_of, scenario_of_rung
from atsc.passes.transfer import with_transfer

Record = dict[str, Any]


@pytest.fixture(autouse=True)
def keep_cores() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


def records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(tmp_path: Path, *more: str) -> tuple[int, list[Record]]:
    out = tmp_path / "out.jsonl"
    code = gpu.main(["--out", str(out), "--work", str(tmp_path), "--threads", "1", *more])
    return code, records(out)


def step(seconds: float, *command: object) -> gpu.Step:
    return gpu.Step("s", seconds, lambda run: {"out": run.command(*command)})


def done(tmp_path: Path, made: gpu.Step) -> Record:
    args = gpu._parser().parse_args(["--work", str(tmp_path)])
    return gpu._do(made, gpu_run.Run(args, gpu_run.Clock(time.monotonic() + 60), {}))


def test_a_step_that_outlasts_its_budget_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = done(tmp_path, step(0.3, "sleep", "30"))
    assert time.monotonic() - begin < 10
    assert (found["ok"], "took longer than its budget" in found["error"]) == (False, True)


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    found = done(tmp_path, step(9, "sh", "-c", "echo noise >&2; echo reason >&2; exit 3"))
    assert (found["ok"], found["error"]) == (False, "exit code 3: reason")
    assert done(tmp_path, step(9, "echo", "fine"))["out"] == "fine\n"


def test_steps_are_selected_and_failures_are_written(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--only", "a/tensor,*/gpu", "--models", "a,b")
    assert code == 1
    assert [record["step"] for record in found] == ["a/tensor", "a/gpu", "b/gpu"]
    assert "run step a/make first" in found[0]["error"]
    code, found = run(tmp_path, "--steps", "*/gpu", "--models", "c", "--total", "0")
    assert (code, len(found)) == (1, 4), "lines are added"
    assert "no time left" in found[-1]["error"]
    assert gpu.main(["--steps", "nothing", "--out", str(tmp_path / "n")]) == 2


@pytest.mark.toolchain
def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_steps, "LIMITS_MIB", 64)
    code, (found,) = run(tmp_path, "--steps", "limits")
    assert code == 0
    assert found["bytes_per_s"]["cpu"] > 1e8
    assert set(found["bytes_per_s"]) == {"cpu", "cpu_beside_h2d", "h2d", "h2d_beside_cpu", "vram"}
    assert len(found["cores"]) == 1


SHAPE = Shape(layers=4, hidden=1024, inner=2048, context=2560, chunk=512)
RATES = {"cpu": 40e9, "vram": 400e9}


def fake_atsc(measured: float, peak_bytes: int) -> Any:
    """inspect and simulate are real, on a plan made by arithmetic; bench answers a figure."""

    def atsc(run: gpu_run.Run, *arguments: object, watch: Any = None) -> Any:
        command, *rest = map(str, arguments)
        if command == "compile":
            folder = Path(rest[rest.index("-o") + 1])
            policy = rest[rest.index("--policy") + 1]
            budget = 325 * MIB if "--vram" in rest else 2048 * MIB
            write_gpu_plan(folder, SHAPE, vram_bytes=budget, policy=policy)
            return {"seconds": 1.5, "stages": []}
        if command == "bench":
            watch.process_bytes = peak_bytes
            rows = [("pp512", 512, 0, 0), ("tg128", 0, 128, 0), ("tg128 @ d2048", 0, 128, 2048)]
            keys = ("test", "n_prompt", "n_gen", "n_depth")
            return {
                "rows": [
                    {**dict(zip(keys, row, strict=True)), "avg_ts": measured, "stddev_ts": 0.5}
                    for row in rows
                ]
            }
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured):
            assert cli.main([command, *rest, "--json"]) == 0
        return json.loads(captured.getvalue())

    return atsc


def measured_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> Record:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.onnx").touch()
    monkeypatch.setattr(gpu_run.Run, "atsc", fake_atsc(100.0, 300 * MIB))
    args = gpu._parser().parse_args(["--work", str(tmp_path)])
    limits = {"limits": {"ok": True, "bytes_per_s": RATES}}
    run = gpu_run.Run(args, gpu_run.Clock(time.monotonic() + 60, time.monotonic() + 60), limits)
    return gpu_steps.measure_plan(run, "m", policy, "325M")


@pytest.mark.toolchain
def test_what_a_plans_step_derives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_plan(tmp_path, monkeypatch, "tensor")
    manifest = plan.load(tmp_path / "m.atsplan")
    assert manifest.device is not None
    needed = manifest.device.rungs[-1].required_bytes - manifest.device.headroom_bytes
    vram = found["vram"]
    assert (vram["budget_bytes"], vram["predicted_bytes"]) == (325 * MIB, needed)
    assert vram["predicted_by_peak"] == pytest.approx(needed / (300 * MIB), abs=1e-4)
    read = {"vram": 0, "ram": 0}
    for unit in manifest.units:
        read[unit.residency] += sum(unit.cost.decode.bytes) if unit.cost else 0
    assert all(found["placement"][side]["read_bytes"] == read[side] > 0 for side in read)
    prefill, decode, deep = found["rows"]
    limit = 1 / (read["ram"] / 40e9 + read["vram"] / 400e9)
    assert decode["limit_tok_s"] == pytest.approx(limit)
    assert decode["share_of_limit"] == pytest.approx(100 / limit, abs=1e-4)
    assert prefill["limit_tok_s"] is None
    scheduler = load_scheduler()
    for row, depth in ((decode, 64), (deep, 2048 + 64)):
        scenario = scenario_of_rung(manifest, costs_of(manifest, depth=depth))
        without, alone = scenario.decode(), "predicted_tok_s_without_promotions"
        assert row[alone] == pytest.approx(without.tokens_per_s)
        moved = with_transfer(scenario, scheduler).decode()
        assert row["predicted_tok_s"] == pytest.approx(moved.tokens_per_s)
        assert row["predicted_by_measured"] == pytest.approx(row["predicted_tok_s"] / 100, abs=1e-4)
    scenario = scenario_of_rung(manifest, costs_of(manifest, depth=0))
    chunk = with_transfer(scenario, scheduler).prefill()
    assert prefill["predicted_tok_s"] == pytest.approx(chunk.tokens_per_s)
    table = gpu._table({"m/tensor": {"ok": True, **found}, "x": {"ok": False, "error": "why"}})
    assert "| m/tensor | 0.29 | pp512 | 100.0 ± 0.5 |" in table
    assert "| x | | why |" in table


def test_predictions_are_with_promotions_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `bench` runs, that is."""
    static = {"prompt_ns": 4e9, "decode": {"tokens_per_s": 10.0}}
    moved = {"prompt_ns": 2e9, "decode": {"tokens_per_s": 15.0}}
    args = gpu._parser().parse_args(["--work", str(tmp_path)])
    run = gpu_run.Run(args, gpu_run.Clock(time.monotonic() + 60), {})
    shown = {"device": {"kind": "cuda"}, "units": []}
    row = {"test": "t", "n_depth": 0, "avg_ts": 12.0, "stddev_ts": 0.0}
    for dynamic, reading, writing in ((moved, 256, 15), (None, 128, 10)):
        document = {**static, "dynamic": dynamic}
        monkeypatch.setattr(gpu_run.Run, "atsc", lambda *_, document=document: document)
        for test, expected, without in (
            ({"n_prompt": 512, "n_gen": 0}, reading, 128),
            ({"n_prompt": 0, "n_gen": 128}, writing, 10),
        ):
            found = gpu_steps._row(run, tmp_path, shown, {**row, **test})
            assert found["predicted_tok_s"] == expected
            assert found["predicted_tok_s_without_promotions"] == without
            assert found["predicted_by_measured"] == pytest.approx(expected / 12, abs=1e-4)


def test_everything_on_the_gpu_takes_no_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured_plan(tmp_path, monkeypatch, "gpu")
    assert found["placement"]["ram"]["units"] == 1, "the embedding"
    assert found["vram"]["budget_bytes"] == 2048 * MIB


def test_a_variant_wants_the_plan_of_its_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_plan(tmp_path, monkeypatch, "tensor")
    args = gpu._parser().parse_args(["--work", str(tmp_path)])
    run = gpu_run.Run(args, gpu_run.Clock(time.monotonic() + 60, time.monotonic() + 60), {})
    asked = []

    def atsc(run: gpu_run.Run, *arguments: object) -> Any:
        asked.append(arguments)
        return {"rows": [{"test": "tg128", "avg_ts": 12.5}]}

    monkeypatch.setattr(gpu_run.Run, "atsc", atsc)
    assert gpu._after(run, "m", "tensor", "synchronous")["tok_s"] == {"tg128": 12.5}
    assert asked[0][-2:] == ("--rounds", "synchronous")
    with pytest.raises(gpu_run.StepError, match="run step m/layer first"):
        gpu._after(run, "m", "layer", "synchronous")


def test_a_load_that_cannot_be_made_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_plan(tmp_path, monkeypatch, "tensor")
    row = {
        "policy": "static",
        "without": {"tpot_median_ms": 40.0},
        "with": {"tpot_median_ms": 50.0, "tpot_second_half_ms": 48.0},
        "increase_percent": 25.0,
        "increase_second_half_percent": 20.0,
    }

    def atsc(
        run: gpu_run.Run, command: str, plan: Path, flag: str, load: str, *more: object
    ) -> Any:
        assert (command, flag, more[:2]) == ("bench", "--load", ("-n", 128))
        if load == "gpu=60":
            raise gpu_run.StepError("no GPU")
        return {"rows": [{**row, "load": load}]}

    monkeypatch.setattr(gpu_run.Run, "atsc", atsc)
    args = gpu._parser().parse_args(["--work", str(tmp_path)])
    run = gpu_run.Run(args, gpu_run.Clock(time.monotonic() + 60, time.monotonic() + 60), {})
    found = gpu._after(run, "m", "tensor", "load")
    assert ([row["load"] for row in found["load"]], found["errors"]) == (
        ["cpu=60"],
        {"gpu=60": "no GPU"},
    )
    table = gpu._table({"m/tensor+load": {"ok": True, **found}})
    shown = "static, cpu=60: TPOT 40.0 to 50.0 ms, +25 %; second half 48.0 ms, +20 %"
    assert f"| m/tensor+load | | {shown} |" in table
    assert "| m/tensor+load | | gpu=60: no GPU |" in table
    args.loads = "gpu=60"
    with pytest.raises(gpu_run.StepError, match="no GPU"):
        gpu._after(run, "m", "tensor", "load")


def test_steps_of_a_plan_follow_it(tmp_path: Path) -> None:
    names = [step.name for step in gpu._steps(gpu._parser().parse_args(["--models", "m"]))]
    assert names[:5] == ["limits", "m/make", "m/tensor", "m/tensor+load", "m/tensor+pp2048"]
    plans = [name.split("+")[0] for name in names[2:]]
    assert [plan for plan, before in zip(plans, ["", *plans], strict=False) if plan != before] == [
        "m/tensor",
        "m/gpu",
        "m/layer",
    ]
    assert {"m/tensor+trace", "m/tensor+page", "m/tensor+profile"} < set(names)
    few = [step.name for step in gpu._steps(gpu._parser().parse_args(["--models", "qwen3-8b"]))]
    assert len(few) == 7 and "qwen3-8b/layer" not in few
    assert gpu._steps_of("qwen3-8b").vram == "4G" and gpu._steps_of("m").vram == "6G"
    places = {name: place for place, name in enumerate(names)}
    assert places["m/gpu"] == places["m/tensor+profile"] + 1, "which leaves another plan behind"


def test_failed_checks_fail_the_step(tmp_path: Path) -> None:
    checks = [gpu_product.check("a", 2, 0, 1), gpu_product.check("b", 1, 0, 1)]
    work = gpu.Step("s", 9, lambda run: gpu_product.judged(checks, figure=3))
    found = done(tmp_path, work)
    assert (found["ok"], found["error"], found["figure"]) == (False, "a is 2", 3)
    table = gpu._table({"s": found})
    assert "| s | | a is 2 |" in table and "1 of 2 checks are right" in table


def test_a_series_splits_events_over_slices() -> None:
    def event(kind: str, begin: float, length: float, **more: Any) -> Record:
        return {"cat": kind, "ts": begin, "dur": length, "args": more}

    events = [
        event("device", 110, 60),
        event("device wait", 102, 8),  # before the run begins
        event("device wait", 120, 10),
        event("copy", 150, 100, bytes=5000),  # half of it after the round
        event("cpu", 100, 100),
    ]
    found = gpu_steps.series_of(event("round", 100, 100), events, 4)
    assert found["gpu_busy"] == pytest.approx([10 / 25, 20 / 25, 20 / 25, 0])
    assert found["h2d_bytes_per_s"] == pytest.approx([0, 0, 50e6, 50e6])


def test_peak_vram_of_a_process() -> None:
    sampled = threading.Event()

    class Nvml:
        used = 1000

        def nvmlDeviceGetMemoryInfo(self, device: object) -> Any:
            Nvml.used += 10
            return type("Info", (), {"used": Nvml.used})

        def nvmlDeviceGetComputeRunningProcesses(self, device: object) -> list[Any]:
            kind = type("Process", (), {})
            ours, other = kind(), kind()
            if Nvml.used >= 1050:
                sampled.set()
            ours.pid, ours.usedGpuMemory = 7, 500
            other.pid, other.usedGpuMemory = 8, 900
            return [ours, other]

    peak = gpu_run.PeakVram()
    peak._nvml, peak._device, peak._before = Nvml(), None, 1000
    with peak.of(7):
        assert sampled.wait(60)
    assert peak.process_bytes == 500
    assert peak.device_bytes == Nvml.used - 1000 >= 50
