"""Every generated CPU kernel equals its operator's numpy reference on the operator's samples.

Float sums may differ in order from the reference, within the sample's tolerance; how a domain is
cut, by how many threads it is run and which outputs are wanted must not change a single bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_runner import Prepared, Schedule, build, can_run, num_rows, prepare, reference, run

from atsc.codegen.cpu import ISA_LEVELS, IsaLevel, template_path
from atsc.codegen.render import template_exists
from atsc.compiler.ops import OpDef, Sample, all_ops
from atsc.compiler.ops.activation import KINDS
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
    for got, want in zip(actual, expected, strict=True):
        tolerance = prepared.sample.tolerance
        if isinstance(want, Q8Array):
            value, scaled_sums, sums = got
            assert np.array_equal(sums, value.codes.astype(np.int32).sum(-1))
            np.testing.assert_allclose(scaled_sums, value.scales * sums, rtol=1e-6)
            assert not value.codes.reshape(len(value.codes), -1)[:, value.width :].any()
            if prepared.op.name == "quantize":
                assert np.array_equal(value.codes, want.codes)
                assert np.array_equal(value.scales, want.scales)
                assert np.array_equal(value.fine.codes, want.fine.codes)
                assert np.array_equal(value.fine.scales, want.fine.scales)
            got, want = value.dequantize(), want.dequantize()
            # One step of one code where float sums put a value on the other side of a tie.
            tolerance = max(tolerance, 2e-3)
        elif isinstance(want, dict):
            rows = num_rows(prepared.sample)
            got = np.stack(got)
            want = np.stack([cache[-rows:] for cache in want[0]])
            tolerance = 1e-4
        error = relative_l2(got, want)
        if not error <= tolerance:
            found.append(f"error {error:.3g} > {tolerance:.3g}")
    return found


def arrays_of(results: Any) -> Iterator[np.ndarray]:
    """All arrays of nested results, in order."""
    if isinstance(results, np.ndarray):
        yield results
    elif isinstance(results, Q8Array):
        yield from (results.codes, results.scales)
        yield from arrays_of(results.fine)
    elif results is not None:
        for result in results:
            yield from arrays_of(result)


def same_bits(first: Any, second: Any) -> bool:
    pairs = zip(arrays_of(first), arrays_of(second), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


SCHEDULES = (
    Schedule(pieces=1, threads=1),
    Schedule(pieces=5, threads=4, seed=1),
    Schedule(pieces=23, threads=3, seed=2, concurrent=True),
)


@pytest.mark.parametrize(("op", "isa"), CASES)
def test_kernels_equal_the_reference(op: OpDef, isa: IsaLevel, tmp_path: Path) -> None:
    if not can_run(isa):
        pytest.skip(f"this CPU has no {isa.name}")
    prepared = [p for sample in op.samples() if (p := prepare(op, sample, isa)) is not None]
    assert prepared
    library = build(prepared, tmp_path)
    failures = []
    for index, case in enumerate(prepared):
        actual, expected = run(case, library), reference(case)
        problems = differences(case, actual, expected if expected[-1] else expected[:-1])
        schedule = SCHEDULES[index % len(SCHEDULES)]
        if not same_bits(actual, run(case, library, schedule)):
            problems.append(f"{schedule} changes the result")
        where = f"sample {index} {dict(case.sample.attrs)} {case.kernel.symbol}"
        failures += [f"{where}: {problem}" for problem in problems]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", [op.name for op in all_ops().values() if len(op.outputs) > 1])
def test_an_unwanted_output_changes_nothing_else(name: str, tmp_path: Path) -> None:
    op, isa = all_ops()[name], ISA_LEVELS[0]
    samples = list(op.samples())[:4]
    both = [prepare(op, sample, isa) for sample in samples]
    single = [
        (place, prepare(op, sample, isa, [place == i for i in range(len(op.outputs))]))
        for sample in samples
        for place in range(len(op.outputs))
    ]
    library = build([case for case in (*both, *(case for _, case in single)) if case], tmp_path)
    for index, (place, case) in enumerate(single):
        whole = both[index // len(op.outputs)]
        assert case is not None and whole is not None
        assert same_bits(run(case, library)[place], run(whole, library)[place])


def test_select_rows_keeps_the_listed_rows(tmp_path: Path) -> None:
    op = all_ops()["select_rows"]
    sample = next(iter(op.samples()))
    case = prepare(op, sample, ISA_LEVELS[0])
    assert case is not None
    library = build([case], tmp_path)
    for rows in ([4], [3, 0], [2, 2, 1, 4, 0, 3]):
        (y,) = run(case, library, logit_rows=np.array(rows))
        assert np.array_equal(y, sample.inputs[0][rows])


def test_activations_are_exact_everywhere(tmp_path: Path) -> None:
    """Element by element, where a norm over random values would hide a bad spot."""
    op, isa = all_ops()["activation"], ISA_LEVELS[0]
    grid = np.linspace(-30, 30, 60_001, dtype=np.float32)
    tiny = np.float32(1e-30) * grid
    far = np.array([0, 88, 89, 120, 1e4, 1e15, 3e38], np.float32)
    x = np.concatenate([grid, tiny, far, -far])[None]
    cases = [prepare(op, Sample({"kind": kind}, (x,)), isa) for kind in KINDS]
    library = build([case for case in cases if case], tmp_path)
    for case in cases:
        assert case is not None
        with np.errstate(over="ignore"):
            (want, _) = reference(case)
        (got,) = run(case, library)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=str(case.sample.attrs))


def test_norms_of_large_values(tmp_path: Path) -> None:
    """Residuals beyond fp16's 65504, and one element that outweighs all others."""
    cases = []
    for name in ("rms_norm", "layer_norm"):
        op = all_ops()[name]
        sample = next(iter(op.samples()))
        x = 3e6 * sample.inputs[0]
        x[:, 7] = 4e8
        sample = dataclasses.replace(sample, inputs=(x, *sample.inputs[1:]))
        case = prepare(op, sample, ISA_LEVELS[0])
        assert case is not None
        cases.append(case)
    library = build(cases, tmp_path)
    for case in cases:
        assert not differences(case, run(case, library), reference(case)[:-1])


def test_every_operator_has_its_templates() -> None:
    missing = [
        f"{op.name}: {stem}"
        for op in all_ops().values()
        for stem in op.templates
        if not template_exists(template_path(stem, ISA_LEVELS[0]))
    ]
    assert not missing
