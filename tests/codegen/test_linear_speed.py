"""Speed of the linear kernels as ratios that hold on any machine; see benchmarks/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kernels

from atsc.codegen.cpu import ISA_LEVELS
from atsc.compiler.isa import cpu_flags

pytestmark = [pytest.mark.slow, pytest.mark.toolchain]


def measured(folder: Path, level: int, rows: int, isa: str = "avx2") -> kernels.Row:
    options = argparse.Namespace(
        isa=isa,
        threads=[1],
        shapes=["3072x1024"],
        rows=[rows],
        formats=["int4b32"],
        level=level,
        refined=0.1,
        copies_mib=300,
        repeats=9,
    )
    return next(kernels.measure(options, folder))


def test_decode_runs_at_the_speed_of_a_plain_read(tmp_path: Path) -> None:
    assert measured(tmp_path, level=4, rows=1).read_ratio >= 0.85


def test_integer_products_are_twice_as_fast_as_floats(tmp_path: Path) -> None:
    integer = measured(tmp_path, level=4, rows=512).gmac_per_s_a_core
    floats = measured(tmp_path, level=1, rows=512).gmac_per_s_a_core
    assert integer >= 1.8 * floats


@pytest.mark.parametrize("isa", ["avx512", "avx512vnni"])
def test_registers_twice_as_wide_pay(isa: str, tmp_path: Path) -> None:
    if not next(level for level in ISA_LEVELS if level.name == isa).cpu_flags <= cpu_flags():
        pytest.skip(f"this CPU has no {isa}")
    base = measured(tmp_path, level=4, rows=64).gmac_per_s_a_core
    assert measured(tmp_path, level=4, rows=64, isa=isa).gmac_per_s_a_core >= 1.1 * base
