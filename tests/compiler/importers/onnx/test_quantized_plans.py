"""Plans of quantised exports (../shared/exports), on the CPU and on the virtual device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atsc.compiler.driver import CompileOptions, compile_model
from atsc.runtime.loader import load

pytestmark = [pytest.mark.toolchain, pytest.mark.slow]
TWINS = {"phi3long-int4-cpu": "phi3long-int4-cpu", "qwen3-int4qdq-cpu": "qwen3-int4-cpu"}
"""Where the expected logits with float activations are (see test_quantized_rules.py)."""


@pytest.mark.parametrize(("level", "tolerance"), [(1, 2e-3), (4, 4e-2)])
@pytest.mark.parametrize("name", TWINS)
def test_logits_of_plans(
    export: Callable[[str], Path], tmp_path: Path, name: str, level: int, tolerance: float
) -> None:
    plan_folder = tmp_path / "m.atsplan"
    expected = np.load(export(TWINS[name]) / "expected.npz")
    ids, prompt = [int(token) for token in expected["ids"]], int(expected["prompt_len"])
    compile_model(
        CompileOptions(
            model=export(name),
            output=plan_folder,
            ctx=len(ids) + 12,
            chunk=64,
            accuracy_level=level,
            target="virtual",
            vram_bytes=64 << 20,
        )
    )
    for device in (False, True):
        with load(plan_folder, device=device, threads=2) as plan, plan.session() as session:
            assert (plan.device_name is not None) == device
            rows = [session.prefill(ids[:prompt], logits="all")]
            rows += [session.decode(token)[None] for token in ids[prompt:]]
        logits = np.concatenate(rows)
        error = np.linalg.norm(logits - expected["logits"]) / np.linalg.norm(expected["logits"])
        print(f"{name} level {level} device {device}: {error:.2e}")
        assert error <= tolerance
        assert np.mean(logits.argmax(1) == expected["logits"].argmax(1)) >= 0.9
