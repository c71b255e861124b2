"""Plans of decomposed exports (../shared/exports), on the CPU and on the virtual device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atsc.compiler.driver import CompileOptions, compile_model
from atsc.runtime.loader import load

pytestmark = pytest.mark.toolchain
NAMES = (
    "optimum-tiny-opt",
    pytest.param("optimum-tiny-qwen2", marks=pytest.mark.slow),
    pytest.param("torch-tiny-llama3-op18", marks=pytest.mark.slow),
    pytest.param("torch-tiny-qwen3-op23", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_plans(export: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder, plan_folder = export(name), tmp_path / "m.atsplan"
    expected = np.load(folder / "expected.npz")
    ids, prompt = [int(token) for token in expected["ids"]], int(expected["prompt_len"])
    compile_model(
        CompileOptions(
            model=folder,
            output=plan_folder,
            ctx=len(ids) + 12,
            chunk=64,
            target="virtual",
            vram_bytes=64 << 20,
        )
    )
    for device in (False, True):
        with load(plan_folder, device=device, threads=2) as plan, plan.session() as session:
            assert (plan.device_name is not None) == device
            rows = [session.prefill(ids[:prompt], logits="all")]
            rows += [session.decode(token)[None] for token in ids[prompt:]]
        error = np.concatenate(rows) - expected["logits"]
        assert np.linalg.norm(error) <= 2e-3 * np.linalg.norm(expected["logits"])
