"""The virtual device: order, hand-offs, cancels, budgets, speeds, misuse; under sanitizers too."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_programs import (
    ROUNDS,
    SANITIZED_ROUNDS,
    SANITIZERS,
    build_program,
    run_program,
    sanitizer_missing,
)

pytestmark = pytest.mark.toolchain

MISUSE = {
    "host_pointer": "test_affine, operand in[1]: 0x",
    "freed": "is in no range: it was freed, or never allocated",
    "past_end": "copy, operand target: 0x",
    "device_pointer": "layers.0.mlp, operand in[3]: 0x",
}


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program("device_test", tmp_path_factory.mktemp("device") / "device_test")


@pytest.mark.parametrize("name", [*ROUNDS, "no_graphs", "speeds"])
def test_virtual(program: Path, name: str) -> None:
    shown = run_program(program, "virtual", name, ROUNDS.get(name, 300))
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr


def test_ten_thousand_rounds(program: Path) -> None:
    shown = run_program(program, "virtual", "hand_offs", 10_000)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_aborts(program: Path, name: str) -> None:
    shown = run_program(program, "virtual", f"misuse_{name}", 1)
    assert shown.returncode == -6, shown.stderr
    (line,) = shown.stderr.splitlines()
    assert MISUSE[name] in line


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitized(tmp_path: Path, sanitizer: str) -> None:
    flags = SANITIZERS[sanitizer]
    if sanitizer_missing(flags, tmp_path):
        pytest.skip(f"the compiler cannot build for {flags[0]} here")
    program = build_program("device_test", tmp_path / "device_test", flags)
    for name, rounds in {**SANITIZED_ROUNDS, "no_graphs": 60}.items():
        shown = run_program(program, "virtual", name, rounds)
        assert (shown.returncode, shown.stdout) == (0, "fine\n"), f"{name}: {shown.stderr[-4000:]}"
        assert "WARNING" not in shown.stderr and "ERROR" not in shown.stderr
