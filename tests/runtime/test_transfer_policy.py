"""Dynamic transfer at run time: when promotions are chosen anew, and rounds while they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hybrid_programs
import pytest
from device_programs import SANITIZERS, run_program, sanitizer_missing

from atsc.compiler.errors import UsageError
from atsc.runtime.loader import Plan

pytestmark = pytest.mark.toolchain


@pytest.fixture(scope="module")
def policy_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("policy") / "policy_test"
    return hybrid_programs.build_program("policy_test", output)


@pytest.fixture(scope="module")
def choices_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("choices") / "choices_test"
    return hybrid_programs.build_program("choices_test", output)


def check(program: Path, name: str, count: int, seed: int, timeout: float = 120) -> None:
    shown = run_program(program, name, count, seed, program.parent / "weights", timeout=timeout)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr[-4000:]
    assert "WARNING" not in shown.stderr and "ERROR" not in shown.stderr


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("change", 300),
        ("noise", 40),
        ("probe", 10),
        ("interruptions", 3000),
        ("retreat", 20),
        ("turns", 10),
        ("refusal", 10),
        ("fold", 60),
        ("options", 20),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_choosing_anew(policy_test: Path, name: str, count: int, seed: int) -> None:
    """On a simulated clock; policy_test.cc says what must hold."""
    check(policy_test, name, count, seed)


def test_going_back_to_what_was_faster(policy_test: Path) -> None:
    check(policy_test, "mistake", 100, 1)


def test_watching_costs_rounds_next_to_nothing(policy_test: Path) -> None:
    """Less than 1 % of 40 ms; and what differs from the plan for good is asked about once."""
    check(policy_test, "overhead", 2000, 1)


def test_random_choices(choices_test: Path) -> None:
    check(choices_test, "choices", 400, 1)


@pytest.mark.slow
def test_ten_thousand_rounds_of_random_choices(choices_test: Path) -> None:
    check(choices_test, "choices", 10_000, 2, timeout=600)


def test_choices_follow_the_speed_of_the_cpu(choices_test: Path) -> None:
    check(choices_test, "speeds", 2000, 1)


def test_a_device_that_comes_back_late(choices_test: Path) -> None:
    check(choices_test, "late", 2000, 1)


@pytest.mark.parametrize("why", ["damaged", "no_host_memory"])
def test_weights_that_cannot_be_had(choices_test: Path, why: str) -> None:
    check(choices_test, why, 60, 1)


def test_exchanges_that_fail(choices_test: Path) -> None:
    check(choices_test, "torn", 400, 1)


def test_no_memory_for_another_round(choices_test: Path) -> None:
    check(choices_test, "no_memory", 60, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitized(tmp_path: Path, sanitizer: str) -> None:
    """The runtime compiles anew for it; test_sanitizers.py runs rounds of both sides always."""
    flags = SANITIZERS[sanitizer]
    if sanitizer_missing(flags, tmp_path):
        pytest.skip(f"the compiler cannot build for {flags[0]} here")
    program = hybrid_programs.build_program("choices_test", tmp_path / "choices_test", flags)
    check(program, "choices", 300, 3)
    check(program, "damaged", 30, 3)
    check(program, "late", 2000, 3)
    check(program, "no_memory", 30, 3)
    check(program, "speeds", 2000, 3)


def test_options_are_checked(open_tiny: Callable[..., Plan]) -> None:
    with pytest.raises(UsageError, match="transfer is 'always': expected one of load-aware"):
        open_tiny(transfer="always")
    for name in ("drift_threshold", "reschedule_interval"):
        with pytest.raises(UsageError, match=f"{name} is 0: expected a number above 0"):
            open_tiny(**{name: 0})


def test_a_plan_for_the_cpu_never_changes(open_tiny: Callable[..., Plan]) -> None:
    plan = open_tiny(transfer="load-aware")
    plan.forward([1, 2, 3])
    assert plan.take_changes() == []
