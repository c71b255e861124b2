"""What the sanitizer's words mean; without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import sanitize

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = (
    "========= COMPUTE-SANITIZER\n"
    "========= Error: Race reported between Write access at softmax and Read access at softmax\n"
    "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
)


def finding(log: str, code: int | None, out: str = "") -> sanitize.Finding:
    shown = None if code is None else subprocess.CompletedProcess([], code, out, "")
    return sanitize.finding_of("racecheck", "attention", 1.0, log, shown)


def test_clean_means_that_the_results_are_right_too() -> None:
    assert finding(CLEAN, 0).is_clean
    wrong = finding(CLEAN, 1, "1 failures\nattention: sample 3 differs")
    assert (wrong.defects, wrong.is_clean) == (0, False)
    assert "sample 3 differs" in str(wrong)


def test_defects_are_counted_and_named() -> None:
    found = finding(RACE, sanitize.DEFECTS)
    assert (found.defects, found.is_clean) == (3, False)
    assert "Race reported between Write access at softmax" in found.detail


def test_a_sanitizer_that_does_not_end_is_not_clean() -> None:
    assert "took too long" in finding("", None).detail
    refused = finding("========= COMPUTE-SANITIZER\n", 1, "no such tool")
    assert (refused.defects, refused.is_clean) == (None, False)


def test_what_takes_too_long_is_ended() -> None:
    assert sanitize.run(["sleep", "30"], 0.1) is None


def test_all_operators_with_kernels_are_families() -> None:
    counts = sanitize.families()
    assert {"attention", "linear", "quantize", sanitize.HAND_OFFS} <= set(counts)
    for family, count in counts.items():
        if family == sanitize.HAND_OFFS:
            continue
        (command,) = sanitize.commands_of(family, count, 8, Path(), 90)
        assert 1 <= -(-count // int(str(command[-1]))) <= 16


@pytest.mark.toolchain
def test_hand_offs_are_those_of_the_device_layer(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    commands = list(sanitize.commands_of(sanitize.HAND_OFFS, 0, 8, tmp_path, 90))
    assert [command[2] for command in commands] == list(sanitize.HAND_OFF_TESTS)
    assert all(Path(str(command[0])).is_file() for command in commands)
