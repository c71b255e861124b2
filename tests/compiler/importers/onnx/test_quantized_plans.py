"""Plans of quantised exports (../shared/exports), on the CPU and on the virtual device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plan_logits import plan_logits

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]
TWINS = {"phi3long-int4-cpu": "phi3long-int4-cpu", "qwen3-int4qdq-cpu": "qwen3-int4-cpu"}
"""Where the expected logits with float activations are (see test_quantized_rules.py)."""


@pytest.mark.parametrize(("level", "tolerance"), [(1, 2e-3), (4, 4e-2)])
@pytest.mark.parametrize("name", TWINS)
def test_logits_of_plans(
    export: Callable[[str], Path], tmp_path: Path, name: str, level: int, tolerance: float
) -> None:
    expected = np.load(export(TWINS[name]) / "expected.npz")
    ids, prompt = [int(token) for token in expected["ids"]], int(expected["prompt_len"])
    for logits in plan_logits(export(name), tmp_path, ids, prompt, level):
        error = np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])
        assert error <= tolerance
        assert np.mean(logits.argmax(1) == expected["logits"].argmax(1)) >= 0.9
