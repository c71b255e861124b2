"""Measuring units and the link with a plan's own kernels, on the CPU and on the virtual device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from tiny_model import CHUNK, CONTEXT, UNIT_NAMES, make_weights, reference

from atsc.compiler.errors import UsageError
from atsc.runtime import capi
from atsc.runtime.loader import Plan, load

pytestmark = pytest.mark.toolchain

LINK_RATE = 25e6


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """The tiny plan without placements, on a device with a slow link."""
    folder = tiny_model.build_plan(tmp_path_factory.mktemp("profile") / "tiny.atsplan", rungs=0)
    device = capi.VirtualDevice(link_bytes_per_s=LINK_RATE)
    with load(folder, threads=2, virtual_device=device) as opened:
        yield opened


def test_it_runs_on_the_cpu(plan: Plan) -> None:
    """The device is open, and holds nothing."""
    assert plan.device_name and plan.placement is None and plan.device_bytes == 0
    expected = reference([1, 2, 3], make_weights())
    np.testing.assert_allclose(plan.forward([1, 2, 3]), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("on_device", [False, True])
def test_units_take_time(plan: Plan, on_device: bool) -> None:
    """A round of the most rows takes longer than one of a single row, wherever."""
    for unit in range(1, len(UNIT_NAMES)):
        few = plan.profile_unit(unit, on_device, 1, 10)
        many = plan.profile_unit(unit, on_device, CHUNK, CONTEXT - CHUNK)
        assert 0 < few < 1e9 and 0 < many < 1e9
    # Of the unit that takes longest, the best of some: other programs may run beside it.
    one, all_rows = (
        min(plan.profile_unit(1, on_device, rows, 60) for _ in range(3)) for rows in (1, CHUNK)
    )
    assert all_rows > one


def test_a_slow_kernel_is_seen_on_the_device_alone(plan: Plan) -> None:
    plan.script_device("kernel linear", 2e6)
    try:
        assert plan.profile_unit(1, True, 1, 10) > 2e6
        # The table never leaves the host, whose time it therefore has. The best of some, since
        # other programs may run beside these.
        for unit, on_device in ((1, False), (0, True)):
            assert min(plan.profile_unit(unit, on_device, 1, 10) for _ in range(5)) < 2e6
    finally:
        plan.script_device("kernel linear", 0)


def test_the_link_has_the_rate_that_it_was_given(plan: Plan) -> None:
    """It is never faster, and not much slower in the best of some profiles."""
    rates = [f"{way}_bytes_per_s" for way in ("to_device", "to_host", "to_device_beside_cpu")]
    payload_ns = 16384 / LINK_RATE * 1e9
    best, round_trip, slowdowns = dict.fromkeys(rates, 0.0), math.inf, list[float]()
    for _ in range(5):
        found = plan.profile_link()
        assert all(found[rate] < 1.05 * LINK_RATE for rate in rates)
        hand_offs = found["hand_off_to_device_ns"] + found["hand_off_to_host_ns"]
        assert hand_offs > 2 * payload_ns
        # Activations, logits and the numbers of a round.
        assert 4000 < found["fixed_device_bytes"] < 20000
        best = {rate: max(best[rate], found[rate]) for rate in rates}
        round_trip = min(round_trip, hand_offs)
        slowdowns.append(found["cpu_slowdown"])  # by noise, some are anything
        is_as_given = min(best.values()) > 0.3 * LINK_RATE and round_trip < 100 * payload_ns
        if is_as_given and 0.2 < slowdowns[-1] < 50:
            break
    assert min(best.values()) > 0.3 * LINK_RATE
    assert round_trip < 100 * payload_ns
    assert any(0.2 < slowdown < 50 for slowdown in slowdowns)
    assert plan.device_bytes == 0


def test_bad_questions_are_refused(plan: Plan, tiny_folder: Path) -> None:
    for unit, rows, position, message in (
        (9, 1, 0, "profile.unit is 9: the plan has 4"),
        (1, CHUNK + 1, 0, "rounds have 1 to 12 rows"),
        (1, 2, CONTEXT - 1, "the context 96 tokens"),
    ):
        with pytest.raises(UsageError, match=message):
            plan.profile_unit(unit, False, rows, position)
    with load(tiny_folder) as cpu:
        assert cpu.profile_unit(1, False, 1, 0) > 0
        with pytest.raises(UsageError, match="has no device"):
            cpu.profile_unit(1, True, 1, 0)
        with pytest.raises(UsageError, match="has no device"):
            cpu.profile_link()
