"""A sample of ONNX's node tests: none wrong, and no fewer right than before."""

from __future__ import annotations

import pytest
from onnx_nodes import load_cases, run_cases, sample

pytestmark = pytest.mark.toolchain
_NUM_CASES = 150
_FEWEST_RIGHT = 100
"""Raise it with the coverage; what needs TVM does not count, for it may be missing."""


def test_a_sample_of_node_cases_is_right_or_refused() -> None:
    outcomes = run_cases(sample(load_cases(), _NUM_CASES), jobs=2)
    wrong = [f"{o.name}: {o.reason}" for o in outcomes if o.verdict == "wrong"]
    assert not wrong
    assert all(o.reason for o in outcomes if o.verdict == "refused")
    assert sum(o.verdict == "right" for o in outcomes) >= _FEWEST_RIGHT
