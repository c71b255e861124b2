"""Every generated CPU kernel equals its operator's numpy reference on the operator's samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_runner import Prepared, build, num_rows, prepare, reference, run

from atsc.codegen.cpu import ISA_LEVELS, IsaLevel, template_path
from atsc.codegen.render import template_exists
from atsc.compiler.isa import cpu_flags
from atsc.compiler.ops import OpDef, all_ops
from atsc.compiler.ops.quantize import Q8Array

pytestmark = pytest.mark.toolchain

CASES = [
    pytest.param(op, isa, id=f"{op.name}-{isa.name}")
    for op in all_ops().values()
    for isa in ISA_LEVELS
    if any(template_exists(template_path(stem, isa)) for stem in op.templates)
]


def relative_l2(actual: np.ndarray, expected: np.ndarray) -> float:
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(actual.astype(np.float64) - expected)) / (norm or 1.0)


def differences(prepared: Prepared, actual: tuple, expected: tuple) -> list[str]:
    found = []
    tolerance = prepared.sample.tolerance
    for got, want in zip(actual, expected, strict=True):
        if isinstance(want, Q8Array):
            value, scaled_sums, sums = got
            assert np.array_equal(sums, value.codes.astype(np.int32).sum(-1))
            np.testing.assert_allclose(scaled_sums, value.scales * sums, rtol=1e-6)
            got, want = value.dequantize(), want.dequantize()
            # One step of one code where float sums put a value on the other side of a tie.
            tolerance = max(tolerance, 2e-3)
        elif isinstance(want, dict):
            rows = num_rows(prepared.sample)
            got = np.stack(got)
            want = np.stack([cache[-rows:] for cache in want[0]])
            tolerance = 1e-3
        error = relative_l2(got, want)
        if not error <= tolerance:
            found.append(f"error {error:.3g} > {tolerance:.3g}")
    return found


@pytest.mark.parametrize(("op", "isa"), CASES)
def test_kernels_equal_the_reference(op: OpDef, isa: IsaLevel, tmp_path: Path) -> None:
    if not isa.cpu_flags <= cpu_flags():
        pytest.skip(f"this CPU has no {isa.name}")
    prepared = [p for sample in op.samples() if (p := prepare(op, sample, isa)) is not None]
    assert prepared
    library = build(prepared, tmp_path)
    failures = []
    for index, case in enumerate(prepared):
        expected = reference(case)
        if not expected[-1]:
            expected = expected[:-1]
        for problem in differences(case, run(case, library), expected):
            failures.append(
                f"sample {index} {dict(case.sample.attrs)} {case.kernel.symbol}: {problem}"
            )
    assert not failures, "\n".join(failures)


def test_every_operator_has_its_templates() -> None:
    missing = [
        f"{op.name}: {stem}"
        for op in all_ops().values()
        for stem in op.templates
        if not template_exists(template_path(stem, ISA_LEVELS[0]))
    ]
    assert not missing
