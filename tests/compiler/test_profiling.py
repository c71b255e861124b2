"""Measured times without a machine to measure: what is asked, and what is remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atsc.compiler import cli, driver, plan, profiling
from atsc.compiler.profiling import MeasuredTimer
from atsc.passes.placement import Link, Side
from atsc.targets.target import Target, resolve

LINK = {
    "to_device_bytes_per_s": 5e9,
    "to_host_bytes_per_s": 4e9,
    "to_device_beside_cpu_bytes_per_s": 2e9,
    "hand_off_to_device_ns": 7.0,
    "hand_off_to_host_ns": 8.0,
    "cpu_slowdown": 1.25,
    "fixed_device_bytes": 99,
}


class FakePlan:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def profile_unit(self, *question: int) -> int:
        self.asked.append(question)
        return 100 * len(self.asked)

    def profile_link(self) -> dict[str, float]:
        self.asked.append("link")
        return LINK


def ask_all(timer: MeasuredTimer) -> tuple[Any, ...]:
    units = [timer.unit_ns(unit, Side.GPU, 1, 64) for unit in (0, 1, 2)]
    link = (timer.link(Side.GPU), timer.transfer_ns(4000), timer.cpu_share())
    return (*units, *link, timer.fixed_device_bytes())


def test_equal_units_are_timed_once_and_a_second_timer_opens_no_plan() -> None:
    plan, opened = FakePlan(), []

    def open_plan() -> Any:
        opened.append(plan)
        return plan

    first = MeasuredTimer(open_plan, ("a", "b", "a"))
    assert not opened, "not before it is asked"
    found = ask_all(first)
    assert found == (100, 200, 100, Link(7.0, 0.2), 2000, 0.8, 99)
    assert plan.asked == [(0, True, 1, 64), (1, True, 1, 64), "link"]

    opened.clear()
    second = MeasuredTimer(open_plan, ("a", "b", "a"), dict(first.answers))
    assert ask_all(second) == found
    assert not opened
    assert second.unit_ns(2, Side.HOST, 1, 64) == 400
    assert cast(Any, opened) == [plan]


def test_in_decode_some_equal_units_are_timed_on_the_cpu() -> None:
    plan = FakePlan()
    timer = MeasuredTimer(lambda: cast(Any, plan), ("a",) * 8 + ("b",))
    found = [timer.unit_ns(unit, Side.HOST, 1, 0) for unit in range(8)]
    assert found == [100, 150, 200, 250, 300, 300, 300, 300]
    assert plan.asked == [(unit, False, 1, 0) for unit in range(profiling.MOST_TIMED)]
    assert timer.unit_ns(0, Side.HOST, 1, 0) == 300, "nothing is timed twice"
    for _ in range(2):
        assert timer.unit_ns(8, Side.HOST, 1, 0) == 600, "fewer equal ones"
    assert len(plan.asked) == 6


def test_times_are_kept_for_one_way_of_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured with other inputs, or from other code, is not taken for the same."""
    cpu = SimpleNamespace(identity=lambda: "kernels")
    compilation: Any = SimpleNamespace(
        target=Target("here", "avx2"),
        code=SimpleNamespace(cpu=cpu, device=None),
        options=SimpleNamespace(threads=2),
    )
    first = profiling._identity(compilation)
    assert profiling._identity(compilation) == first
    for path in profiling.RUNTIME_SOURCES.glob("profiler*"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(profiling, "RUNTIME_SOURCES", tmp_path)
    assert profiling._identity(compilation) == first, "folders do not matter"
    inputs = tmp_path / "profiler_inputs.cc"
    inputs.write_text(inputs.read_text().replace("kLargeFactor = 8", "kLargeFactor = 9"))
    assert profiling._identity(compilation) != first


@pytest.mark.toolchain
def test_a_plan_for_this_machine_has_what_was_measured_here(
    export: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = dataclasses.replace(
        resolve("auto"), gpu="virtual", gpu_model="virtual device", vram_bytes=1 << 30, num_sms=1
    )
    assert here.source == "detected"
    monkeypatch.setattr(driver, "resolve", lambda _: here)
    monkeypatch.setattr(MeasuredTimer, "link_profile", lambda _: LINK)
    folder = tmp_path / "plan"
    options = ("--ctx", "200", "--chunk", "64", "--vram", "2M", "--threads", "1")
    assert cli.main(["compile", str(export("llama3-int4-cpu")), "-o", str(folder), *options]) == 0
    device = plan.load(folder).device
    assert device is not None
    assert device.link == plan.Link(
        h2d_bytes_per_s=pytest.approx(2e9, rel=1e-3),
        to_gpu_ns=7.0,
        to_gpu_ns_per_byte=0.2,
        to_cpu_ns=8.0,
        to_cpu_ns_per_byte=0.25,
        cpu_share=0.8,
    )
