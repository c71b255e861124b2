"""Plans of decomposed exports (../shared/exports), on the CPU and on the virtual device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from plan_logits import plan_logits

pytestmark = pytest.mark.toolchain
NAMES = (
    "optimum-tiny-opt",
    pytest.param("optimum-tiny-qwen2", marks=pytest.mark.slow),
    pytest.param("torch-tiny-llama3-op18", marks=pytest.mark.slow),
    pytest.param("torch-tiny-qwen3-op23", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_plans(export: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    expected = np.load(export(name) / "expected.npz")
    ids, prompt = [int(token) for token in expected["ids"]], int(expected["prompt_len"])
    for logits in plan_logits(export(name), tmp_path, ids, prompt):
        error = logits - expected["logits"]
        assert np.linalg.norm(error) <= 2e-3 * np.linalg.norm(expected["logits"])
