"""What placements_on_gpu.py places and what it lets pass: no GPU is needed here.

The virtual device has the kernels of the CPU, so that all placements give its very bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_plan import Shape, write_gpu_plan
from placements_on_gpu import check, compare, fixed_placements, is_right, shown

from atsc.compiler import plan
from atsc.compiler.driver import CompileOptions, compile_model
from atsc.passes import partition

MODEL = Path(__file__).parents[1] / "data" / "llama3-int4-cpu" / "model.onnx"


def test_splits_by_layers(tmp_path: Path) -> None:
    write_gpu_plan(tmp_path / "p", Shape(layers=5), vram_bytes=512 << 20)
    manifest = plan.load(tmp_path / "p")
    cases = dict(fixed_placements(manifest))
    assert cases["planned"] is None
    assert set(cases["all on the GPU"] or ()) == {True}
    assert set(cases["none on the GPU"] or ()) == {False}
    for name, chosen in (
        ("first half of the layers", {0, 1}),
        ("second half of the layers", {2, 3, 4, "head"}),
        ("every second layer", {1, 3}),
    ):
        bits = cases[name]
        assert bits is not None and len(bits) == len(manifest.units)
        placed = set()
        for unit, on_device in zip(manifest.units, bits, strict=True):
            if unit.cost:
                key = unit.cost.part if unit.cost.layer is None else unit.cost.layer
                assert on_device == (key in chosen), unit.name
                placed |= {key} if on_device else set()
        assert placed == chosen


@pytest.mark.parametrize(
    ("level", "changes", "right"),
    [
        (1, {"perplexity_ratio": 1.0029}, True),
        (1, {"perplexity_ratio": 1.0031}, False),
        (1, {"perplexity_ratio": 0.9969}, False),
        (4, {"perplexity_ratio": 1.004}, True),
        (4, {"perplexity_ratio": 0.994}, False),
        (4, {"clear_tokens_wrong": 1}, False),
        (4, {"finite": False}, False),
        (4, {"error": "why"}, False),
    ],
)
def test_what_passes(level: int, changes: dict[str, Any], right: bool) -> None:
    result = {"finite": True, "clear_tokens_wrong": 0, "perplexity_ratio": 1.0}
    assert is_right({**result, "standard_error": 0.001, **changes}, True, level) == right
    if "perplexity_ratio" in changes:
        assert is_right({**result, "standard_error": 0.001, **changes}, False, level)


def test_tokens_count_where_the_margin_is_clear() -> None:
    expected = np.array([[0, 1, 9], [8, 8.1, 0]], np.float32)
    found = expected[:, ::-1]
    assert compare(found, expected, 4e-2)["clear_tokens"] == 1
    assert compare(found, expected, 4e-2)["clear_tokens_wrong"] == 1
    assert compare(found, expected, 2e-3)["clear_tokens"] == 2
    assert compare(expected, expected, 2e-3)["clear_tokens_wrong"] == 0


@pytest.mark.toolchain
def test_all_splits_run_on_the_virtual_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(partition, "MIN_UNIT_BYTES", 1)
    output = tmp_path / "p.atsplan"
    compile_model(
        CompileOptions(*(MODEL, output), ctx=128, chunk=32, target="virtual", vram_bytes=64 << 20)
    )
    results = check(output, 1, threads=2, text=None, level=4)
    names = [name for name, _ in fixed_placements(plan.load(output))]
    assert [result["placement"] for result in results] == [*names, "random 0"]
    for result in results:
        assert is_right(result, is_text=True, level=4), result
        assert (result["relative_l2"], result["perplexity_ratio"]) == (0, 1)
        assert result["device_bytes"] == result["predicted_device_bytes"]
    sizes = {result["placement"]: result["device_bytes"] for result in results}
    halves = sizes["first half of the layers"], sizes["second half of the layers"]
    assert sizes["none on the GPU"] < min(halves) and max(halves) < sizes["all on the GPU"]
    assert len(capsys.readouterr().out.splitlines()) == len(results)


def test_lines_of_the_table() -> None:
    result = {"placement": "planned", "perplexity_ratio": 1.0042, "standard_error": 0.001}
    line = shown({**result, "relative_l2": 0.015, "clear_tokens": 9, "clear_tokens_wrong": 0})
    assert "planned" in line and "1.00420 +- 0.00100" in line and "0 of 9 clear" in line
    assert shown({"placement": "random 3", "error": "why"}).endswith("why")
