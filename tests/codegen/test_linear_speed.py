"""Speed of the linear kernels as ratios that hold on any machine with AVX2; see benchmarks/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kernels

pytestmark = [pytest.mark.slow, pytest.mark.toolchain]


def measured(folder: Path, level: int, rows: int) -> kernels.Row:
    options = argparse.Namespace(
        isa="avx2",
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
