"""What timed units read: numbers like those of a model at work, and their second digits."""

from __future__ import annotations

from pathlib import Path

import hybrid_programs
import numpy as np
import pytest
from device_programs import run_program

from atsc.compiler.ops.quantize import quantize_rows

pytestmark = pytest.mark.toolchain


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("profile") / "profile_test"
    return hybrid_programs.build_program("profile_test", output)


def made(program: Path, *arguments: object) -> bytes:
    file = program.parent / "made"
    shown = run_program(program, *arguments, file, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr
    return file.read_bytes()


def test_host_and_device_read_the_same_in_every_repeat(program: Path) -> None:
    """A tenth of the blocks is refined, and no output of a repeat is another's input."""
    shown = run_program(program, "inputs", timeout=60)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr


@pytest.mark.parametrize(("rows", "width"), [(1, 5120), (1, 576), (512, 1536), (64, 17408)])
def test_a_tenth_of_the_blocks_is_refined(program: Path, rows: int, width: int) -> None:
    data = made(program, "floats", rows, width)
    x = np.frombuffer(data, np.float32).reshape(rows, width)
    fine = quantize_rows(x).fine
    assert fine is not None
    refined = fine.scales > 0
    assert 0.07 < refined.mean() < 0.14
    if rows > 1:
        columns = refined.mean(axis=0)
        assert np.isin(columns > 0.5, [True]).mean() == pytest.approx(0.1, abs=0.02)
        unlike = np.minimum(columns, 1 - columns)
        assert 0.005 < unlike.mean() < 0.015 and (unlike > 0).mean() > 0.3
    ordinary = np.repeat(~refined, 32, axis=1)[:, :width]
    assert abs(x[ordinary].mean()) < 0.05
    assert x[ordinary].std() == pytest.approx(1, abs=0.05)
    assert np.abs(x).max() < 30
    assert data == made(program, "floats", rows, width)


def test_a_cache_holds_finite_halves_of_both_signs(program: Path) -> None:
    halves = np.frombuffer(made(program, "cache", 1 << 16), np.float16)
    assert np.abs(halves).min() >= 0.125 and np.abs(halves).max() < 0.5
    assert 0.45 < (halves < 0).mean() < 0.55
    assert len(np.unique(halves)) > 3000
