"""Attention kernels over rounds, contexts, windows and schedules that samples do not list.

A kernel knows its shapes and its window; rows, position and the cache's capacity come with the
call. So a dozen kernels serve all examples, with windows shorter than, equal to and longer than T.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_runner import Schedule, build, prepare, reference, run
from test_kernels import differences, same_bits

from atsc.codegen.cpu import ISA_LEVELS, IsaLevel, template_path
from atsc.codegen.render import template_exists
from atsc.compiler.errors import ModelError
from atsc.compiler.ir import DType, TensorType
from atsc.compiler.isa import cpu_flags
from atsc.compiler.ops import Sample, all_ops
from atsc.compiler.ops.attention import random_sample

pytestmark = pytest.mark.toolchain

OP = all_ops()["attention"]


@dataclass(frozen=True, slots=True)
class Variant:
    """What a kernel is compiled for."""

    heads: int
    kv_heads: int
    size: int
    window: int = 0
    softcap: float = 0.0
    rotary_dim: int | None = None
    interleaved: bool = False
    norm: bool = False
    sinks: bool = False
    packed: bool = True

    def sample(self, rows: int, past: int, seed: int = 0) -> Sample:
        return random_sample(
            np.random.default_rng(seed),
            self.heads,
            self.kv_heads,
            self.size,
            rows,
            past,
            self.window,
            self.softcap,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            norm=self.norm,
            sinks=self.sinks,
            packed=self.packed,
        )


VARIANTS = (
    Variant(9, 3, 64),
    Variant(4, 2, 64, window=64, sinks=True, norm=True, packed=False),
    Variant(5, 1, 80, window=37, rotary_dim=20, interleaved=True),
    Variant(2, 2, 96, softcap=5.0, rotary_dim=36),
    Variant(8, 2, 128, window=200, norm=True),
    Variant(7, 1, 256, softcap=20.0, sinks=True),
    Variant(4, 4, 120),
)
ROWS = (1, 2, 3, 5, 8, 9, 17, 64)
SCHEDULES = (
    Schedule(1, 1),
    Schedule(4, 2, 1),
    Schedule(9, 3, 2),
    Schedule(1 << 10, 4, 3, concurrent=True),
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The kernels of all variants for one ISA level."""

    isa: IsaLevel
    library: ctypes.CDLL

    def check(self, sample: Sample, first: Schedule, second: Schedule) -> None:
        case = prepare(OP, sample, self.isa)
        assert case is not None
        actual = run(case, self.library, first)
        assert np.isfinite(actual[0]).all()
        assert not differences(case, actual, reference(case))
        assert same_bits(actual, run(case, self.library, second))


LEVELS = [isa for isa in ISA_LEVELS if template_exists(template_path(OP.templates[0], isa))]


@pytest.fixture(scope="module", params=LEVELS, ids=lambda isa: isa.name)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    isa = request.param
    if not isa.cpu_flags <= cpu_flags():
        pytest.skip(f"this CPU has no {isa.name}")
    cases = [prepare(OP, v.sample(rows, 0), isa) for v in VARIANTS for rows in (1, 9)]
    return Compiled(isa, build(filter(None, cases), tmp_path_factory.mktemp("kernels")))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    variant=st.sampled_from(VARIANTS),
    rows=st.sampled_from(ROWS),
    past=st.one_of(st.integers(0, 300), st.sampled_from((63, 64, 65, 127, 128, 2100))),
    seed=st.integers(0, 3),
    schedules=st.permutations(SCHEDULES),
)
@example(VARIANTS[1], 1, 63, 0, list(SCHEDULES))  # T equals the window
@example(VARIANTS[1], 1, 64, 0, list(SCHEDULES))  # one token leaves it
@example(VARIANTS[4], 64, 2100, 0, list(SCHEDULES))
@example(VARIANTS[0], 1, 2100, 0, list(SCHEDULES))  # several blocks a split
def test_any_round(
    compiled: Compiled,
    variant: Variant,
    rows: int,
    past: int,
    seed: int,
    schedules: list[Schedule],
) -> None:
    compiled.check(variant.sample(rows, past, seed), schedules[0], schedules[1])


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=("no window", "window"))
def test_a_whole_chunk(compiled: Compiled, variant: Variant) -> None:
    compiled.check(variant.sample(512, 70), SCHEDULES[3], SCHEDULES[0])


def test_heads_that_no_kernel_can_serve_are_refused() -> None:
    for heads, kv_heads, size in ((4, 3, 64), (4, 2, 100)):
        attrs = Variant(heads, kv_heads, size).sample(1, 0).attrs
        with pytest.raises(ModelError, match=f"heads of size {size} on {kv_heads} KV heads"):
            OP.infer(OP.complete(attrs), [TensorType(DType.F32, ("M", 1))])


@pytest.mark.parametrize("rows", [2, 20])
def test_scores_of_large_magnitude_stay_finite(compiled: Compiled, rows: int) -> None:
    """Softmax subtracts the largest score: powers alone would overflow."""
    sample = VARIANTS[0].sample(rows, 130)
    large = (100 * sample.inputs[0], *sample.inputs[1:])
    # A score of a thousand has an error of 1e-4 in float32, which its power makes relative.
    sample = Sample(sample.attrs, large, sample.position, tolerance=1e-3)
    compiled.check(sample, SCHEDULES[0], SCHEDULES[1])


def test_a_group_of_more_heads_than_a_tile_holds(tmp_path: Path) -> None:
    variant, isa = Variant(200, 1, 8), LEVELS[0]
    samples = [variant.sample(rows, 70) for rows in (2, 11)]
    library = build(filter(None, (prepare(OP, sample, isa) for sample in samples)), tmp_path)
    for sample in samples:
        Compiled(isa, library).check(sample, SCHEDULES[0], SCHEDULES[2])
